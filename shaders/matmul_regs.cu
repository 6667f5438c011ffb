// A workgroup of 256 computes a tile of 128 x 128, each invocation 8 x 8 of it in four quarters. STEP slices of the inner axis at a time
// pass through workgroup memory: one half of it is filled while the other is used.
constexpr i32 STEP = 8, PITCH = 132;
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = group / TILES_N % TILES_M * 128;
const i32 n0 = group % TILES_N * 128;
const i32 row = thread / 16 * 4;
const i32 column = thread % 16 * 4;
value sum[8][8];
#pragma unroll
for (i32 i = 0; i < 64; i++) {
    sum[i / 8][i % 8] = 0;
}
value next_a[4], next_b[4];
const auto fetch = [&](i32 k0) {
    #pragma unroll
    for (i32 l = 0; l < 4; l++) {
        const i32 s = thread + l * 256;
        const i32 m = s / A_M_STEP % 128;
        const i32 ka = s / A_K_STEP % STEP;
        next_a[l] = 0;
        if (m0 + m < M && k0 + ka < K) {
            next_a[l] = a(batch, m0 + m, k0 + ka);
        }
        const i32 n = s / B_N_STEP % 128;
        const i32 kb = s / B_K_STEP % STEP;
        next_b[l] = 0;
        if (n0 + n < N && k0 + kb < K) {
            next_b[l] = b(batch, k0 + kb, n0 + n);
        }
    }
};
const auto keep = [&](i32 half) {
    #pragma unroll
    for (i32 l = 0; l < 4; l++) {
        const i32 s = thread + l * 256;
        tile_a[(half * STEP + s / A_K_STEP % STEP) * PITCH + s / A_M_STEP % 128] = next_a[l];
        tile_b[(half * STEP + s / B_K_STEP % STEP) * PITCH + s / B_N_STEP % 128] = next_b[l];
    }
};
fetch(0);
keep(0);
__syncthreads();
i32 half = 0;
for (i32 k0 = 0; k0 < K; k0 += STEP) {
    if (k0 + STEP < K) {
        fetch(k0 + STEP);
    }
    #pragma unroll
    for (i32 k = 0; k < STEP; k++) {
        value x[8], y[8];
        #pragma unroll
        for (i32 i = 0; i < 8; i++) {
            x[i] = tile_a[(half * STEP + k) * PITCH + row + i / 4 * 64 + i % 4];
            y[i] = tile_b[(half * STEP + k) * PITCH + column + i / 4 * 64 + i % 4];
        }
        #pragma unroll
        for (i32 i = 0; i < 64; i++) {
            sum[i / 8][i % 8] += x[i / 8] * y[i % 8];
        }
    }
    half ^= 1;
    if (k0 + STEP < K) {
        keep(half);
        __syncthreads();
    }
}
#pragma unroll
for (i32 i = 0; i < 64; i++) {
    const i32 m = row + i / 32 * 64 + i / 8 % 4;
    const i32 n = column + i % 8 / 4 * 64 + i % 4;
    store(batch, m0 + m, n0 + n, sum[i / 8][i % 8]);
}
