// One invocation per element. Of each window that covers it, the gradient is added if the element is the first that is the maximum.
//@ if CHANNELS_LAST
let e = group * SIZE + thread;
if (e < COUNT) {
    let c = e % IN_C;
    let x = e / IN_C % IN_X;
    let y = e / (IN_C * IN_X) % IN_Y;
    let z = e / (IN_C * IN_X * IN_Y) % IN_Z;
    let n = e / (IN_C * IN_X * IN_Y * IN_Z);
    let i = (((n * IN_C + c) * IN_Z + z) * IN_Y + y) * IN_X + x;
//@ else
let i = group * SIZE + thread;
if (i < COUNT) {
    let x = i % IN_X;
    let y = i / IN_X % IN_Y;
    let z = i / (IN_X * IN_Y) % IN_Z;
    let c = i / (IN_X * IN_Y * IN_Z) % IN_C;
    let n = i / (IN_X * IN_Y * IN_Z * IN_C);
//@ end
    let image = DATA_0 + n * DATA_N + c * DATA_C;
    let own = data(image + z * DATA_Z + y * DATA_Y + x * DATA_X);
    var sum = 0.0f;
    for (var r = (z + PAD_Z) % STEP_Z; r < KERNEL_Z; r = r + STEP_Z) {
        let w = z + PAD_Z - r * DILATION_Z;
        for (var s = (y + PAD_Y) % STEP_Y; s < KERNEL_Y; s = s + STEP_Y) {
            let v = y + PAD_Y - s * DILATION_Y;
            for (var t = (x + PAD_X) % STEP_X; t < KERNEL_X; t = t + STEP_X) {
                let u = x + PAD_X - t * DILATION_X;
                let on = w >= 0 && v >= 0 && u >= 0 && w % STRIDE_Z == 0 && v % STRIDE_Y == 0 && u % STRIDE_X == 0;
                if (on && w / STRIDE_Z < OUT_Z && v / STRIDE_Y < OUT_Y && u / STRIDE_X < OUT_X) {
                    if (own == maximum(n, c, w / STRIDE_Z, v / STRIDE_Y, u / STRIDE_X)) {
                        // Elements before it in the same window.
                        var first = true;
                        for (var tap = 0; first && tap < (r * KERNEL_Y + s) * KERNEL_X + t; tap++) {
                            let a = w - PAD_Z + tap / (KERNEL_X * KERNEL_Y) * DILATION_Z;
                            let b = v - PAD_Y + tap / KERNEL_X % KERNEL_Y * DILATION_Y;
                            let d = u - PAD_X + tap % KERNEL_X * DILATION_X;
                            if (a >= 0 && a < IN_Z && b >= 0 && b < IN_Y && d >= 0 && d < IN_X) {
                                first = data(image + a * DATA_Z + b * DATA_Y + d * DATA_X) != own;
                            }
                        }
                        if (first) {
                            sum = sum + gradient(n, c, w / STRIDE_Z, v / STRIDE_Y, u / STRIDE_X);
                        }
                    }
                }
            }
        }
    }
    store(i, sum);
}
