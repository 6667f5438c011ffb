// Products of 16-bit floats on tensor cores, for operands that can be copied 16 bytes at a time. Four warps, two by two, share a tile of
// TILE_M x TILE_N, of which each computes pieces of 16 x 8. 32 slices of the inner axis at a time pass through workgroup memory: two of its
// three stages are filled while one is used. The position of 16 bytes in a stage depends on their row, so that the eight reads of a load
// are spread over all banks. Sums leave through workgroup memory, too, so that neighbours are stored together.
constexpr i32 STEP = 32, STAGES = 3, STAGE = (TILE_M + TILE_N) * STEP;
constexpr i32 PIECES_M = TILE_M / 32, PIECES_N = TILE_N / 16, PITCH = TILE_N + 8;
// Workgroups run in order along the shorter side of the result, so that many of those that run at the same time read the same operands.
constexpr bool DOWN = TILES_M < TILES_N;
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = (DOWN ? group % TILES_M : group / TILES_N % TILES_M) * TILE_M;
const i32 n0 = (DOWN ? group / TILES_M % TILES_N : group % TILES_N) * TILE_N;
const i32 lane = thread % 32;
const i32 row = thread / 64 * (TILE_M / 2);
const i32 column = thread / 32 % 2 * (TILE_N / 2);
const auto along_k = [](i32 line, i32 k) { return line * STEP + (k / 8 ^ line / 2) % 4 * 8; };
//@ if A_ROWS
const auto at_a = [](i32 m, i32 k) { return k * TILE_M + (m / 8 ^ k % 8) * 8; };
//@ else
const auto at_a = along_k;
//@ end
//@ if B_ROWS
const auto at_b = [](i32 k, i32 n) { return TILE_M * STEP + k * TILE_N + (n / 8 ^ k % 8) * 8; };
//@ else
const auto at_b = [&](i32 k, i32 n) { return TILE_M * STEP + along_k(n, k); };
//@ end
// An invocation copies the same piece of several lines. Lines beyond the operands belong to results that are not stored: the last line
// is read instead.
constexpr i32 PIECES = STEP / 8, LINES = SIZE / PIECES;
const i32 line = thread / PIECES;
const i32 along = thread % PIECES * 8;
//@ if A_ROWS
constexpr i32 PIECES_A = TILE_M / 8, LINES_A = SIZE / PIECES_A;
const i32 down = thread % PIECES_A * 8;
//@ end
//@ if B_ROWS
constexpr i32 PIECES_B = TILE_N / 8, LINES_B = SIZE / PIECES_B;
const i32 across = thread % PIECES_B * 8;
//@ end
//@ if GUARDED
// What lies beyond an operand's axes is zero, and has no address.
const auto copy = [](void* to, const void* from, bool there) { copy_async(to, from, there && from != nullptr); };
//@ else
const auto copy = [](void* to, const void* from, bool there) { copy_async(to, from, there); };
//@ end
const auto fetch = [&](i32 k0, element* stage) {
    const bool there = k0 + along < K;
    const i32 k = there ? k0 + along : 0;
    //@ if A_ROWS
    #pragma unroll
    for (i32 i = 0; i < STEP / LINES_A; i++) {
        const i32 k = thread / PIECES_A + i * LINES_A;
        copy(stage + at_a(down, k), a_at(batch, min(m0 + down, M - 8), min(k0 + k, K - 1)), k0 + k < K);
    }
    //@ else
    #pragma unroll
    for (i32 i = 0; i < TILE_M / LINES; i++) {
        const i32 m = line + i * LINES;
        copy(stage + at_a(m, along), a_at(batch, min(m0 + m, M - 1), k), there);
    }
    //@ end
    //@ if B_ROWS
    #pragma unroll
    for (i32 i = 0; i < STEP / LINES_B; i++) {
        const i32 k = thread / PIECES_B + i * LINES_B;
        copy(stage + at_b(k, across), b_at(batch, min(k0 + k, K - 1), min(n0 + across, N - 8)), k0 + k < K);
    }
    //@ else
    #pragma unroll
    for (i32 i = 0; i < TILE_N / LINES; i++) {
        const i32 n = line + i * LINES;
        copy(stage + at_b(along, n), b_at(batch, k, min(n0 + n, N - 1)), there);
    }
    //@ end
};
f32 sum[PIECES_M][PIECES_N][4];
#pragma unroll
for (i32 i = 0; i < PIECES_M * PIECES_N * 4; i++) {
    sum[i / 4 / PIECES_N][i / 4 % PIECES_N][i % 4] = 0.0f;
}
#pragma unroll
for (i32 s = 0; s < STAGES - 1; s++) {
    if (s * STEP < K) {
        fetch(s * STEP, tile + s * STAGE);
    }
    commit_copies();
}
i32 used = 0;
for (i32 k0 = 0; k0 < K; k0 += STEP) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const i32 ahead = k0 + (STAGES - 1) * STEP;
    if (ahead < K) {
        fetch(ahead, tile + (used + STAGES - 1) % STAGES * STAGE);
    }
    commit_copies();
    const element* const stage = tile + used * STAGE;
    used = (used + 1) % STAGES;
    #pragma unroll
    for (i32 k = 0; k < STEP; k += 16) {
        u32 x[PIECES_M][4], y[PIECES_N / 2][4];
        #pragma unroll
        for (i32 i = 0; i < PIECES_M; i++) {
            //@ if A_ROWS
            load_transposed(x[i], stage + at_a(row + i * 16 + lane / 8 % 2 * 8, k + lane / 16 * 8 + lane % 8));
            //@ else
            load_matrices(x[i], stage + at_a(row + i * 16 + lane % 16, k + lane / 16 * 8));
            //@ end
        }
        #pragma unroll
        for (i32 j = 0; j < PIECES_N / 2; j++) {
            //@ if B_ROWS
            load_transposed(y[j], stage + at_b(k + lane % 16, column + j * 16 + lane / 16 * 8));
            //@ else
            load_matrices(y[j], stage + at_b(k + lane / 8 % 2 * 8, column + j * 16 + lane / 16 * 8 + lane % 8));
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
}
f32* const out = reinterpret_cast<f32*>(tile);
#pragma unroll
for (i32 upper = 0; upper < 2; upper++) {
    __syncthreads();
    if (row == upper * (TILE_M / 2)) {
        #pragma unroll
        for (i32 i = 0; i < PIECES_M * PIECES_N * 2; i++) {
            const f32* const pair_of = sum[i / 2 / PIECES_N][i / 2 % PIECES_N] + i % 2 * 2;
            const i32 m = i / 2 / PIECES_N * 16 + i % 2 * 8 + lane / 4;
            const i32 n = column + i / 2 % PIECES_N * 8 + lane % 4 * 2;
            write(out + m * PITCH + n, wide<f32, 2>{pair_of[0], pair_of[1]});
        }
    }
    __syncthreads();
    for (i32 s = thread; s < TILE_M / 2 * TILE_N; s += SIZE) {
        const i32 m = s / TILE_N;
        const i32 n = s % TILE_N;
        store(batch, m0 + upper * (TILE_M / 2) + m, n0 + n, out[m * PITCH + n]);
    }
}
