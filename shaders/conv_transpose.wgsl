// One invocation per element of the result. It adds up every input that contributes to the element.
let i = group * SIZE + thread;
if (i < COUNT) {
    let x = i % OUT_X;
    let y = i / OUT_X % OUT_Y;
    let z = i / (OUT_X * OUT_Y) % OUT_Z;
    let o = i / (OUT_X * OUT_Y * OUT_Z) % OUT_C;
    let n = i / (OUT_X * OUT_Y * OUT_Z * OUT_C);
    let first = o / GROUP_OUT * GROUP_IN;
    let image = DATA_0 + n * DATA_N + first * DATA_C;
    let filter_ = WEIGHT_0 + first * WEIGHT_N + o % GROUP_OUT * WEIGHT_C;
    var sum = 0.0f;
    for (var r = 0; r < KERNEL_Z; r++) {
        let w = z + PAD_Z - r * DILATION_Z;
        for (var s = 0; s < KERNEL_Y; s++) {
            let v = y + PAD_Y - s * DILATION_Y;
            for (var t = 0; t < KERNEL_X; t++) {
                let u = x + PAD_X - t * DILATION_X;
                let whole = w % STRIDE_Z == 0 && v % STRIDE_Y == 0 && u % STRIDE_X == 0;
                let inside = w / STRIDE_Z < IN_Z && v / STRIDE_Y < IN_Y && u / STRIDE_X < IN_X;
                if (w >= 0 && v >= 0 && u >= 0 && whole && inside) {
                    let source = image + w / STRIDE_Z * DATA_Z + v / STRIDE_Y * DATA_Y + u / STRIDE_X * DATA_X;
                    let by = filter_ + r * WEIGHT_Z + s * WEIGHT_Y + t * WEIGHT_X;
                    var part = 0.0f;
                    for (var c = 0; c < GROUP_IN; c++) {
                        part = part + data(source + c * DATA_C) * weight(by + c * WEIGHT_N);
                    }
                    sum = sum + part;
                }
            }
        }
    }
    store(i, sum);
}
