// One invocation per element. Elements inside the data are combined, those inside LOW..HIGH are counted.
//@ if CHANNELS_LAST
let e = group * SIZE + thread;
if (e < COUNT) {
    let c = e % OUT_C;
    let x = e / OUT_C % OUT_X;
    let y = e / (OUT_C * OUT_X) % OUT_Y;
    let z = e / (OUT_C * OUT_X * OUT_Y) % OUT_Z;
    let n = e / (OUT_C * OUT_X * OUT_Y * OUT_Z);
    let i = (((n * OUT_C + c) * OUT_Z + z) * OUT_Y + y) * OUT_X + x;
//@ else
let i = group * SIZE + thread;
if (i < COUNT) {
    let x = i % OUT_X;
    let y = i / OUT_X % OUT_Y;
    let z = i / (OUT_X * OUT_Y) % OUT_Z;
    let c = i / (OUT_X * OUT_Y * OUT_Z) % OUT_C;
    let n = i / (OUT_X * OUT_Y * OUT_Z * OUT_C);
//@ end
    let image = DATA_0 + n * DATA_N + c * DATA_C;
    var value = START;
    var count = 0;
    for (var r = 0; r < KERNEL_Z; r++) {
        let w = z * STRIDE_Z + r * DILATION_Z - PAD_Z;
        for (var s = 0; s < KERNEL_Y; s++) {
            let v = y * STRIDE_Y + s * DILATION_Y - PAD_Y;
            for (var t = 0; t < KERNEL_X; t++) {
                let u = x * STRIDE_X + t * DILATION_X - PAD_X;
                if (w >= 0 && w < IN_Z && v >= 0 && v < IN_Y && u >= 0 && u < IN_X) {
                    value = combine(value, data(image + w * DATA_Z + v * DATA_Y + u * DATA_X));
                }
                if (w >= LOW_Z && w < HIGH_Z && v >= LOW_Y && v < HIGH_Y && u >= LOW_X && u < HIGH_X) {
                    count = count + 1;
                }
            }
        }
    }
    store(i, finish(value, count));
}
