// Attention of a few rows, whose time is that of reading keys and values: 16 bytes at a time where they are aligned. A workgroup computes
// ROWS rows of the result and walks along the keys, COLUMNS at a time. LANES invocations share a key and add their parts of the score in
// workgroup memory. Then PARTS invocations share four columns of the values: each takes every PARTS-th value. A larger score scales down
// earlier sums. Indices outside are replaced by the last row, key or column. The workgroups of a CLUSTER take the keys of these rows in
// turn.
constexpr i32 KEYS = SIZE / LANES, PASSES = COLUMNS / KEYS;
const i32 rank = group % CLUSTER;
const i32 batch = group / CLUSTER / GROUPS;
const i32 from_m = group / CLUSTER % GROUPS * ROWS;
const i32 lane = thread / LANE_STEP % LANES;
const i32 key = thread / KEY_STEP % KEYS;
const i32 part = thread / ACROSS;
const i32 column = min(thread % ACROSS, WIDTH - 1) * 4;
const auto finish = [&](i32 m, i32 n, f32 value, f32 whole) {
    //@ if GUARDED
    store(batch, m, n, weightless(whole) ? 0.0f : value / whole);
    //@ else
    store(batch, m, n, value / whole);
    //@ end
};
for (i32 s = thread; s < ROWS * DEPTH * 4; s += SIZE) {
    queries[s] = a(batch, min(from_m + s / (DEPTH * 4), M - 1), s % (DEPTH * 4));
}
f32 top[ROWS], total[ROWS], sum[ROWS][4];
#pragma unroll
for (i32 i = 0; i < ROWS; i++) {
    top[i] = LOWEST;
    total[i] = 0.0f;
    #pragma unroll
    for (i32 v = 0; v < 4; v++) {
        sum[i][v] = 0.0f;
    }
}
__syncthreads();
//@ if BAND
for (i32 from_n = first_key(from_m) / COLUMNS * COLUMNS + rank * COLUMNS; from_n < end_key(from_m + ROWS);
     from_n += CLUSTER * COLUMNS) {
//@ else
for (i32 from_n = rank * COLUMNS; from_n < N; from_n += CLUSTER * COLUMNS) {
//@ end
    f32 product[ROWS][PASSES];
    #pragma unroll
    for (i32 i = 0; i < ROWS * PASSES; i++) {
        product[i / PASSES][i % PASSES] = 0.0f;
    }
    #pragma unroll 2
    for (i32 k = lane; k < DEPTH; k += LANES) {
        wide<f32, 4> four[PASSES];
        #pragma unroll
        for (i32 pass = 0; pass < PASSES; pass++) {
            const i32 n = min(from_n + key + pass * KEYS, N - 1);
            //@ if B_WIDE
            four[pass] = b_wide(batch, k * 4, n);
            //@ else
            four[pass] = {b(batch, k * 4, n), b(batch, k * 4 + 1, n), b(batch, k * 4 + 2, n), b(batch, k * 4 + 3, n)};
            //@ end
        }
        #pragma unroll
        for (i32 i = 0; i < ROWS; i++) {
            const auto query = read<f32, 4>(queries + (i * DEPTH + k) * 4);
            #pragma unroll
            for (i32 at = 0; at < PASSES * 4; at++) {
                product[i][at / 4] += query.v[at % 4] * four[at / 4].v[at % 4];
            }
        }
    }
    #pragma unroll
    for (i32 at = 0; at < ROWS * PASSES; at++) {
        tile[lane * PITCH + at / PASSES * COLUMNS + key + at % PASSES * KEYS] = product[at / PASSES][at % PASSES];
    }
    __syncthreads();
    for (i32 s = thread; s < ROWS * COLUMNS; s += SIZE) {
        f32 value = 0.0f;
        #pragma unroll
        for (i32 l = 0; l < LANES; l++) {
            value += tile[l * PITCH + s];
        }
        const i32 n = from_n + s % COLUMNS;
        value = score(batch, min(from_m + s / COLUMNS, M - 1), min(n, N - 1), value);
        scores[s] = n < N ? value : bitcast<f32>(0xff800000u);
    }
    __syncthreads();
    if (thread < ROWS * 16) {
        f32 largest = LOWEST;
        for (i32 s = thread % 16; s < COLUMNS; s += 16) {
            largest = max(largest, scores[thread / 16 * COLUMNS + s]);
        }
        maxima[thread] = largest;
    }
    __syncthreads();
    #pragma unroll
    for (i32 i = 0; i < ROWS; i++) {
        f32 largest = top[i];
        #pragma unroll
        for (i32 l = 0; l < 16; l++) {
            largest = max(largest, maxima[i * 16 + l]);
        }
        const f32 fade = decay(top[i] - largest);
        top[i] = largest;
        total[i] *= fade;
        #pragma unroll
        for (i32 v = 0; v < 4; v++) {
            sum[i][v] *= fade;
        }
    }
    #pragma unroll 2
    for (i32 t = part < PARTS ? part : COLUMNS; t < COLUMNS; t += PARTS * 4) {
        wide<f32, 4> values[4];
        #pragma unroll
        for (i32 j = 0; j < 4; j++) {
            const i32 n = min(from_n + t + j * PARTS, N - 1);
            //@ if C_WIDE
            values[j] = c_wide(batch, n, column);
            //@ else
            values[j] = {c(batch, n, column), c(batch, n, column + 1), c(batch, n, column + 2), c(batch, n, column + 3)};
            //@ end
            //@ if RAGGED
            // Nothing times infinity is no number.
            if (from_n + t + j * PARTS >= N) {
                values[j] = {};
            }
            //@ end
        }
        #pragma unroll
        for (i32 j = 0; j < 4; j++) {
            #pragma unroll
            for (i32 i = 0; i < ROWS; i++) {
                const f32 weight = decay(scores[i * COLUMNS + t + j * PARTS] - top[i]);
                total[i] += weight;
                #pragma unroll
                for (i32 v = 0; v < 4; v++) {
                    sum[i][v] += weight * values[j].v[v];
                }
            }
        }
    }
}
#pragma unroll
for (i32 i = 0; i < ROWS; i++) {
    __syncthreads();
    totals[thread] = total[i];
    #pragma unroll
    for (i32 v = 0; v < 4; v++) {
        tile[thread * 4 + v] = sum[i][v];
    }
    __syncthreads();
    for (i32 n = thread; n < COLUMNS_OUT; n += SIZE) {
        f32 whole = 0.0f, value = 0.0f;
        #pragma unroll
        for (i32 p = 0; p < PARTS; p++) {
            whole += totals[p * ACROSS];
            value += tile[p * ACROSS * 4 + n];
        }
        //@ if CLUSTERED
        // Every workgroup writes the results for its keys.
        found[i * COLUMNS_OUT + n] = value;
        if (n == 0) {
            found[ROWS * COLUMNS_OUT + i] = whole;
            found[ROWS * COLUMNS_OUT + ROWS + i] = top[i];
        }
        //@ else
        finish(from_m + i, n, value, whole);
        //@ end
    }
}
//@ if CLUSTERED
__syncthreads();
meet_cluster();
// Each workgroup combines some of the columns.
for (i32 at = rank * SIZE + thread; at < ROWS * COLUMNS_OUT; at += CLUSTER * SIZE) {
    const i32 i = at / COLUMNS_OUT;
    f32 largest = LOWEST, whole = 0.0f, value = 0.0f;
    #pragma unroll
    for (i32 other = 0; other < CLUSTER; other++) {
        largest = max(largest, neighbours(found, other)[ROWS * COLUMNS_OUT + ROWS + i]);
    }
    #pragma unroll
    for (i32 other = 0; other < CLUSTER; other++) {
        const f32* const theirs = neighbours(found, other);
        const f32 weight = decay(theirs[ROWS * COLUMNS_OUT + ROWS + i] - largest);
        whole += theirs[ROWS * COLUMNS_OUT + i] * weight;
        value += theirs[at] * weight;
    }
    finish(from_m + i, at % COLUMNS_OUT, value, whole);
}
// Wait, because a neighbour may still read this workgroup's memory.
__syncthreads();
meet_cluster();
//@ end
