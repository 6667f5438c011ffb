// Attention with sums in registers. A workgroup of 128 computes ROWS rows of the result, sixteen invocations ROW of them, and walks along
// the keys, COLUMNS at a time: their scores, of which an invocation has COLUMN neighbours, the largest score and the sum of powers so
// far, and the values weighted by the powers. What was summed before is scaled down when a larger score appears. Weights take the place of
// keys in workgroup memory, where four rows of theirs stand elsewhere for each invocation that writes them, so that banks are shared
// evenly. CLUSTER neighbouring workgroups take turns at the keys of the same rows.
constexpr i32 ROW = ROWS / 8, COLUMN = COLUMNS / 16, PIECES = WIDTH / 16 / EACH, SIDE = ROW < 4 ? ROW : 4;
const i32 rank = group % CLUSTER;
const i32 batch = group / CLUSTER / GROUPS;
const i32 m0 = group / CLUSTER % GROUPS * ROWS;
const i32 lane = thread % 16;
const i32 row = thread / 16 * ROW;
f32* const queries = tile;
f32* const keys = queries + K * ROWS;
f32* const values = keys + (K > ROWS ? K : ROWS) * COLUMNS;
const auto weight_at = [&](i32 n, i32 m) {
    return keys + n * ROWS + (m / 4 ^ n / COLUMN) % (ROWS / 4) * 4 + m % 4;
};
//@ if A_WIDE
for (i32 s = thread; s < ROWS * K / 4; s += SIZE) {
    const i32 m = s % ROWS;
    const i32 k = s / ROWS * 4;
    wide<f32, 4> four = {};
    if (m0 + m < M) {
        four = a_wide(batch, m0 + m, k);
    }
    #pragma unroll
    for (i32 v = 0; v < 4; v++) {
        queries[(k + v) * ROWS + m] = four.v[v];
    }
}
//@ else
for (i32 s = thread; s < ROWS * K; s += SIZE) {
    const i32 m = s / A_M_STEP % ROWS;
    const i32 k = s / A_K_STEP % K;
    queries[k * ROWS + m] = m0 + m < M ? a(batch, m0 + m, k) : 0.0f;
}
//@ end
f32 top[ROW], total[ROW], sum[ROW][PIECES * EACH];
#pragma unroll
for (i32 i = 0; i < ROW; i++) {
    top[i] = LOWEST;
    total[i] = 0.0f;
    #pragma unroll
    for (i32 e = 0; e < PIECES * EACH; e++) {
        sum[i][e] = 0.0f;
    }
}
//@ if BAND
for (i32 n0 = first_key(m0) / COLUMNS * COLUMNS + rank * COLUMNS; n0 < end_key(m0 + ROWS); n0 += CLUSTER * COLUMNS) {
//@ else
for (i32 n0 = rank * COLUMNS; n0 < N; n0 += CLUSTER * COLUMNS) {
//@ end
    __syncthreads();
    //@ if B_WIDE
    for (i32 s = thread; s < COLUMNS * K / 4; s += SIZE) {
        const i32 n = s % COLUMNS;
        const i32 k = s / COLUMNS * 4;
        wide<f32, 4> four = {};
        if (n0 + n < N) {
            four = b_wide(batch, k, n0 + n);
        }
        #pragma unroll
        for (i32 v = 0; v < 4; v++) {
            keys[(k + v) * COLUMNS + n] = four.v[v];
        }
    }
    //@ else
    for (i32 s = thread; s < COLUMNS * K; s += SIZE) {
        const i32 n = s / B_N_STEP % COLUMNS;
        const i32 k = s / B_K_STEP % K;
        keys[k * COLUMNS + n] = n0 + n < N ? b(batch, k, n0 + n) : 0.0f;
    }
    //@ end
    //@ if C_WIDE
    for (i32 s = thread; s < COLUMNS * WIDTH / 4; s += SIZE) {
        const i32 n = s / (WIDTH / 4);
        const i32 e = s % (WIDTH / 4) * 4;
        wide<f32, 4> four = {};
        if (n0 + n < N && e < COLUMNS_OUT) {
            four = c_wide(batch, n0 + n, e);
        }
        write(values + n * WIDTH + e, four);
    }
    //@ else
    for (i32 s = thread; s < COLUMNS * WIDTH; s += SIZE) {
        const i32 n = s / WIDTH;
        const i32 e = s % WIDTH;
        values[s] = n0 + n < N && e < COLUMNS_OUT ? c(batch, n0 + n, e) : 0.0f;
    }
    //@ end
    __syncthreads();
    f32 score_of[ROW][COLUMN];
    #pragma unroll
    for (i32 i = 0; i < ROW * COLUMN; i++) {
        score_of[i / COLUMN][i % COLUMN] = 0.0f;
    }
    #pragma unroll 8
    for (i32 k = 0; k < K; k++) {
        const auto y = read<f32, COLUMN>(keys + k * COLUMNS + lane * COLUMN);
        #pragma unroll
        for (i32 side = 0; side < ROW; side += SIDE) {
            const auto x = read<f32, SIDE>(queries + k * ROWS + row + side);
            #pragma unroll
            for (i32 i = 0; i < SIDE * COLUMN; i++) {
                score_of[side + i / COLUMN][i % COLUMN] += x.v[i / COLUMN] * y.v[i % COLUMN];
            }
        }
    }
    __syncthreads();
    #pragma unroll
    for (i32 i = 0; i < ROW; i++) {
        f32 largest = top[i];
        #pragma unroll
        for (i32 j = 0; j < COLUMN; j++) {
            const i32 n = n0 + lane * COLUMN + j;
            if (j % 2 == 0) {
                look(batch, m0 + row + i, n, 0);
            }
            score_of[i][j] = score(batch, m0 + row + i, n, 0, j % 2, score_of[i][j]);
            //@ if RAGGED
            if (n >= N) {
                score_of[i][j] = bitcast<f32>(0xff800000u);
            }
            //@ end
            largest = max(largest, score_of[i][j]);
        }
        #pragma unroll
        for (i32 lanes = 8; lanes > 0; lanes /= 2) {
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        }
        const f32 fade = decay(top[i] - largest);
        top[i] = largest;
        total[i] *= fade;
        #pragma unroll
        for (i32 e = 0; e < PIECES * EACH; e++) {
            sum[i][e] *= fade;
        }
        #pragma unroll
        for (i32 j = 0; j < COLUMN; j++) {
            score_of[i][j] = decay(score_of[i][j] - largest);
            total[i] += score_of[i][j];
        }
    }
    #pragma unroll
    for (i32 j = 0; j < COLUMN; j++) {
        #pragma unroll
        for (i32 side = 0; side < ROW; side += SIDE) {
            wide<f32, SIDE> weights;
            #pragma unroll
            for (i32 i = 0; i < SIDE; i++) {
                weights.v[i] = score_of[side + i][j];
            }
            write(weight_at(lane * COLUMN + j, row + side), weights);
        }
    }
    __syncthreads();
    #pragma unroll 8
    for (i32 n = 0; n < COLUMNS; n++) {
        wide<f32, EACH> y[PIECES];
        #pragma unroll
        for (i32 p = 0; p < PIECES; p++) {
            y[p] = read<f32, EACH>(values + n * WIDTH + (p * 16 + lane) * EACH);
        }
        #pragma unroll
        for (i32 side = 0; side < ROW; side += SIDE) {
            const auto x = read<f32, SIDE>(weight_at(n, row + side));
            #pragma unroll
            for (i32 i = 0; i < SIDE; i++) {
                #pragma unroll
                for (i32 e = 0; e < PIECES * EACH; e++) {
                    sum[side + i][e] += x.v[i] * y[e / EACH].v[e % EACH];
                }
            }
        }
    }
}
#pragma unroll
for (i32 i = 0; i < ROW; i++) {
    #pragma unroll
    for (i32 lanes = 8; lanes > 0; lanes /= 2) {
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], lanes);
    }
}
//@ if CLUSTERED
// Every workgroup writes the results for its keys. Then each combines some of the columns.
constexpr i32 HELD = PIECES * EACH;
__syncthreads();
f32* const kept = tile + thread;
#pragma unroll
for (i32 i = 0; i < ROW; i++) {
    kept[i * SIZE] = top[i];
    kept[(ROW + i) * SIZE] = total[i];
    #pragma unroll
    for (i32 e = 0; e < HELD; e++) {
        kept[(2 * ROW + i * HELD + e) * SIZE] = sum[i][e];
    }
}
meet_cluster();
for (i32 at = rank; at < ROW * HELD; at += CLUSTER) {
    const i32 i = at / HELD;
    const i32 e = at % HELD;
    f32 largest = LOWEST, whole = 0.0f, value = 0.0f;
    #pragma unroll
    for (i32 other = 0; other < CLUSTER; other++) {
        largest = max(largest, neighbours(kept, other)[i * SIZE]);
    }
    #pragma unroll
    for (i32 other = 0; other < CLUSTER; other++) {
        const f32* const theirs = neighbours(kept, other);
        const f32 weight = decay(theirs[i * SIZE] - largest);
        whole += theirs[(ROW + i) * SIZE] * weight;
        value += theirs[(2 * ROW + at) * SIZE] * weight;
    }
    value /= whole;
    //@ if GUARDED
    value = weightless(whole) ? 0.0f : value;
    //@ end
    store(batch, m0 + row + i, (e / EACH * 16 + lane) * EACH + e % EACH, value);
}
// Wait, because a neighbour may still read this workgroup's memory.
meet_cluster();
//@ else
#pragma unroll
for (i32 i = 0; i < ROW; i++) {
    const f32 scale = 1.0f / total[i];
    #pragma unroll
    for (i32 e = 0; e < PIECES * EACH; e++) {
        f32& value = sum[i][e];
        value *= scale;
        //@ if GUARDED
        value = weightless(total[i]) ? 0.0f : value;
        //@ end
    }
    #pragma unroll
    for (i32 e = 0; e < PIECES * EACH; e++) {
        const i32 n = (e / EACH * 16 + lane) * EACH + e % EACH;
        //@ if STORE_WIDE
        if (e % 2 == 0) {
            store_wide(batch, m0 + row + i, n, sum[i][e], sum[i][e + 1]);
        }
        //@ else
        store(batch, m0 + row + i, n, sum[i][e]);
        //@ end
    }
}
//@ end
