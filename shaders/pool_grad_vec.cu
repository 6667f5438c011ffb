// WIDTH neighbouring channels per invocation. Of each window that covers a position, an element takes the gradient if it is the first that is
// the maximum.
const i32 e = (group * SIZE + thread) * WIDTH;
if (e < COUNT) {
    const i32 c = e % IN_C;
    const i32 x = e / IN_C % IN_X;
    const i32 y = e / (IN_C * IN_X) % IN_Y;
    const i32 z = e / (IN_C * IN_X * IN_Y) % IN_Z;
    const i32 n = e / (IN_C * IN_X * IN_Y * IN_Z);
    const i32 image = DATA_0 + n * DATA_N + c;
    const auto own = data_wide(image + z * DATA_Z + y * DATA_Y + x * DATA_X);
    f32 sum[WIDTH];
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++) {
        sum[j] = 0.0f;
    }
    for (i32 r = (z + PAD_Z) % STEP_Z; r < KERNEL_Z; r += STEP_Z) {
        const i32 w = z + PAD_Z - r * DILATION_Z;
        for (i32 s = (y + PAD_Y) % STEP_Y; s < KERNEL_Y; s += STEP_Y) {
            const i32 v = y + PAD_Y - s * DILATION_Y;
            for (i32 t = (x + PAD_X) % STEP_X; t < KERNEL_X; t += STEP_X) {
                const i32 u = x + PAD_X - t * DILATION_X;
                const bool on = w >= 0 && v >= 0 && u >= 0 && w % STRIDE_Z == 0 && v % STRIDE_Y == 0 && u % STRIDE_X == 0;
                if (!on || w / STRIDE_Z >= OUT_Z || v / STRIDE_Y >= OUT_Y || u / STRIDE_X >= OUT_X) {
                    continue;
                }
                const auto most = maximum_wide(n, c, w / STRIDE_Z, v / STRIDE_Y, u / STRIDE_X);
                bool takes[WIDTH], any = false;
                #pragma unroll
                for (i32 j = 0; j < WIDTH; j++) {
                    takes[j] = element_of(own, j) == element_of(most, j);
                    any |= takes[j];
                }
                // Elements before it in the same window.
                for (i32 tap = 0; any && tap < (r * KERNEL_Y + s) * KERNEL_X + t; tap++) {
                    const i32 a = w - PAD_Z + tap / (KERNEL_X * KERNEL_Y) * DILATION_Z;
                    const i32 b = v - PAD_Y + tap / KERNEL_X % KERNEL_Y * DILATION_Y;
                    const i32 d = u - PAD_X + tap % KERNEL_X * DILATION_X;
                    if (a >= 0 && a < IN_Z && b >= 0 && b < IN_Y && d >= 0 && d < IN_X) {
                        const auto before = data_wide(image + a * DATA_Z + b * DATA_Y + d * DATA_X);
                        #pragma unroll
                        for (i32 j = 0; j < WIDTH; j++) {
                            takes[j] &= element_of(before, j) != element_of(own, j);
                        }
                    }
                }
                #pragma unroll
                for (i32 j = 0; j < WIDTH; j++) {
                    if (takes[j]) {
                        sum[j] += gradient(n, c + j, w / STRIDE_Z, v / STRIDE_Y, u / STRIDE_X);
                    }
                }
            }
        }
    }
    const i32 plane = IN_Z * IN_Y * IN_X;
    const i32 i = (n * IN_C + c) * plane + (z * IN_Y + y) * IN_X + x;
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++) {
        store(i + j * plane, sum[j]);
    }
}
