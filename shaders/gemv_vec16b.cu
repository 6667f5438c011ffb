// Products with up to four rows, whose time is that of reading b: once, WIDTH elements at a time.
//@ if B_ROWS
// b is dense along n: LANES neighbouring invocations read a part of a row, and SLICES such teams take the inner axis in turn.
const i32 batch = group / TILES_N;
const i32 lane = thread % LANES;
const i32 slice = thread / LANES;
const i32 n = (group % TILES_N * LANES + lane) * WIDTH;
f32 sum[M][WIDTH];
#pragma unroll
for (i32 i = 0; i < M * WIDTH; i++) {
    sum[i / WIDTH][i % WIDTH] = 0.0f;
}
if (n < N) {
    #pragma unroll UNROLL
    for (i32 k = slice; k < K; k += SLICES) {
        const auto y = b_wide(batch, k, n);
        #pragma unroll
        for (i32 m = 0; m < M; m++) {
            const f32 x = a(batch, m, k);
            #pragma unroll
            for (i32 v = 0; v < WIDTH; v++) {
                sum[m][v] += x * f32(y.v[v]);
            }
        }
    }
}
// Add the slices of a warp, then those of all warps.
#pragma unroll
for (i32 m = 0; m < M; m++) {
    __syncthreads();
    #pragma unroll
    for (i32 v = 0; v < WIDTH; v++) {
        #pragma unroll
        for (i32 lanes = LANES; lanes < 32; lanes *= 2) {
            sum[m][v] += __shfl_xor_sync(0xffffffffu, sum[m][v], lanes);
        }
        if (thread % 32 < LANES) {
            partial[(thread / 32 * LANES + lane) * WIDTH + v] = sum[m][v];
        }
    }
    __syncthreads();
    for (i32 j = thread; j < LANES * WIDTH; j += SIZE) {
        f32 total = 0.0f;
        #pragma unroll
        for (i32 warp = 0; warp < SIZE / 32; warp++) {
            total += partial[warp * LANES * WIDTH + j];
        }
        store(batch, m, group % TILES_N * LANES * WIDTH + j, total);
    }
}
//@ else
// b is dense along the inner axis: a warp per column.
const i32 batch = group / TILES_N;
const i32 lane = thread % 32;
const i32 n = group % TILES_N * (SIZE / 32) + thread / 32;
f32 sum[M];
#pragma unroll
for (i32 m = 0; m < M; m++) {
    sum[m] = 0.0f;
}
if (n < N) {
    #pragma unroll 4
    for (i32 k = lane * WIDTH; k < K; k += 32 * WIDTH) {
        const auto y = b_wide(batch, k, n);
        #pragma unroll
        for (i32 m = 0; m < M; m++) {
            #pragma unroll
            for (i32 v = 0; v < WIDTH; v++) {
                sum[m] += a(batch, m, k + v) * f32(y.v[v]);
            }
        }
    }
}
#pragma unroll
for (i32 m = 0; m < M; m++) {
    const auto add = [](f32 p, f32 q) { return p + q; };
    const f32 total = team_fold<32>(sum[m], add, (f32*)nullptr, thread);
    if (lane == 0) {
        store(batch, m, n, total);
    }
}
//@ end
