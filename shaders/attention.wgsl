// A workgroup computes ROWS rows of the result. It walks along the keys, COLUMNS at a time: their scores, the largest
// score and the sum of powers so far, and the values weighted by the powers. What was summed before is scaled down when
// a larger score appears. LANES invocations share a row.
let batch = group / GROUPS;
let m0 = group % GROUPS * ROWS;
let row = thread / LANES;
let lane = thread % LANES;
var top = LOWEST;
var total = 0.0f;
//@ each sum
var sum$ = 0.0f;
//@ end
//@ if BAND
for (var n0 = first_key(m0) / COLUMNS * COLUMNS; n0 < end_key(m0 + ROWS); n0 = n0 + COLUMNS) {
//@ else
for (var n0 = 0; n0 < N; n0 = n0 + COLUMNS) {
//@ end
//@ each product
    var product$ = 0.0f;
//@ end
    for (var k0 = 0; k0 < K; k0 = k0 + STEP) {
        for (var s = thread; s < ROWS * STEP; s = s + SIZE) {
            let m = s / A_M_STEP % ROWS;
            let k = s / A_K_STEP % STEP;
            var value = 0.0f;
            if (m0 + m < M && k0 + k < K) {
                value = a(batch, m0 + m, k0 + k);
            }
            tile_a[k * ROWS + m] = value;
        }
        for (var s = thread; s < COLUMNS * STEP; s = s + SIZE) {
            let n = s / B_N_STEP % COLUMNS;
            let k = s / B_K_STEP % STEP;
            var value = 0.0f;
            if (n0 + n < N && k0 + k < K) {
                value = b(batch, k0 + k, n0 + n);
            }
            tile_b[k * COLUMNS + n] = value;
        }
        workgroupBarrier();
        for (var k = 0; k < STEP; k++) {
            let right = tile_b[k * COLUMNS + thread % COLUMNS];
//@ each product
            product$ = product$ + tile_a[k * ROWS + (thread + $ * SIZE) / COLUMNS] * right;
//@ end
        }
        workgroupBarrier();
    }
//@ each product
    scores[thread + $ * SIZE] = score(batch, m0 + (thread + $ * SIZE) / COLUMNS, n0 + thread % COLUMNS, product$);
//@ end
    workgroupBarrier();
    let end = min(COLUMNS, N - n0);
    var largest = top;
    for (var n = lane; n < end; n = n + LANES) {
        largest = max(largest, scores[row * COLUMNS + n]);
    }
    partial[thread] = largest;
    workgroupBarrier();
    for (var half = LANES / 2; half > 0; half = half / 2) {
        if (lane < half) {
            partial[thread] = max(partial[thread], partial[thread + half]);
        }
        workgroupBarrier();
    }
    largest = partial[thread - lane];
    workgroupBarrier();
    let fade = exp(top - largest);
    top = largest;
    var part = 0.0f;
    for (var n = lane; n < end; n = n + LANES) {
        let power = exp(scores[row * COLUMNS + n] - top);
        scores[row * COLUMNS + n] = power;
        part = part + power;
    }
    partial[thread] = part;
    workgroupBarrier();
    for (var half = LANES / 2; half > 0; half = half / 2) {
        if (lane < half) {
            partial[thread] = partial[thread] + partial[thread + half];
        }
        workgroupBarrier();
    }
    total = total * fade + partial[thread - lane];
//@ each sum
    sum$ = sum$ * fade;
//@ end
    for (var n = 0; n < end; n++) {
        let weight = scores[row * COLUMNS + n];
//@ each sum
        sum$ = sum$ + weight * c(batch, n0 + n, lane + $ * LANES);
//@ end
    }
    workgroupBarrier();
}
//@ each sum
//@ if GUARDED
store(batch, m0 + row, lane + $ * LANES, select(0.0f, sum$ / total, total > 0.0f && top > LOWEST));
//@ else
store(batch, m0 + row, lane + $ * LANES, sum$ / total);
//@ end
//@ end
