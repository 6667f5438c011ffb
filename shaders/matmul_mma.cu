// Products of 16-bit floats on tensor cores. Eight warps, two by four, share a tile of TILE_M x TILE_N, of which each computes pieces of
// 16 x 8. 32 slices of the inner axis at a time pass through workgroup memory: one half of it is filled while the other is used.
// Padded rows spread the eight reads of a load over all banks.
constexpr i32 STEP = 32, PITCH = STEP + 8;
constexpr i32 PIECES_M = TILE_M / 32, PIECES_N = TILE_N / 32;
constexpr i32 EACH_A = TILE_M / 64, EACH_B = TILE_N / 64;
//@ if A_ROWS
constexpr i32 PITCH_A = TILE_M + 8, HALF_A = STEP * PITCH_A;
//@ else
constexpr i32 PITCH_A = PITCH, HALF_A = TILE_M * PITCH_A;
//@ end
//@ if B_ROWS
constexpr i32 PITCH_B = TILE_N + 8, HALF_B = STEP * PITCH_B;
//@ else
constexpr i32 PITCH_B = PITCH, HALF_B = TILE_N * PITCH_B;
//@ end
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = group / TILES_N % TILES_M * TILE_M;
const i32 n0 = group % TILES_N * TILE_N;
const i32 lane = thread % 32;
const i32 row = thread / 128 * (TILE_M / 2);
const i32 column = thread / 32 % 4 * (TILE_N / 4);
f32 sum[PIECES_M][PIECES_N][4];
#pragma unroll
for (i32 i = 0; i < PIECES_M * PIECES_N * 4; i++) {
    sum[i / 4 / PIECES_N][i / 4 % PIECES_N][i % 4] = 0.0f;
}
wide<element, 8> next_a[EACH_A], next_b[EACH_B];
const auto fetch = [&](i32 k0) {
    #pragma unroll
    for (i32 l = 0; l < EACH_A; l++) {
        const i32 s = thread + l * 256;
        next_a[l] = {};
        //@ if A_ROWS
        const i32 k = k0 + s / (TILE_M / 8);
        const i32 m = m0 + s % (TILE_M / 8) * 8;
        constexpr i32 ALONG_M = 1;
        //@ else
        const i32 m = m0 + s / 4;
        const i32 k = k0 + s % 4 * 8;
        constexpr i32 ALONG_M = 0;
        //@ end
        //@ if A_WIDE
        if (m < M && k < K) {
            next_a[l] = a_wide(batch, m, k);
        }
        //@ else
        #pragma unroll
        for (i32 v = 0; v < 8; v++) {
            const i32 mv = m + ALONG_M * v;
            const i32 kv = k + (1 - ALONG_M) * v;
            if (mv < M && kv < K) {
                next_a[l].v[v] = element(a(batch, mv, kv));
            }
        }
        //@ end
    }
    #pragma unroll
    for (i32 l = 0; l < EACH_B; l++) {
        const i32 s = thread + l * 256;
        next_b[l] = {};
        //@ if B_ROWS
        const i32 k = k0 + s / (TILE_N / 8);
        const i32 n = n0 + s % (TILE_N / 8) * 8;
        constexpr i32 ALONG_N = 1;
        //@ else
        const i32 n = n0 + s / 4;
        const i32 k = k0 + s % 4 * 8;
        constexpr i32 ALONG_N = 0;
        //@ end
        //@ if B_WIDE
        if (n < N && k < K) {
            next_b[l] = b_wide(batch, k, n);
        }
        //@ else
        #pragma unroll
        for (i32 v = 0; v < 8; v++) {
            const i32 kv = k + (1 - ALONG_N) * v;
            const i32 nv = n + ALONG_N * v;
            if (nv < N && kv < K) {
                next_b[l].v[v] = element(b(batch, kv, nv));
            }
        }
        //@ end
    }
};
const auto keep = [&](i32 half) {
    #pragma unroll
    for (i32 l = 0; l < EACH_A; l++) {
        const i32 s = thread + l * 256;
        //@ if A_ROWS
        write(tile_a + half * HALF_A + s / (TILE_M / 8) * PITCH_A + s % (TILE_M / 8) * 8, next_a[l]);
        //@ else
        write(tile_a + half * HALF_A + s / 4 * PITCH_A + s % 4 * 8, next_a[l]);
        //@ end
    }
    #pragma unroll
    for (i32 l = 0; l < EACH_B; l++) {
        const i32 s = thread + l * 256;
        //@ if B_ROWS
        write(tile_b + half * HALF_B + s / (TILE_N / 8) * PITCH_B + s % (TILE_N / 8) * 8, next_b[l]);
        //@ else
        write(tile_b + half * HALF_B + s / 4 * PITCH_B + s % 4 * 8, next_b[l]);
        //@ end
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
    for (i32 k = 0; k < STEP; k += 16) {
        u32 x[PIECES_M][4], y[PIECES_N / 2][4];
        #pragma unroll
        for (i32 i = 0; i < PIECES_M; i++) {
            //@ if A_ROWS
            const i32 at = (k + lane / 16 * 8 + lane % 8) * PITCH_A + row + i * 16 + lane / 8 % 2 * 8;
            load_transposed(x[i], tile_a + half * HALF_A + at);
            //@ else
            const i32 at = (row + i * 16 + lane % 16) * PITCH_A + k + lane / 16 * 8;
            load_matrices(x[i], tile_a + half * HALF_A + at);
            //@ end
        }
        #pragma unroll
        for (i32 j = 0; j < PIECES_N / 2; j++) {
            //@ if B_ROWS
            const i32 at = (k + lane % 16) * PITCH_B + column + j * 16 + lane / 16 * 8;
            load_transposed(y[j], tile_b + half * HALF_B + at);
            //@ else
            const i32 at = (column + j * 16 + lane / 16 * 8 + lane % 8) * PITCH_B + k + lane / 8 % 2 * 8;
            load_matrices(y[j], tile_b + half * HALF_B + at);
            //@ end
        }
        #pragma unroll
        for (i32 i = 0; i < PIECES_M; i++) {
            #pragma unroll
            for (i32 j = 0; j < PIECES_N; j++) {
                multiply<element>(sum[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
    half ^= 1;
    if (k0 + STEP < K) {
        keep(half);
        __syncthreads();
    }
}
#pragma unroll
for (i32 i = 0; i < PIECES_M; i++) {
    #pragma unroll
    for (i32 j = 0; j < PIECES_N; j++) {
        #pragma unroll
        for (i32 e = 0; e < 4; e++) {
            const i32 m = m0 + row + i * 16 + e / 2 * 8 + lane / 4;
            const i32 n = n0 + column + j * 8 + lane % 4 * 2 + e % 2;
            store(batch, m, n, sum[i][j][e]);
        }
    }
}
