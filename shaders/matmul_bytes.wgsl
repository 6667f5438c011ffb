// Products of bytes, whose sums are exact. A workgroup computes a tile of TILE_M x TILE_N, each invocation 4 x 4 of it: rows that follow each
// other, columns that are TILE_N / 4 apart. STEP words at a time pass through workgroup memory, each of four bytes along the inner axis.
let batch = group / (TILES_M * TILES_N);
let m0 = group / TILES_N % TILES_M * TILE_M;
let n0 = group % TILES_N * TILE_N;
let row = thread / (TILE_N / 4) * 4;
let column = thread % (TILE_N / 4);
//@ each sum
var sum$ = 0;
//@ end
//@ if FLIPPED
//@ each line
var raised$ = 0;
//@ end
//@ end
for (var w0 = 0; w0 < WORDS; w0 = w0 + STEP) {
    for (var s = thread; s < TILE_M * STEP; s = s + SIZE) {
        let m = s / A_M_STEP % TILE_M;
        let w = s / A_K_STEP % STEP;
        var word = 0u;
        if (m0 + m < M && w0 + w < WORDS) {
            word = a_word(batch, m0 + m, w0 + w);
        }
        tile_a[w * TILE_M + m] = word;
    }
    for (var s = thread; s < TILE_N * STEP; s = s + SIZE) {
        let n = s / B_N_STEP % TILE_N;
        let w = s / B_K_STEP % STEP;
        var word = 0u;
        if (n0 + n < N && w0 + w < WORDS) {
            word = b_word(batch, w0 + w, n0 + n);
        }
        tile_b[w * TILE_N + n] = word;
    }
    workgroupBarrier();
    for (var w = 0; w < STEP; w++) {
        //@ each line
        let a$ = tile_a[w * TILE_M + row + $];
        let b$ = tile_b[w * TILE_N + column + $ * (TILE_N / 4)];
        //@ end
        //@ each sum
        sum$ = dot_bytes(LEFT, RIGHT, sum$);
        //@ end
        //@ if FLIPPED
        // What was flipped is less by 128.
        //@ each line
        raised$ = dot_bytes(SIGNED, 0x01010101u, raised$);
        //@ end
        //@ end
    }
    workgroupBarrier();
}
//@ each sum
//@ if FLIPPED
store(batch, m0 + row + DOWN, n0 + column + OVER * (TILE_N / 4), sum$ + 128 * RAISED);
//@ else
store(batch, m0 + row + DOWN, n0 + column + OVER * (TILE_N / 4), sum$);
//@ end
//@ end
