// Attention of a few rows, whose time is that of reading keys and values: four elements at a time. A workgroup computes ROWS rows of the
// result and walks along the keys, COLUMNS at a time. LANES invocations share a key and add their parts of the score in workgroup memory.
// Then PARTS invocations share four columns of the values: each takes every PARTS-th value. A larger score scales down earlier sums. Loads
// are unconditional and several vectors at a time, so that none waits for another. Indices outside are replaced by the last row, key
// or column.
let batch = group / GROUPS;
let from_m = group % GROUPS * ROWS;
let lane = thread / LANE_STEP % LANES;
let key = thread / KEY_STEP % KEYS;
let part = thread / ACROSS;
let column = min(thread % ACROSS, WIDTH - 1) * 4;
for (var s = thread; s < ROWS * DEPTH; s = s + SIZE) {
    let m = min(from_m + s / DEPTH, M - 1);
    let k = s % DEPTH * 4;
    queries[s] = vec4f(a(batch, m, k), a(batch, m, k + 1), a(batch, m, k + 2), a(batch, m, k + 3));
}
//@ each row
var top$ = LOWEST;
var total$ = 0.0f;
var sum$ = vec4f(0.0f);
//@ end
workgroupBarrier();
//@ if BAND
for (var from_n = first_key(from_m) / COLUMNS * COLUMNS; from_n < end_key(from_m + ROWS); from_n = from_n + COLUMNS) {
//@ else
for (var from_n = 0; from_n < N; from_n = from_n + COLUMNS) {
//@ end
    //@ each pass
    let n$ = min(from_n + key + $ * KEYS, N - 1);
    //@ end
    //@ each product
    var product$ = 0.0f;
    //@ end
    for (var k = lane; k < DEPTH; k = k + LANES) {
        //@ each pass
        //@ if B_WIDE
        let four$ = b_wide(batch, k * 4, n$);
        //@ else
        let four$ = vec4f(b(batch, k * 4, n$), b(batch, k * 4 + 1, n$), b(batch, k * 4 + 2, n$), b(batch, k * 4 + 3, n$));
        //@ end
        //@ end
        //@ each product
        product$ = product$ + dot(queries[DOWN * DEPTH + k], FOUR);
        //@ end
    }
    //@ each product
    tile[lane * PITCH + DOWN * COLUMNS + key + OVER * KEYS] = product$;
    //@ end
    workgroupBarrier();
    for (var s = thread; s < ROWS * COLUMNS; s = s + SIZE) {
        var product = 0.0f;
        for (var l = 0; l < LANES; l++) {
            product = product + tile[l * PITCH + s];
        }
        let n = from_n + s % COLUMNS;
        let value = score(batch, min(from_m + s / COLUMNS, M - 1), min(n, N - 1), product);
        //@ if RAGGED
        scores[s] = select(LOWEST, value, n < N);
        //@ else
        scores[s] = value;
        //@ end
    }
    workgroupBarrier();
    if (thread < ROWS * 16) {
        var largest = LOWEST;
        for (var s = thread % 16; s < COLUMNS; s = s + 16) {
            largest = max(largest, scores[thread / 16 * COLUMNS + s]);
        }
        maxima[thread] = largest;
    }
    workgroupBarrier();
    //@ each row
    var largest$ = top$;
    for (var l = 0; l < 16; l++) {
        largest$ = max(largest$, maxima[$ * 16 + l]);
    }
    let fade$ = exp(top$ - largest$);
    top$ = largest$;
    total$ = total$ * fade$;
    sum$ = sum$ * fade$;
    //@ end
    for (var t = select(COLUMNS, part, part < PARTS); t < COLUMNS; t = t + PARTS * 4) {
        //@ each four
        let t$ = t + $ * PARTS;
        let n$ = min(from_n + t$, N - 1);
        //@ if C_WIDE
        let read$ = c_wide(batch, n$, column);
        //@ else
        let read$ = vec4f(c(batch, n$, column), c(batch, n$, column + 1), c(batch, n$, column + 2), c(batch, n$, column + 3));
        //@ end
        //@ if RAGGED
        // Nothing times infinity is no number.
        let value$ = select(vec4f(0.0f), read$, from_n + t$ < N);
        //@ else
        let value$ = read$;
        //@ end
        //@ end
        //@ each weight
        var weight$ = exp(scores[DOWN * COLUMNS + AT] - TOP);
        //@ if RAGGED
        weight$ = select(0.0f, weight$, from_n + AT < N);
        //@ end
        TOTAL = TOTAL + weight$;
        SUM = SUM + weight$ * VALUE;
        //@ end
    }
}
//@ each row
workgroupBarrier();
totals[thread] = total$;
tile[thread * 4] = sum$.x;
tile[thread * 4 + 1] = sum$.y;
tile[thread * 4 + 2] = sum$.z;
tile[thread * 4 + 3] = sum$.w;
workgroupBarrier();
for (var s = thread; s < COLUMNS_OUT; s = s + SIZE) {
    var total = 0.0f;
    var sum = 0.0f;
    for (var p = 0; p < PARTS; p++) {
        total = total + totals[p * ACROSS];
        sum = sum + tile[p * ACROSS * 4 + s];
    }
    //@ if GUARDED
    store(batch, from_m + $, s, select(0.0f, sum / total, total > 0.0f && top$ > LOWEST));
    //@ else
    store(batch, from_m + $, s, sum / total);
    //@ end
}
//@ end
