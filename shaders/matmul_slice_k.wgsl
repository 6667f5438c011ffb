// For products of few tiles: a workgroup of 256 computes a tile of TILE x TILE, and the invocations share the inner axis too.
// Each of SLICES teams sums DEPTH of every STEP slices, an invocation 4 x 4 of the tile: rows and columns that are TILE / 4 apart, so that
// neighbours read and write neighbours. Slices pass through workgroup memory as vectors of four rows, or of four columns; the next ones
// are on their way while those are summed.
let batch = group / (TILES_M * TILES_N);
let m0 = group / TILES_N % TILES_M * TILE;
let n0 = group % TILES_N * TILE;
let place = thread % (TILE * TILE / 16);
let slice = thread / (TILE * TILE / 16);
let row = place / (TILE / 4);
let column = place % (TILE / 4);
let m4 = thread / A_M_STEP % (TILE / 4);
let n4 = thread / B_N_STEP % (TILE / 4);
let ka = thread / A_K_STEP % STEP;
let kb = thread / B_K_STEP % STEP;
let m = m0 + m4;
let n = n0 + n4;
var sum0 = vec4f(0.0f);
var sum1 = vec4f(0.0f);
var sum2 = vec4f(0.0f);
var sum3 = vec4f(0.0f);
for (var k0 = 0; k0 < K + STEP; k0 = k0 + STEP) {
    var left = vec4f(0.0f);
    if (k0 + ka < K) {
        let k = k0 + ka;
        left = vec4f(a(batch, min(m, M - 1), k), a(batch, min(m + TILE / 4, M - 1), k), a(batch, min(m + TILE / 2, M - 1), k), a(batch, min(m + TILE / 4 * 3, M - 1), k));
    }
    var right = vec4f(0.0f);
    if (k0 + kb < K) {
        let k = k0 + kb;
        right = vec4f(b(batch, k, min(n, N - 1)), b(batch, k, min(n + TILE / 4, N - 1)), b(batch, k, min(n + TILE / 2, N - 1)), b(batch, k, min(n + TILE / 4 * 3, N - 1)));
    }
    if (k0 > 0) {
        for (var k = slice * DEPTH; k < slice * DEPTH + DEPTH; k++) {
            let a4 = tile[k * PITCH + row];
            let b4 = tile[RIGHT + k * PITCH + column];
            sum0 = sum0 + a4.x * b4;
            sum1 = sum1 + a4.y * b4;
            sum2 = sum2 + a4.z * b4;
            sum3 = sum3 + a4.w * b4;
        }
    }
    workgroupBarrier();
    tile[ka * PITCH + m4] = left;
    tile[RIGHT + kb * PITCH + n4] = right;
    workgroupBarrier();
}
let part = (slice * TILE + row) * (TILE / 4) + column;
tile[part] = sum0;
tile[part + TILE * TILE / 16] = sum1;
tile[part + TILE * TILE / 8] = sum2;
tile[part + TILE * TILE / 16 * 3] = sum3;
workgroupBarrier();
for (var s = thread; s < TILE * TILE / 4; s = s + SIZE) {
    var total = vec4f(0.0f);
    for (var t = 0; t < SLICES; t++) {
        total = total + tile[t * (TILE * TILE / 4) + s];
    }
    let m = m0 + s / (TILE / 4);
    let n = n0 + s % (TILE / 4);
    store(batch, m, n, total.x);
    store(batch, m, n + TILE / 4, total.y);
    store(batch, m, n + TILE / 2, total.z);
    store(batch, m, n + TILE / 4 * 3, total.w);
}
