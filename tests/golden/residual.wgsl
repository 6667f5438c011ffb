// kernel 0, map: norm1/Mul, norm2/Mul
// 64 invocations, [1, 1, 1] workgroups
// map
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read_write> b2: array<f32>;
const SIZE: i32 = 64;
const COUNT: i32 = 8;
fn store(i: i32) {
    let v0 = b0[i];
    let v1 = b1[i];
    let v2 = v0 * v1;
    b2[i] = v2;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 1u);
    let thread = i32(index);
    // One invocation per element.
    let i = group * SIZE + thread;
    if (i < COUNT) {
        store(i);
    }
}

// kernel 1, map: norm1/Sub, norm2/Sub
// 64 invocations, [1, 1, 1] workgroups
// map
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 64;
const COUNT: i32 = 8;
fn store(i: i32) {
    let v0 = b2[i];
    let v1 = b0[i];
    let v2 = b1[i];
    let v3 = v1 * v2;
    let v4 = v0 - v3;
    b3[i] = v4;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 1u);
    let thread = i32(index);
    // One invocation per element.
    let i = group * SIZE + thread;
    if (i < COUNT) {
        store(i);
    }
}

// kernel 2, conv: relu1
// 64 invocations, [2, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read> b3: array<f32>;
@group(0) @binding(4) var<storage, read_write> b4: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 8;
const K: i32 = 72;
const N: i32 = 128;
const TILE_M: i32 = 16;
const TILE_N: i32 = 64;
const TILES_M: i32 = 1;
const TILES_N: i32 = 2;
const STEP: i32 = 16;
const A_M_STEP: i32 = 16;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 64;
var<workgroup> tile_a: array<f32, 256>;
var<workgroup> tile_b: array<f32, 1024>;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b1[m * 72 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    let k_3 = i32(u32(k) % 3u);
    let k_2 = i32(u32(k) / 3u % 3u);
    let k_0 = i32(u32(k) / 9u);
    let n_3 = i32(u32(n) % 8u);
    let n_2 = i32(u32(n) / 8u % 8u);
    let n_0 = i32(u32(n) / 64u);
    let p0 = 0;
    let p1 = n_2 + k_2 - 1;
    let p2 = n_3 + k_3 - 1;
    var value = 0.0f;
    if (p1 >= 0 && p1 < 8 && p2 >= 0 && p2 < 8) { value = b0[n_0 * 512 + k_0 * 64 + p1 * 8 + p2]; }
    return value;
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let n_1 = i32(u32(n) % 64u);
        let n_0 = i32(u32(n) / 64u);
        let v0 = value;
        let v1 = b2[m];
        let v2 = v0 * v1;
        let v3 = b3[m];
        let v4 = v2 + v3;
        let v6 = max_f32(v4, 0.0f);
        b4[m * 64 + n_0 * 512 + n_1] = v6;
    }
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 2u);
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

// kernel 3, conv: y
// 64 invocations, [2, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read> b3: array<f32>;
@group(0) @binding(4) var<storage, read> b4: array<f32>;
@group(0) @binding(5) var<storage, read_write> b5: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 8;
const K: i32 = 72;
const N: i32 = 128;
const TILE_M: i32 = 16;
const TILE_N: i32 = 64;
const TILES_M: i32 = 1;
const TILES_N: i32 = 2;
const STEP: i32 = 16;
const A_M_STEP: i32 = 16;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 64;
var<workgroup> tile_a: array<f32, 256>;
var<workgroup> tile_b: array<f32, 1024>;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b1[m * 72 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    let k_3 = i32(u32(k) % 3u);
    let k_2 = i32(u32(k) / 3u % 3u);
    let k_0 = i32(u32(k) / 9u);
    let n_3 = i32(u32(n) % 8u);
    let n_2 = i32(u32(n) / 8u % 8u);
    let n_0 = i32(u32(n) / 64u);
    let p0 = 0;
    let p1 = n_2 + k_2 - 1;
    let p2 = n_3 + k_3 - 1;
    var value = 0.0f;
    if (p1 >= 0 && p1 < 8 && p2 >= 0 && p2 < 8) { value = b0[n_0 * 512 + k_0 * 64 + p1 * 8 + p2]; }
    return value;
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let n_1 = i32(u32(n) % 64u);
        let n_0 = i32(u32(n) / 64u);
        let v0 = value;
        let v1 = b2[m];
        let v2 = v0 * v1;
        let v3 = b3[m];
        let v4 = v2 + v3;
        let v5 = b4[m * 64 + n_0 * 512 + n_1];
        let v6 = v4 + v5;
        let v8 = max_f32(v6, 0.0f);
        b5[m * 64 + n_0 * 512 + n_1] = v8;
    }
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 2u);
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

