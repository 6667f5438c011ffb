// One invocation per element: for few output channels per group. With more of them the product of weights and unfolded
// data is computed by the matmul template.
let i = group * SIZE + thread;
if (i < COUNT) {
    let x = i % OUT_X;
    let y = i / OUT_X % OUT_Y;
    let z = i / (OUT_X * OUT_Y) % OUT_Z;
    let o = i / (OUT_X * OUT_Y * OUT_Z) % OUT_C;
    let n = i / (OUT_X * OUT_Y * OUT_Z * OUT_C);
    let image = DATA_0 + n * DATA_N + o / GROUP_OUT * GROUP_IN * DATA_C;
    let filter_ = WEIGHT_0 + o * WEIGHT_N;
    var sum = 0.0f;
    for (var c = 0; c < GROUP_IN; c++) {
        var part = 0.0f;
        for (var r = 0; r < KERNEL_Z; r++) {
            let w = z * STRIDE_Z + r * DILATION_Z - PAD_Z;
            for (var s = 0; s < KERNEL_Y; s++) {
                let v = y * STRIDE_Y + s * DILATION_Y - PAD_Y;
                for (var t = 0; t < KERNEL_X; t++) {
                    let u = x * STRIDE_X + t * DILATION_X - PAD_X;
                    if (w >= 0 && w < IN_Z && v >= 0 && v < IN_Y && u >= 0 && u < IN_X) {
                        let d = data(image + c * DATA_C + w * DATA_Z + v * DATA_Y + u * DATA_X);
                        part = part + d * weight(filter_ + c * WEIGHT_C + r * WEIGHT_Z + s * WEIGHT_Y + t * WEIGHT_X);
                    }
                }
            }
        }
        sum = sum + part;
    }
    store(i, sum);
}
