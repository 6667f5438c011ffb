// A workgroup computes a tile of TILE_M x TILE_N, each invocation 8 x 8 of it in four quarters. STEP slices of the inner axis at a time
// pass through workgroup memory: one half of it is filled while the other is used.
constexpr i32 ACROSS = TILE_N / 8, THREADS = TILE_M / 8 * ACROSS;
constexpr i32 PITCH_A = TILE_M + 4, PITCH_B = TILE_N + 4;
constexpr i32 LOADS_A = STEP * TILE_M / THREADS, LOADS_B = STEP * TILE_N / THREADS;
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = group / TILES_N % TILES_M * TILE_M;
const i32 n0 = group % TILES_N * TILE_N;
const i32 row = thread / ACROSS * 4;
const i32 column = thread % ACROSS * 4;
value sum[8][8];
#pragma unroll
for (i32 i = 0; i < 64; i++) {
    sum[i / 8][i % 8] = 0;
}
value next_a[LOADS_A], next_b[LOADS_B];
const auto fetch = [&](i32 k0) {
    #pragma unroll
    for (i32 l = 0; l < LOADS_A; l++) {
        const i32 s = thread + l * THREADS;
        const i32 m = s / A_M_STEP % TILE_M;
        const i32 k = s / A_K_STEP % STEP;
        next_a[l] = 0;
        if (m0 + m < M && k0 + k < K) {
            next_a[l] = a(batch, m0 + m, k0 + k);
        }
    }
    #pragma unroll
    for (i32 l = 0; l < LOADS_B; l++) {
        const i32 s = thread + l * THREADS;
        const i32 n = s / B_N_STEP % TILE_N;
        const i32 k = s / B_K_STEP % STEP;
        next_b[l] = 0;
        if (n0 + n < N && k0 + k < K) {
            next_b[l] = b(batch, k0 + k, n0 + n);
        }
    }
};
const auto keep = [&](i32 half) {
    #pragma unroll
    for (i32 l = 0; l < LOADS_A; l++) {
        const i32 s = thread + l * THREADS;
        tile_a[(half * STEP + s / A_K_STEP % STEP) * PITCH_A + s / A_M_STEP % TILE_M] = next_a[l];
    }
    #pragma unroll
    for (i32 l = 0; l < LOADS_B; l++) {
        const i32 s = thread + l * THREADS;
        tile_b[(half * STEP + s / B_K_STEP % STEP) * PITCH_B + s / B_N_STEP % TILE_N] = next_b[l];
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
            x[i] = tile_a[(half * STEP + k) * PITCH_A + row + i / 4 * (TILE_M / 2) + i % 4];
            y[i] = tile_b[(half * STEP + k) * PITCH_B + column + i / 4 * (TILE_N / 2) + i % 4];
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
    const i32 m = row + i / 32 * (TILE_M / 2) + i / 8 % 4;
    const i32 n = column + i % 8 / 4 * (TILE_N / 2) + i % 4;
    store(batch, m0 + m, n0 + n, sum[i / 8][i % 8]);
}
