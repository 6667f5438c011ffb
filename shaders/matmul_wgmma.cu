// Products of 16-bit floats by wgmma, the instructions of compute capability 9.0, for operands that can be copied 16 bytes at a time along
// the inner axis, of which the right one may be of numbers that are widened on their way. Two groups of four warps share a tile of TILE_M x TILE_N, half of its rows each. 64 slices of the inner axis at a time
// pass through workgroup memory in four stages: while one is multiplied, the others are filled. Sums leave through workgroup memory, too,
// so that neighbours are stored together.
constexpr i32 STEP = 64, STAGES = 4, STAGE = (TILE_M + TILE_N) * STEP, PITCH = TILE_N + 8;
// Workgroups run in order along the shorter side of the result, so that many of those that run at the same time read the same operands.
constexpr bool DOWN = TILES_M < TILES_N;
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = (DOWN ? group % TILES_M : group / TILES_N % TILES_M) * TILE_M;
const i32 n0 = (DOWN ? group / TILES_M % TILES_N : group % TILES_N) * TILE_N;
const i32 row = thread / 128 * (TILE_M / 2);
// An invocation copies the same piece of several lines. Lines beyond the operands belong to results that are not stored: the last line
// is read instead.
constexpr i32 PIECES = STEP / 8, LINES = SIZE / PIECES;
const i32 line = thread / PIECES;
const i32 piece = thread % PIECES;
const auto fetch = [&](i32 k0, element* stage) {
    const bool there = k0 + piece * 8 < K;
    const i32 k = there ? k0 + piece * 8 : 0;
    element* const to = stage + line * STEP + (piece ^ line % 8) * 8;
    #pragma unroll
    for (i32 i = 0; i < TILE_M / LINES; i++) {
        copy_async(to + i * LINES * STEP, a_at(batch, min(m0 + line + i * LINES, M - 1), k), there);
    }
    //@ if B_WIDENED
    //@ else
    #pragma unroll
    for (i32 i = 0; i < TILE_N / LINES; i++) {
        copy_async(to + (TILE_M + i * LINES) * STEP, b_at(batch, k, min(n0 + line + i * LINES, N - 1)), there);
    }
    //@ end
};
//@ if B_WIDENED
// Numbers of the right operand are read a stage before they are widened: products of the stage between run meanwhile.
typename numbers_of<BITS>::octet held[TILE_N / LINES];
f32 zeros[TILE_N / LINES], scales[TILE_N / LINES];
const auto read_numbers = [&](i32 k0) {
    const i32 k = min(k0 + piece * 8, WORDS * PER - 8);
    const i32 block = k / (BLOCK * PER);
    #pragma unroll
    for (i32 i = 0; i < TILE_N / LINES; i++) {
        const i32 n = min(n0 + line + i * LINES, N - 1);
        held[i] = octet_at(n, k / PER);
        zeros[i] = zero_point(n, block);
        scales[i] = scale(n, block);
    }
};
const auto widen_numbers = [&](i32 k0, element* stage) {
    element* const to = stage + (TILE_M + line) * STEP + (piece ^ line % 8) * 8;
    #pragma unroll
    for (i32 i = 0; i < TILE_N / LINES; i++) {
        write(to + i * LINES * STEP, k0 + piece * 8 < K ? eight(held[i].v, zeros[i], scales[i]) : wide<element, 8>{});
    }
};
//@ end
f32 sum[TILE_N / 2];
#pragma unroll
for (i32 i = 0; i < TILE_N / 2; i++) {
    sum[i] = 0.0f;
}
#pragma unroll
for (i32 s = 0; s < STAGES - 1; s++) {
    if (s * STEP < K) {
        fetch(s * STEP, tile + s * STAGE);
        //@ if B_WIDENED
        read_numbers(s * STEP);
        widen_numbers(s * STEP, tile + s * STAGE);
        //@ end
    }
    commit_copies();
}
//@ if B_WIDENED
read_numbers((STAGES - 1) * STEP);
//@ end
i32 used = 0;
for (i32 k0 = 0; k0 < K; k0 += STEP) {
    wait_copies<STAGES - 2>();
    show_tiles();
    wait_tiles();
    __syncthreads();
    const element* const stage = tile + used * STAGE;
    begin_tiles();
    #pragma unroll
    for (i32 k = 0; k < STEP; k += 16) {
        multiply_tiles(sum, stage + row * STEP + k, stage + TILE_M * STEP + k);
    }
    commit_tiles();
    const i32 ahead = k0 + (STAGES - 1) * STEP;
    if (ahead < K) {
        fetch(ahead, tile + (used + STAGES - 1) % STAGES * STAGE);
        //@ if B_WIDENED
        widen_numbers(ahead, tile + (used + STAGES - 1) % STAGES * STAGE);
        read_numbers(ahead + STEP);
        //@ end
    }
    commit_copies();
    used = (used + 1) % STAGES;
}
wait_tiles();
__syncthreads();
f32* const out = reinterpret_cast<f32*>(tile);
const i32 lane = thread % 32;
#pragma unroll
for (i32 i = 0; i < TILE_N / 4; i++) {
    const i32 m = row + thread / 32 % 4 * 16 + i % 2 * 8 + lane / 4;
    const i32 n = i / 2 * 8 + lane % 4 * 2;
    write(out + m * PITCH + n, wide<f32, 2>{sum[2 * i], sum[2 * i + 1]});
}
__syncthreads();
#pragma unroll 8
for (i32 s = thread; s < TILE_M * TILE_N; s += SIZE) {
    const i32 m = s / TILE_N;
    const i32 n = s % TILE_N;
    store(batch, m0 + m, n0 + n, out[m * PITCH + n]);
}
