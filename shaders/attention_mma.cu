// Attention of halves on tensor cores. A workgroup computes ROWS rows of the result. It walks along the keys, STRIPE at a time: a team of
// warps for each COLUMNS of them, in which each warp has 16 rows: their scores, the largest score and the sum of powers so far, and the
// values weighted by the powers, all in registers. What was summed before is scaled down when a larger score appears. Of what eight lanes
// hold side by side, each has two columns in rows `m` and `m + 8`. Values arrive while scores are computed, the next keys while values
// are weighted.
constexpr i32 PITCH_B = DEPTH + 8, PITCH_C = WIDTH + 8;
constexpr i32 WARPS = ROWS / 16, TILES = COLUMNS / 8, PIECES = WIDTH / 8;
const i32 batch = group / GROUPS;
const i32 lane = thread % 32;
const i32 team = thread / 32 / WARPS;
const i32 m = group % GROUPS * ROWS + thread / 32 % WARPS * 16 + lane / 4;
const i32 column = lane % 4 * 2;
element* const tile_b = tile;
element* const tile_c = tile + STRIPE * PITCH_B;
const auto fetch_b = [&](i32 first) {
    //@ if B_WIDE
    for (i32 s = thread; s < STRIPE * DEPTH / 8; s += SIZE) {
        const i32 n = s / (DEPTH / 8);
        const i32 k = s % (DEPTH / 8) * 8;
        const bool there = first + n < N && k < K;
        send(tile_b + n * PITCH_B + k, b_at(batch, there ? k : 0, there ? first + n : 0), there);
    }
    //@ else
    for (i32 s = thread; s < STRIPE * DEPTH; s += SIZE) {
        const i32 n = s / B_N_STEP % STRIPE;
        const i32 k = s / B_K_STEP % DEPTH;
        tile_b[n * PITCH_B + k] = element(first + n < N && k < K ? b(batch, k, first + n) : 0.0f);
    }
    //@ end
};
const auto fetch_c = [&](i32 first) {
    //@ if C_WIDE
    for (i32 s = thread; s < STRIPE * WIDTH / 8; s += SIZE) {
        const i32 n = s / (WIDTH / 8);
        const i32 e = s % (WIDTH / 8) * 8;
        const bool there = first + n < N && e < COLUMNS_OUT;
        send(tile_c + n * PITCH_C + e, c_at(batch, there ? first + n : 0, there ? e : 0), there);
    }
    //@ else
    for (i32 s = thread; s < STRIPE * WIDTH; s += SIZE) {
        const i32 n = s / WIDTH;
        const i32 e = s % WIDTH;
        tile_c[n * PITCH_C + e] = element(first + n < N && e < COLUMNS_OUT ? c(batch, first + n, e) : 0.0f);
    }
    //@ end
};
fetch_b(0);
u32 x[DEPTH / 16][4];
#pragma unroll
for (i32 i = 0; i < DEPTH / 4; i++) {
    const i32 row = m + i % 2 * 8;
    const i32 k = i / 4 * 16 + i / 2 % 2 * 8 + column;
    x[i / 4][i % 4] = 0;
    if (row < M && k < K) {
        //@ if A_WIDE
        x[i / 4][i % 4] = bitcast<u32>(a_wide(batch, row, k));
        //@ else
        x[i / 4][i % 4] = pair<element>(a(batch, row, k), k + 1 < K ? a(batch, row, k + 1) : 0.0f);
        //@ end
    }
}
f32 top[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f}, sum[PIECES][4];
#pragma unroll
for (i32 i = 0; i < PIECES * 4; i++) {
    sum[i / 4][i % 4] = 0.0f;
}
for (i32 n0 = 0; n0 < N; n0 += STRIPE) {
    arrive();
    __syncthreads();
    fetch_c(n0);
    f32 score_of[TILES][4];
    #pragma unroll
    for (i32 j = 0; j < TILES; j += 2) {
        #pragma unroll
        for (i32 i = 0; i < 8; i++) {
            score_of[j + i / 4][i % 4] = 0.0f;
        }
        #pragma unroll
        for (i32 k = 0; k < DEPTH; k += 16) {
            u32 y[4];
            const i32 n = team * COLUMNS + j * 8 + lane / 16 * 8 + lane % 8;
            load_matrices(y, tile_b + n * PITCH_B + k + lane / 8 % 2 * 8);
            multiply<element>(score_of[j], x[k / 16], y[0], y[1]);
            multiply<element>(score_of[j + 1], x[k / 16], y[2], y[3]);
        }
    }
    arrive();
    __syncthreads();
    if (n0 + STRIPE < N) {
        fetch_b(n0 + STRIPE);
    }
    #pragma unroll
    for (i32 half = 0; half < 2; half++) {
        f32 largest = top[half];
        #pragma unroll
        for (i32 j = 0; j < TILES; j++) {
            const i32 n = n0 + team * COLUMNS + j * 8 + column;
            look(batch, m + half * 8, n);
            #pragma unroll
            for (i32 v = 0; v < 2; v++) {
                const f32 s = score(batch, m + half * 8, n + v, v, score_of[j][half * 2 + v]);
                score_of[j][half * 2 + v] = s;
                largest = max(largest, s);
            }
        }
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const f32 fade = decay(top[half] - largest);
        top[half] = largest;
        total[half] *= fade;
        #pragma unroll
        for (i32 j = 0; j < PIECES; j++) {
            sum[j][half * 2] *= fade;
            sum[j][half * 2 + 1] *= fade;
        }
        #pragma unroll
        for (i32 i = 0; i < TILES * 2; i++) {
            f32& s = score_of[i / 2][half * 2 + i % 2];
            s = decay(s - largest);
            total[half] += s;
        }
    }
    #pragma unroll
    for (i32 j = 0; j < TILES; j += 2) {
        u32 weights[4];
        #pragma unroll
        for (i32 i = 0; i < 4; i++) {
            weights[i] = pair<element>(score_of[j + i / 2][i % 2 * 2], score_of[j + i / 2][i % 2 * 2 + 1]);
        }
        #pragma unroll
        for (i32 e = 0; e < PIECES; e += 2) {
            u32 y[4];
            load_transposed(y, tile_c + (team * COLUMNS + j * 8 + lane % 16) * PITCH_C + e * 8 + lane / 16 * 8);
            multiply<element>(sum[e], weights, y[0], y[1]);
            multiply<element>(sum[e + 1], weights, y[2], y[3]);
        }
    }
}
#pragma unroll
for (i32 half = 0; half < 2; half++) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
}
//@ if TEAMS
// The first team collects what the others found in their keys.
constexpr i32 LANES = WARPS * 32, KEPT = 4 + PIECES * 4;
f32* const kept = reinterpret_cast<f32*>(tile) + thread % LANES;
__syncthreads();
if (team > 0) {
    f32* const own = kept + (team - 1) * KEPT * LANES;
    #pragma unroll
    for (i32 half = 0; half < 2; half++) {
        own[half * LANES] = top[half];
        own[(2 + half) * LANES] = total[half];
    }
    #pragma unroll
    for (i32 i = 0; i < PIECES * 4; i++) {
        own[(4 + i) * LANES] = sum[i / 4][i % 4];
    }
}
__syncthreads();
for (i32 other = 0; other < (team == 0 ? TEAMS - 1 : 0); other++) {
    const f32* const theirs = kept + other * KEPT * LANES;
    #pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const f32 largest = max(top[half], theirs[half * LANES]);
        const f32 fade = decay(top[half] - largest);
        const f32 part = decay(theirs[half * LANES] - largest);
        top[half] = largest;
        total[half] = total[half] * fade + theirs[(2 + half) * LANES] * part;
        #pragma unroll
        for (i32 i = 0; i < PIECES * 2; i++) {
            f32& s = sum[i / 2][half * 2 + i % 2];
            s = s * fade + theirs[(4 + i / 2 * 4 + half * 2 + i % 2) * LANES] * part;
        }
    }
}
//@ end
if (team == 0) {
    #pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const f32 scale = 1.0f / total[half];
        #pragma unroll
        for (i32 j = 0; j < PIECES; j++) {
            f32 low = sum[j][half * 2] * scale;
            f32 high = sum[j][half * 2 + 1] * scale;
            //@ if GUARDED
            if (!(total[half] > 0.0f)) {
                low = high = 0.0f;
            }
            //@ end
            //@ if STORE_WIDE
            store_wide(batch, m + half * 8, j * 8 + column, low, high);
            //@ else
            store(batch, m + half * 8, j * 8 + column, low);
            store(batch, m + half * 8, j * 8 + column + 1, high);
            //@ end
        }
    }
}
