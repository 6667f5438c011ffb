// Products with up to four rows, whose time is that of reading b: once, four elements at a time. A workgroup computes COLUMNS columns,
// or COLUMNS times four. SLICES invocations share a column and take the inner axis in turn, with four loads in flight each.
let batch = group / TILES_N;
let slice = thread / SLICE_STEP % SLICES;
let n = (group % TILES_N * COLUMNS + thread / COLUMN_STEP % COLUMNS) * ACROSS;
//@ each row
var sum$ = vec4f(0.0f);
//@ end
if (n < N) {
    var k = slice * ALONG;
    for (; k + 3 * STEP < K; k = k + 4 * STEP) {
        let y0 = b_wide(batch, k, n);
        let y1 = b_wide(batch, k + STEP, n);
        let y2 = b_wide(batch, k + 2 * STEP, n);
        let y3 = b_wide(batch, k + 3 * STEP, n);
        //@ each row
        sum$ = sum$ + left(batch, $, k) * y0;
        sum$ = sum$ + left(batch, $, k + STEP) * y1;
        sum$ = sum$ + left(batch, $, k + 2 * STEP) * y2;
        sum$ = sum$ + left(batch, $, k + 3 * STEP) * y3;
        //@ end
    }
    for (; k < K; k = k + STEP) {
        let y = b_wide(batch, k, n);
        //@ each row
        sum$ = sum$ + left(batch, $, k) * y;
        //@ end
    }
}
//@ each row
partial[thread + $ * SIZE] = sum$;
//@ end
workgroupBarrier();
for (var half = SLICES / 2; half > 0; half = half / 2) {
    if (slice < half) {
        //@ each row
        partial[thread + $ * SIZE] = partial[thread + $ * SIZE] + partial[thread + $ * SIZE + half * SLICE_STEP];
        //@ end
    }
    workgroupBarrier();
}
if (slice == 0) {
    //@ each row
    let total$ = partial[thread + $ * SIZE];
    //@ if B_ROWS
    store(batch, $, n, total$.x);
    store(batch, $, n + 1, total$.y);
    store(batch, $, n + 2, total$.z);
    store(batch, $, n + 3, total$.w);
    //@ else
    store(batch, $, n, total$.x + total$.y + total$.z + total$.w);
    //@ end
    //@ end
}
