// Products of few tiles, of f32 that lies 16 bytes at a time. Each warp sums its share of the inner axis for all of a tile of TILE_M x 32,
// TILE_M / 4 x 4 per lane: STEP slices at a time, which pass through workgroup memory of its own, where two of three stages are on
// their way while one is used. Warps wait for each other at the end alone, where what they have summed is added. Where 16 bytes of a line
// stand in a stage depends on the line, so that what eight lanes read at once is spread over all banks.
constexpr i32 TILE_N = 32, STEP = 8, STAGES = 3, STAGE = (TILE_M + TILE_N) * STEP, TEAMS = SIZE / 32, ROW = TILE_M / 4;
const i32 batch = group / (TILES_M * TILES_N);
const i32 m0 = group / TILES_N % TILES_M * TILE_M;
const i32 n0 = group % TILES_N * TILE_N;
const i32 lane = thread % 32;
const i32 row = lane / 8;
const i32 column = lane % 8;
f32* const own = tile + thread / 32 * STAGES * STAGE;
const auto along_k = [](i32 line, i32 k) { return line * STEP + (k / 4 ^ line / 4) % 2 * 4; };
//@ if B_ROWS
const auto at_b = [](i32 k, i32 n) { return TILE_M * STEP + k * TILE_N + n; };
const auto place_b = [&](i32 piece) { return at_b(piece * 4 + lane / 8, lane % 8 * 4); };
//@ else
const auto at_b = [&](i32 k, i32 n) { return TILE_M * STEP + along_k(n, k); };
const auto place_b = [&](i32 piece) { return at_b(lane % 2 * 4, piece * 16 + lane / 2); };
//@ end
// What a lane sends of each operand: where from, and how many slices of the inner axis it still has.
constexpr i32 LEFT = TILE_M / 16, RIGHT = TILE_N / 16;
const char* from[LEFT + RIGHT];
i32 left[LEFT + RIGHT];
const i32 first = thread / 32 * STEP;
#pragma unroll
for (i32 p = 0; p < LEFT; p++) {
    const i32 m = m0 + p * 16 + lane / 2;
    from[p] = (const char*)a_at(batch, m < M ? m : 0, 0) + (first + lane % 2 * 4) * 4;
    left[p] = m < M ? K - first - lane % 2 * 4 : 0;
}
const i64 b_step = (const char*)b_at(batch, 1, 0) - (const char*)b_at(batch, 0, 0);
#pragma unroll
for (i32 p = 0; p < RIGHT; p++) {
    //@ if B_ROWS
    const i32 k = first + p * 4 + lane / 8;
    const i32 n = n0 + lane % 8 * 4;
    //@ else
    const i32 k = first + lane % 2 * 4;
    const i32 n = n0 + p * 16 + lane / 2;
    //@ end
    from[LEFT + p] = (const char*)b_at(batch, 0, n < N ? n : 0) + k * b_step;
    left[LEFT + p] = n < N ? K - k : 0;
}
const auto fetch = [&](f32* stage) {
    #pragma unroll
    for (i32 p = 0; p < LEFT + RIGHT; p++) {
        const i32 place = p < LEFT ? along_k(p * 16 + lane / 2, lane % 2 * 4) : place_b(p - LEFT);
        copy_async(stage + place, from[p], left[p] > 0);
        from[p] += TEAMS * STEP * (p < LEFT ? 4 : b_step);
        left[p] -= TEAMS * STEP;
    }
};
f32 sum[ROW][4];
#pragma unroll
for (i32 i = 0; i < ROW * 4; i++) {
    sum[i / 4][i % 4] = 0.0f;
}
#pragma unroll
for (i32 s = 0; s < STAGES - 1; s++) {
    fetch(own + s * STAGE);
    commit_copies();
}
i32 used = 0;
for (i32 k0 = 0; k0 < K; k0 += TEAMS * STEP) {
    wait_copies<STAGES - 2>();
    __syncwarp();
    if (k0 + (STAGES - 1) * TEAMS * STEP < K) {
        fetch(own + (used + STAGES - 1) % STAGES * STAGE);
    }
    commit_copies();
    const f32* const stage = own + used * STAGE;
    used = (used + 1) % STAGES;
    #pragma unroll
    for (i32 k = 0; k < STEP; k += 4) {
        wide<f32, 4> y[4];
        #pragma unroll
        for (i32 v = 0; v < 4; v++) {
            //@ if B_ROWS
            y[v] = read<f32, 4>(stage + at_b(k + v, column * 4));
            //@ else
            y[v] = read<f32, 4>(stage + at_b(k, v * 8 + column));
            //@ end
        }
        #pragma unroll
        for (i32 i = 0; i < ROW; i++) {
            const auto x = read<f32, 4>(stage + along_k(i * 4 + row, k));
            #pragma unroll
            for (i32 v = 0; v < 4; v++) {
                #pragma unroll
                for (i32 j = 0; j < 4; j++) {
                    //@ if B_ROWS
                    sum[i][j] += x.v[v] * y[v].v[j];
                    //@ else
                    sum[i][j] += x.v[v] * y[j].v[v];
                    //@ end
                }
            }
        }
    }
}
wait_copies();
__syncthreads();
#pragma unroll
for (i32 i = 0; i < ROW * 4; i++) {
    //@ if B_ROWS
    const i32 n = column * 4 + i % 4;
    //@ else
    const i32 n = i % 4 * 8 + column;
    //@ end
    tile[(thread / 32 * TILE_M + i / 4 * 4 + row) * TILE_N + n] = sum[i / 4][i % 4];
}
__syncthreads();
#pragma unroll
for (i32 s = thread; s < TILE_M * TILE_N; s += SIZE) {
    f32 total = 0.0f;
    #pragma unroll
    for (i32 t = 0; t < TEAMS; t++) {
        total += tile[t * TILE_M * TILE_N + s];
    }
    store(batch, m0 + s / TILE_N, n0 + s % TILE_N, total);
}
