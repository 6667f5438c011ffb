// Products with up to four rows, whose time is that of reading b, once. A workgroup computes COLUMNS columns. SLICES invocations share a
// column and take the inner axis in turn.
let batch = group / TILES_N;
let column = thread / COLUMN_STEP % COLUMNS;
let slice = thread / SLICE_STEP % SLICES;
let n = group % TILES_N * COLUMNS + column;
var sum = vec4f(0.0f);
if (n < N) {
    for (var k = slice; k < K; k = k + SLICES) {
        let a4 = vec4f(a(batch, 0, k), a(batch, ROW1, k), a(batch, ROW2, k), a(batch, ROW3, k));
        sum = sum + b(batch, k, n) * a4;
    }
}
partial[thread] = sum;
workgroupBarrier();
for (var half = SLICES / 2; half > 0; half = half / 2) {
    if (slice < half) {
        partial[thread] = partial[thread] + partial[thread + half * SLICE_STEP];
    }
    workgroupBarrier();
}
if (slice == 0) {
    let total = partial[thread];
    store(batch, 0, n, total.x);
    store(batch, 1, n, total.y);
    store(batch, 2, n, total.z);
    store(batch, 3, n, total.w);
}
