// A workgroup of 256 computes a tile of 128 x 128, each invocation 8 x 8 of it in four quarters: 16 vectors of four columns. STEP slices
// of the inner axis at a time pass through workgroup memory, as vectors of four rows, or of four columns; the next ones are on their way
// while those are summed.
let batch = group / (TILES_M * TILES_N);
let m0 = group / TILES_N % TILES_M * 128;
let n0 = group % TILES_N * 128;
let row = thread / 16;
let column = thread % 16;
//@ each sum
var sum$ = vec4f(0.0f);
//@ end
for (var k0 = 0; k0 < K + STEP; k0 = k0 + STEP) {
    //@ each part
    let s$ = thread + $ * SIZE;
    let row$ = s$ / A_M_STEP % 32;
    let column$ = s$ / B_N_STEP % 32;
    let ka$ = s$ / A_K_STEP % STEP;
    let kb$ = s$ / B_K_STEP % STEP;
    var left$ = vec4f(0.0f);
    if (k0 + ka$ < K) {
        let k = k0 + ka$;
        let m = m0 + row$ * 4;
        left$ = vec4f(a(batch, min(m, M - 1), k), a(batch, min(m + 1, M - 1), k), a(batch, min(m + 2, M - 1), k), a(batch, min(m + 3, M - 1), k));
    }
    var right$ = vec4f(0.0f);
    if (k0 + kb$ < K) {
        let k = k0 + kb$;
        let n = n0 + column$ * 4;
        right$ = vec4f(b(batch, k, min(n, N - 1)), b(batch, k, min(n + 1, N - 1)), b(batch, k, min(n + 2, N - 1)), b(batch, k, min(n + 3, N - 1)));
    }
    //@ end
    if (k0 > 0) {
        for (var k = 0; k < STEP; k++) {
            let a0 = tile_a[k * 32 + row];
            let a1 = tile_a[k * 32 + 16 + row];
            let b0 = tile_b[k * 32 + column];
            let b1 = tile_b[k * 32 + 16 + column];
            //@ each sum
            sum$ = sum$ + LEFT * RIGHT;
            //@ end
        }
    }
    workgroupBarrier();
    //@ each part
    tile_a[ka$ * 32 + row$] = left$;
    tile_b[kb$ * 32 + column$] = right$;
    //@ end
    workgroupBarrier();
}
//@ each sum
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER, sum$.x);
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER + 1, sum$.y);
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER + 2, sum$.z);
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER + 3, sum$.w);
//@ end
