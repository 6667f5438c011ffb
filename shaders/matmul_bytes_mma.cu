// Products of bytes on tensor cores. Eight warps, two by four, share a tile of TILE_M x TILE_N, of which each computes pieces of 16 x 8.
// 64 bytes of the inner axis at a time pass through workgroup memory, as words of four: one half of it is filled while the other is used.
// Padded lines spread the eight reads of a load over all banks.
constexpr i32 STEP = 16;
constexpr i32 PIECES_M = TILE_M / 32, PIECES_N = TILE_N / 32;
constexpr i32 EACH_A = TILE_M / 64, EACH_B = TILE_N / 64;
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = group / TILES_N % TILES_M * TILE_M;
const i32 n0 = group % TILES_N * TILE_N;
const i32 lane = thread % 32;
const i32 row = thread / 128 * (TILE_M / 2);
const i32 column = thread / 32 % 4 * (TILE_N / 4);
i32 sum[PIECES_M][PIECES_N][4];
#pragma unroll
for (i32 i = 0; i < PIECES_M * PIECES_N * 4; i++) {
    sum[i / 4 / PIECES_N][i / 4 % PIECES_N][i % 4] = 0;
}
wide<u32, 4> next_a[EACH_A], next_b[EACH_B];
const auto fetch = [&](i32 w0) {
    #pragma unroll
    for (i32 l = 0; l < EACH_A; l++) {
        const i32 s = thread + l * 256;
        const i32 m = m0 + s / 4;
        const i32 w = w0 + s % 4 * 4;
        next_a[l] = {};
        //@ if A_WIDE
        if (m < M && w < WORDS) {
            next_a[l] = a_wide(batch, m, w);
        }
        //@ else
        #pragma unroll
        for (i32 v = 0; v < 4; v++) {
            if (m < M && w + v < WORDS) {
                next_a[l].v[v] = a_word(batch, m, w + v);
            }
        }
        //@ end
    }
    #pragma unroll
    for (i32 l = 0; l < EACH_B; l++) {
        const i32 s = thread + l * 256;
        const i32 n = n0 + s / 4;
        const i32 w = w0 + s % 4 * 4;
        next_b[l] = {};
        //@ if B_WIDE
        if (n < N && w < WORDS) {
            next_b[l] = b_wide(batch, w, n);
        }
        //@ else
        #pragma unroll
        for (i32 v = 0; v < 4; v++) {
            if (n < N && w + v < WORDS) {
                next_b[l].v[v] = b_word(batch, w + v, n);
            }
        }
        //@ end
    }
};
const auto keep = [&](i32 half) {
    #pragma unroll
    for (i32 l = 0; l < EACH_A; l++) {
        const i32 s = thread + l * 256;
        write(tile_a + (half * TILE_M + s / 4) * PITCH + s % 4 * 4, next_a[l]);
    }
    #pragma unroll
    for (i32 l = 0; l < EACH_B; l++) {
        const i32 s = thread + l * 256;
        write(tile_b + (half * TILE_N + s / 4) * PITCH + s % 4 * 4, next_b[l]);
    }
};
fetch(0);
keep(0);
__syncthreads();
i32 half = 0;
for (i32 w0 = 0; w0 < WORDS; w0 += STEP) {
    if (w0 + STEP < WORDS) {
        fetch(w0 + STEP);
    }
    #pragma unroll
    for (i32 w = 0; w < STEP; w += 8) {
        u32 x[PIECES_M][4], y[PIECES_N / 2][4];
        #pragma unroll
        for (i32 i = 0; i < PIECES_M; i++) {
            load_matrices(x[i], tile_a + (half * TILE_M + row + i * 16 + lane % 16) * PITCH + w + lane / 16 * 4);
        }
        #pragma unroll
        for (i32 j = 0; j < PIECES_N / 2; j++) {
            const i32 line = column + j * 16 + lane / 16 * 8 + lane % 8;
            load_matrices(y[j], tile_b + (half * TILE_N + line) * PITCH + w + lane / 8 % 2 * 4);
        }
        #pragma unroll
        for (i32 i = 0; i < PIECES_M; i++) {
            #pragma unroll
            for (i32 j = 0; j < PIECES_N; j++) {
                multiply_bytes<LEFT_UNSIGNED>(sum[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
    half ^= 1;
    if (w0 + STEP < WORDS) {
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
