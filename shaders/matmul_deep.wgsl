// For products of few tiles: a workgroup of 256 computes a tile of TILE x TILE, and the invocations share the inner axis too.
// Each of SLICES teams sums DEPTH of every STEP slices, an invocation 4 x 4 of the tile: rows that follow each other,
// columns that are TILE / 4 apart. The next slices are on their way while those in workgroup memory are summed.
let batch = group / (TILES_M * TILES_N);
let m0 = group / TILES_N % TILES_M * TILE;
let n0 = group % TILES_N * TILE;
let place = thread % (TILE * TILE / 16);
let slice = thread / (TILE * TILE / 16);
let row = place / (TILE / 4) * 4;
let column = place % (TILE / 4);
var sum0 = vec4f(0.0f);
var sum1 = vec4f(0.0f);
var sum2 = vec4f(0.0f);
var sum3 = vec4f(0.0f);
for (var k0 = 0; k0 < K + STEP; k0 = k0 + STEP) {
    //@ each load
    let am$ = (thread + $ * SIZE) / A_M_STEP % TILE;
    let ak$ = (thread + $ * SIZE) / A_K_STEP % STEP;
    let bn$ = (thread + $ * SIZE) / B_N_STEP % TILE;
    let bk$ = (thread + $ * SIZE) / B_K_STEP % STEP;
    var left$ = 0.0f;
    if (m0 + am$ < M && k0 + ak$ < K) {
        left$ = a(batch, m0 + am$, k0 + ak$);
    }
    var right$ = 0.0f;
    if (n0 + bn$ < N && k0 + bk$ < K) {
        right$ = b(batch, k0 + bk$, n0 + bn$);
    }
    //@ end
    if (k0 > 0) {
        for (var k = slice * DEPTH; k < slice * DEPTH + DEPTH; k++) {
            let i = k * PITCH + row;
            let j = RIGHT + k * PITCH + column;
            let b4 = vec4f(tile[j], tile[j + TILE / 4], tile[j + TILE / 2], tile[j + TILE / 4 * 3]);
            sum0 = sum0 + tile[i] * b4;
            sum1 = sum1 + tile[i + 1] * b4;
            sum2 = sum2 + tile[i + 2] * b4;
            sum3 = sum3 + tile[i + 3] * b4;
        }
    }
    workgroupBarrier();
    //@ each load
    tile[ak$ * PITCH + am$] = left$;
    tile[RIGHT + bk$ * PITCH + bn$] = right$;
    //@ end
    workgroupBarrier();
}
let part = slice * TILE * TILE + row * TILE + column;
//@ each row
tile[part + $ * TILE] = sum$.x;
tile[part + $ * TILE + TILE / 4] = sum$.y;
tile[part + $ * TILE + TILE / 2] = sum$.z;
tile[part + $ * TILE + TILE / 4 * 3] = sum$.w;
//@ end
workgroupBarrier();
for (var s = thread; s < TILE * TILE; s = s + SIZE) {
    var total = 0.0f;
    for (var t = 0; t < SLICES; t++) {
        total = total + tile[t * TILE * TILE + s];
    }
    store(batch, m0 + s / TILE, n0 + s % TILE, total);
}
