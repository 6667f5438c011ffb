// kernel 0, matmul: hidden
// 256 invocations, [7, 1, 1] workgroups
// matmul_deep
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 256;
const M: i32 = 8;
const K: i32 = 784;
const N: i32 = 100;
const TILE: i32 = 16;
const TILES_M: i32 = 1;
const TILES_N: i32 = 7;
const SLICES: i32 = 16;
const DEPTH: i32 = 4;
const STEP: i32 = 64;
const PITCH: i32 = 17;
const RIGHT: i32 = 1088;
const A_M_STEP: i32 = 64;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 16;
var<workgroup> tile: array<f32, 4096>;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b0[m * 784 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    return b1[k * 100 + n];
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let v0 = value;
        let v1 = b2[n];
        let v2 = v0 + v1;
        let v4 = max_f32(v2, 0.0f);
        b3[m * 100 + n] = v4;
    }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 7u);
    let thread = i32(index);
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
        let am0 = (thread + 0 * SIZE) / A_M_STEP % TILE;
        let ak0 = (thread + 0 * SIZE) / A_K_STEP % STEP;
        let bn0 = (thread + 0 * SIZE) / B_N_STEP % TILE;
        let bk0 = (thread + 0 * SIZE) / B_K_STEP % STEP;
        var left0 = 0.0f;
        if (m0 + am0 < M && k0 + ak0 < K) {
            left0 = a(batch, m0 + am0, k0 + ak0);
        }
        var right0 = 0.0f;
        if (n0 + bn0 < N && k0 + bk0 < K) {
            right0 = b(batch, k0 + bk0, n0 + bn0);
        }
        let am1 = (thread + 1 * SIZE) / A_M_STEP % TILE;
        let ak1 = (thread + 1 * SIZE) / A_K_STEP % STEP;
        let bn1 = (thread + 1 * SIZE) / B_N_STEP % TILE;
        let bk1 = (thread + 1 * SIZE) / B_K_STEP % STEP;
        var left1 = 0.0f;
        if (m0 + am1 < M && k0 + ak1 < K) {
            left1 = a(batch, m0 + am1, k0 + ak1);
        }
        var right1 = 0.0f;
        if (n0 + bn1 < N && k0 + bk1 < K) {
            right1 = b(batch, k0 + bk1, n0 + bn1);
        }
        let am2 = (thread + 2 * SIZE) / A_M_STEP % TILE;
        let ak2 = (thread + 2 * SIZE) / A_K_STEP % STEP;
        let bn2 = (thread + 2 * SIZE) / B_N_STEP % TILE;
        let bk2 = (thread + 2 * SIZE) / B_K_STEP % STEP;
        var left2 = 0.0f;
        if (m0 + am2 < M && k0 + ak2 < K) {
            left2 = a(batch, m0 + am2, k0 + ak2);
        }
        var right2 = 0.0f;
        if (n0 + bn2 < N && k0 + bk2 < K) {
            right2 = b(batch, k0 + bk2, n0 + bn2);
        }
        let am3 = (thread + 3 * SIZE) / A_M_STEP % TILE;
        let ak3 = (thread + 3 * SIZE) / A_K_STEP % STEP;
        let bn3 = (thread + 3 * SIZE) / B_N_STEP % TILE;
        let bk3 = (thread + 3 * SIZE) / B_K_STEP % STEP;
        var left3 = 0.0f;
        if (m0 + am3 < M && k0 + ak3 < K) {
            left3 = a(batch, m0 + am3, k0 + ak3);
        }
        var right3 = 0.0f;
        if (n0 + bn3 < N && k0 + bk3 < K) {
            right3 = b(batch, k0 + bk3, n0 + bn3);
        }
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
        tile[ak0 * PITCH + am0] = left0;
        tile[RIGHT + bk0 * PITCH + bn0] = right0;
        tile[ak1 * PITCH + am1] = left1;
        tile[RIGHT + bk1 * PITCH + bn1] = right1;
        tile[ak2 * PITCH + am2] = left2;
        tile[RIGHT + bk2 * PITCH + bn2] = right2;
        tile[ak3 * PITCH + am3] = left3;
        tile[RIGHT + bk3 * PITCH + bn3] = right3;
        workgroupBarrier();
    }
    let part = slice * TILE * TILE + row * TILE + column;
    tile[part + 0 * TILE] = sum0.x;
    tile[part + 0 * TILE + TILE / 4] = sum0.y;
    tile[part + 0 * TILE + TILE / 2] = sum0.z;
    tile[part + 0 * TILE + TILE / 4 * 3] = sum0.w;
    tile[part + 1 * TILE] = sum1.x;
    tile[part + 1 * TILE + TILE / 4] = sum1.y;
    tile[part + 1 * TILE + TILE / 2] = sum1.z;
    tile[part + 1 * TILE + TILE / 4 * 3] = sum1.w;
    tile[part + 2 * TILE] = sum2.x;
    tile[part + 2 * TILE + TILE / 4] = sum2.y;
    tile[part + 2 * TILE + TILE / 2] = sum2.z;
    tile[part + 2 * TILE + TILE / 4 * 3] = sum2.w;
    tile[part + 3 * TILE] = sum3.x;
    tile[part + 3 * TILE + TILE / 4] = sum3.y;
    tile[part + 3 * TILE + TILE / 2] = sum3.z;
    tile[part + 3 * TILE + TILE / 4 * 3] = sum3.w;
    workgroupBarrier();
    for (var s = thread; s < TILE * TILE; s = s + SIZE) {
        var total = 0.0f;
        for (var t = 0; t < SLICES; t++) {
            total = total + tile[t * TILE * TILE + s];
        }
        store(batch, m0 + s / TILE, n0 + s % TILE, total);
    }
}

// kernel 1, matmul: scores
// 64 invocations, [1, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 8;
const K: i32 = 100;
const N: i32 = 10;
const TILE_M: i32 = 16;
const TILE_N: i32 = 64;
const TILES_M: i32 = 1;
const TILES_N: i32 = 1;
const STEP: i32 = 16;
const A_M_STEP: i32 = 16;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 64;
var<workgroup> tile_a: array<f32, 256>;
var<workgroup> tile_b: array<f32, 1024>;
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b0[m * 100 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    return b1[k * 10 + n];
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let v0 = value;
        let v1 = b2[n];
        let v2 = v0 + v1;
        b3[m * 10 + n] = v2;
    }
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 1u);
    let thread = i32(index);
    // A workgroup computes a tile of TILE_M x TILE_N, each invocation 4 x 4 of it: rows that follow each other, columns
    // that are TILE_N / 4 apart. STEP slices of the inner axis at a time pass through workgroup memory; both operands are
    // read along the axis in which they are dense.
    let batch = group / (TILES_M * TILES_N);
    let m0 = group / TILES_N % TILES_M * TILE_M;
    let n0 = group % TILES_N * TILE_N;
    let row = thread / (TILE_N / 4) * 4;
    let column = thread % (TILE_N / 4);
    var sum0 = vec4f(0.0f);
    var sum1 = vec4f(0.0f);
    var sum2 = vec4f(0.0f);
    var sum3 = vec4f(0.0f);
    for (var k0 = 0; k0 < K; k0 = k0 + STEP) {
        for (var s = thread; s < TILE_M * STEP; s = s + SIZE) {
            let m = s / A_M_STEP % TILE_M;
            let k = s / A_K_STEP % STEP;
            var value = 0.0f;
            if (m0 + m < M && k0 + k < K) {
                value = a(batch, m0 + m, k0 + k);
            }
            tile_a[k * TILE_M + m] = value;
        }
        for (var s = thread; s < TILE_N * STEP; s = s + SIZE) {
            let n = s / B_N_STEP % TILE_N;
            let k = s / B_K_STEP % STEP;
            var value = 0.0f;
            if (n0 + n < N && k0 + k < K) {
                value = b(batch, k0 + k, n0 + n);
            }
            tile_b[k * TILE_N + n] = value;
        }
        workgroupBarrier();
        for (var k = 0; k < STEP; k++) {
            let i = k * TILE_M + row;
            let j = k * TILE_N + column;
            let b4 = vec4f(tile_b[j], tile_b[j + TILE_N / 4], tile_b[j + TILE_N / 2], tile_b[j + TILE_N / 4 * 3]);
            sum0 = sum0 + tile_a[i] * b4;
            sum1 = sum1 + tile_a[i + 1] * b4;
            sum2 = sum2 + tile_a[i + 2] * b4;
            sum3 = sum3 + tile_a[i + 3] * b4;
        }
        workgroupBarrier();
    }
    for (var i = 0; i < 4; i++) {
        let sum = select(select(sum3, sum2, i == 2), select(sum1, sum0, i == 0), i < 2);
        store(batch, m0 + row + i, n0 + column, sum.x);
        store(batch, m0 + row + i, n0 + column + TILE_N / 4, sum.y);
        store(batch, m0 + row + i, n0 + column + TILE_N / 2, sum.z);
        store(batch, m0 + row + i, n0 + column + TILE_N / 4 * 3, sum.w);
    }
}

