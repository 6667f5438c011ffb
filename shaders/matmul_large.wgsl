// A workgroup of 256 computes a tile of 128 x 128, each invocation 8 x 8 of it in four quarters: 16 vectors of four columns. STEP slices
// of the inner axis at a time pass through workgroup memory, as vectors of four rows, or of four columns; the next ones are on their way
// while those are summed. An operand is read element by element, or in vectors: of four lines, or of four slices. Of the latter, four lines
// are a block, which an invocation turns.
let batch = group / (TILES_M * TILES_N);
let m0 = group / TILES_N % TILES_M * 128;
let n0 = group % TILES_N * 128;
let row = thread / 16;
let column = thread % 16;
//@ if BLOCKS
// Eight neighbouring invocations have neighbouring lines, so that their stores meet in no bank.
let block = thread % BLOCKS;
let line = block / (2 * STEP) * 8 + block % 8;
let slice = block / 8 % (STEP / 4) * 4;
//@ end
//@ each sum
var sum$ = vec4f(0.0f);
//@ end
for (var k0 = 0; k0 < K + STEP; k0 = k0 + STEP) {
    //@ each part
    let s$ = thread + $ * SIZE;
    //@ if A_BLOCKS
    //@ else
    let row$ = s$ / A_M_STEP % 32;
    //@ end
    //@ if B_BLOCKS
    //@ else
    let column$ = s$ / B_N_STEP % 32;
    //@ end
    //@ if A_BLOCKS
    //@ else
    let ka$ = s$ / A_K_STEP % STEP;
    //@ end
    //@ if B_BLOCKS
    //@ else
    let kb$ = s$ / B_K_STEP % STEP;
    //@ end
    //@ if A_BLOCKS
    //@ else
    var left$ = vec4f(0.0f);
    if (k0 + ka$ < K) {
        let k = k0 + ka$;
        let m = m0 + row$ * 4;
        //@ if A_FOURS
        left$ = a_fours(batch, min(m, M - 4), k);
        //@ else
        left$ = vec4f(a(batch, min(m, M - 1), k), a(batch, min(m + 1, M - 1), k), a(batch, min(m + 2, M - 1), k), a(batch, min(m + 3, M - 1), k));
        //@ end
    }
    //@ end
    //@ if B_BLOCKS
    //@ else
    var right$ = vec4f(0.0f);
    if (k0 + kb$ < K) {
        let k = k0 + kb$;
        let n = n0 + column$ * 4;
        //@ if B_FOURS
        right$ = b_fours(batch, k, min(n, N - 4));
        //@ else
        right$ = vec4f(b(batch, k, min(n, N - 1)), b(batch, k, min(n + 1, N - 1)), b(batch, k, min(n + 2, N - 1)), b(batch, k, min(n + 3, N - 1)));
        //@ end
    }
    //@ end
    //@ end
    //@ each block
    var x$ = vec4f(0.0f);
    var y$ = x$;
    var z$ = x$;
    var w$ = x$;
    if (HERE && k0 + slice < K) {
        let at = START + line * 4;
        x$ = READ(batch, min(at, END - 1), k0 + slice);
        y$ = READ(batch, min(at + 1, END - 1), k0 + slice);
        z$ = READ(batch, min(at + 2, END - 1), k0 + slice);
        w$ = READ(batch, min(at + 3, END - 1), k0 + slice);
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
    //@ if A_BLOCKS
    //@ else
    tile_a[ka$ * 32 + row$] = left$;
    //@ end
    //@ if B_BLOCKS
    //@ else
    tile_b[kb$ * 32 + column$] = right$;
    //@ end
    //@ end
    //@ each block
    if (HERE) {
        ARRAY[slice * 32 + line] = vec4f(x$.x, y$.x, z$.x, w$.x);
        ARRAY[slice * 32 + 32 + line] = vec4f(x$.y, y$.y, z$.y, w$.y);
        ARRAY[slice * 32 + 64 + line] = vec4f(x$.z, y$.z, z$.z, w$.z);
        ARRAY[slice * 32 + 96 + line] = vec4f(x$.w, y$.w, z$.w, w$.w);
    }
    //@ end
    workgroupBarrier();
}
//@ each sum
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER, sum$.x);
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER + 1, sum$.y);
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER + 2, sum$.z);
store(batch, m0 + row * 4 + DOWN, n0 + column * 4 + OVER + 3, sum$.w);
//@ end
