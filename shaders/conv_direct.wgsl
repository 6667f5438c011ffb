// One invocation per strip of results along y, for several channels at a time. A row of data is read once for all windows of the strip
// that contain it, and a weight once for the whole strip. A convolution with more outputs per group is a product of weights and
// unfolded data instead, which the matmul templates compute.
let i = group * SIZE + thread;
if (i < COUNT) {
    let o = (i / BLOCK_STEP % BLOCKS * LANES + i % LANES) * WIDTH;
    let x = i / X_STEP % OUT_X;
    let y = i / STRIP_STEP % STRIPS * STRIP;
    let z = i / Z_STEP % OUT_Z;
    let n = i / N_STEP;
    //@ if TRANSPOSED
    let v = y / STRIDE_Y;
    let filter_ = WEIGHT_0 + o / GROUP_OUT * GROUP_IN * WEIGHT_N + o % GROUP_OUT * WEIGHT_C;
    let channel = WEIGHT_N;
    //@ else
    let v = y * STRIDE_Y - PAD_Y;
    let filter_ = WEIGHT_0 + o * WEIGHT_N;
    let channel = WEIGHT_C;
    //@ end
    let image = DATA_0 + n * DATA_N + o / GROUP_OUT * GROUP_IN * DATA_C + v * DATA_Y;
    //@ each sum
    var sum$ = ZERO;
    //@ end
    for (var c = 0; c < GROUP_IN; c++) {
        for (var r = 0; r < KERNEL_Z; r++) {
            //@ if TRANSPOSED
            let deep = z + PAD_Z - r * DILATION_Z;
            let w = select(-1, deep / STRIDE_Z, deep >= 0 && deep % STRIDE_Z == 0);
            //@ else
            let w = z * STRIDE_Z + r * DILATION_Z - PAD_Z;
            //@ end
            for (var t = 0; t < KERNEL_X; t++) {
                //@ if TRANSPOSED
                let wide = x + PAD_X - t * DILATION_X;
                let u = select(-1, wide / STRIDE_X, wide >= 0 && wide % STRIDE_X == 0);
                //@ else
                let u = x * STRIDE_X + t * DILATION_X - PAD_X;
                //@ end
                if (w >= 0 && w < IN_Z && u >= 0 && u < IN_X) {
                    let start = image + c * DATA_C + w * DATA_Z + u * DATA_X;
                    let by = filter_ + c * channel + r * WEIGHT_Z + t * WEIGHT_X;
                    //@ each tap
                    let tap$ = weight(by + $ * WEIGHT_Y);
                    //@ end
                    //@ each row
                    let row$ = data(start + DOWN * DATA_Y, INSIDE);
                    //@ end
                    //@ each term
                    SUM = SUM + ROW * TAP;
                    //@ end
                }
            }
        }
    }
    //@ each sum
    finish(n, o, z, y + $, x, sum$);
    //@ end
}
