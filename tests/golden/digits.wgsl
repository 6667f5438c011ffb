// kernel 0, conv: /stem/stem.2/Relu
// 64 invocations, [8, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 16;
const K: i32 = 9;
const N: i32 = 512;
const TILE_M: i32 = 16;
const TILE_N: i32 = 64;
const TILES_M: i32 = 1;
const TILES_N: i32 = 8;
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
    return b1[m * 9 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    let k_3 = i32(u32(k) % 3u);
    let k_2 = i32(u32(k) / 3u);
    let n_3 = i32(u32(n) % 8u);
    let n_2 = i32(u32(n) / 8u % 8u);
    let n_0 = i32(u32(n) / 64u);
    let p0 = 0;
    let p1 = n_2 + k_2 - 1;
    let p2 = n_3 + k_3 - 1;
    var value = 0.0f;
    if (p1 >= 0 && p1 < 8 && p2 >= 0 && p2 < 8) { value = b0[n_0 * 64 + p1 * 8 + p2]; }
    return value;
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let n_1 = i32(u32(n) % 64u);
        let n_0 = i32(u32(n) / 64u);
        let v0 = value;
        let v1 = b2[m];
        let v2 = v0 + v1;
        let v4 = max_f32(v2, 0.0f);
        b3[m * 64 + n_0 * 1024 + n_1] = v4;
    }
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 8u);
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

// kernel 1, conv: /body/body.2/Relu
// 256 invocations, [64, 1, 1] workgroups
// matmul_slice_k
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 256;
const M: i32 = 32;
const K: i32 = 144;
const N: i32 = 512;
const TILE: i32 = 16;
const TILES_M: i32 = 2;
const TILES_N: i32 = 32;
const SLICES: i32 = 16;
const DEPTH: i32 = 4;
const STEP: i32 = 64;
const PITCH: i32 = 5;
const RIGHT: i32 = 320;
const A_M_STEP: i32 = 64;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 4;
var<workgroup> tile: array<vec4f, 1024>;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b1[m * 144 + k];
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
    if (p1 >= 0 && p1 < 8 && p2 >= 0 && p2 < 8) { value = b0[n_0 * 1024 + k_0 * 64 + p1 * 8 + p2]; }
    return value;
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let n_1 = i32(u32(n) % 64u);
        let n_0 = i32(u32(n) / 64u);
        let v0 = value;
        let v1 = b2[m];
        let v2 = v0 + v1;
        let v4 = max_f32(v2, 0.0f);
        b3[m * 64 + n_0 * 2048 + n_1] = v4;
    }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 64u);
    let thread = i32(index);
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
}

// kernel 2, pool: /pool/MaxPool/plimsoll.MaxPool
// 64 invocations, [64, 1, 1] workgroups
// pool
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
const SIZE: i32 = 64;
const OUT_N: i32 = 8;
const IN_N: i32 = 8;
const DATA_N: i32 = 2048;
const OUT_C: i32 = 32;
const IN_C: i32 = 32;
const DATA_C: i32 = 64;
const OUT_Z: i32 = 1;
const IN_Z: i32 = 1;
const DATA_Z: i32 = 0;
const KERNEL_Z: i32 = 1;
const STRIDE_Z: i32 = 1;
const DILATION_Z: i32 = 1;
const PAD_Z: i32 = 0;
const OUT_Y: i32 = 4;
const IN_Y: i32 = 8;
const DATA_Y: i32 = 8;
const KERNEL_Y: i32 = 2;
const STRIDE_Y: i32 = 2;
const DILATION_Y: i32 = 1;
const PAD_Y: i32 = 0;
const OUT_X: i32 = 4;
const IN_X: i32 = 8;
const DATA_X: i32 = 1;
const KERNEL_X: i32 = 2;
const STRIDE_X: i32 = 2;
const DILATION_X: i32 = 1;
const PAD_X: i32 = 0;
const DATA_0: i32 = 0;
const START: f32 = (-3.4028234663852886e38f);
const LOW_Z: i32 = 0;
const HIGH_Z: i32 = 1;
const LOW_Y: i32 = 0;
const HIGH_Y: i32 = 8;
const LOW_X: i32 = 0;
const HIGH_X: i32 = 8;
const COUNT: i32 = 4096;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn data(at: i32) -> f32 {
    return b0[at];
}
fn combine(a: f32, b: f32) -> f32 {
    return max_f32(a, b);
}
fn finish(a: f32, count: i32) -> f32 {
    return a;
}
fn store(i: i32, value: f32) {
    let v0 = value;
    b1[i] = v0;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 64u);
    let thread = i32(index);
    // One invocation per element. Elements inside the data are combined, those inside LOW..HIGH are counted.
    let i = group * SIZE + thread;
    if (i < COUNT) {
        let x = i % OUT_X;
        let y = i / OUT_X % OUT_Y;
        let z = i / (OUT_X * OUT_Y) % OUT_Z;
        let c = i / (OUT_X * OUT_Y * OUT_Z) % OUT_C;
        let n = i / (OUT_X * OUT_Y * OUT_Z * OUT_C);
        let image = DATA_0 + n * DATA_N + c * DATA_C;
        var value = START;
        var count = 0;
        for (var r = 0; r < KERNEL_Z; r++) {
            let w = z * STRIDE_Z + r * DILATION_Z - PAD_Z;
            for (var s = 0; s < KERNEL_Y; s++) {
                let v = y * STRIDE_Y + s * DILATION_Y - PAD_Y;
                for (var t = 0; t < KERNEL_X; t++) {
                    let u = x * STRIDE_X + t * DILATION_X - PAD_X;
                    if (w >= 0 && w < IN_Z && v >= 0 && v < IN_Y && u >= 0 && u < IN_X) {
                        value = combine(value, data(image + w * DATA_Z + v * DATA_Y + u * DATA_X));
                    }
                    if (w >= LOW_Z && w < HIGH_Z && v >= LOW_Y && v < HIGH_Y && u >= LOW_X && u < HIGH_X) {
                        count = count + 1;
                    }
                }
            }
        }
        store(i, finish(value, count));
    }
}

// kernel 3, conv: /head/head.2/Relu
// 256 invocations, [24, 1, 1] workgroups
// matmul_slice_k
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 256;
const M: i32 = 48;
const K: i32 = 288;
const N: i32 = 128;
const TILE: i32 = 16;
const TILES_M: i32 = 3;
const TILES_N: i32 = 8;
const SLICES: i32 = 16;
const DEPTH: i32 = 4;
const STEP: i32 = 64;
const PITCH: i32 = 5;
const RIGHT: i32 = 320;
const A_M_STEP: i32 = 64;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 4;
var<workgroup> tile: array<vec4f, 1024>;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b1[m * 288 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    let k_3 = i32(u32(k) % 3u);
    let k_2 = i32(u32(k) / 3u % 3u);
    let k_0 = i32(u32(k) / 9u);
    let n_3 = i32(u32(n) % 4u);
    let n_2 = i32(u32(n) / 4u % 4u);
    let n_0 = i32(u32(n) / 16u);
    let p0 = 0;
    let p1 = n_2 + k_2 - 1;
    let p2 = n_3 + k_3 - 1;
    var value = 0.0f;
    if (p1 >= 0 && p1 < 4 && p2 >= 0 && p2 < 4) { value = b0[n_0 * 512 + k_0 * 16 + p1 * 4 + p2]; }
    return value;
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let n_1 = i32(u32(n) % 16u);
        let n_0 = i32(u32(n) / 16u);
        let v0 = value;
        let v1 = b2[m];
        let v2 = v0 + v1;
        let v4 = max_f32(v2, 0.0f);
        b3[m * 16 + n_0 * 768 + n_1] = v4;
    }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 24u);
    let thread = i32(index);
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
}

// kernel 4, pool: /pool_1/MaxPool/plimsoll.MaxPool
// 64 invocations, [24, 1, 1] workgroups
// pool
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
const SIZE: i32 = 64;
const OUT_N: i32 = 8;
const IN_N: i32 = 8;
const DATA_N: i32 = 768;
const OUT_C: i32 = 48;
const IN_C: i32 = 48;
const DATA_C: i32 = 16;
const OUT_Z: i32 = 1;
const IN_Z: i32 = 1;
const DATA_Z: i32 = 0;
const KERNEL_Z: i32 = 1;
const STRIDE_Z: i32 = 1;
const DILATION_Z: i32 = 1;
const PAD_Z: i32 = 0;
const OUT_Y: i32 = 2;
const IN_Y: i32 = 4;
const DATA_Y: i32 = 4;
const KERNEL_Y: i32 = 2;
const STRIDE_Y: i32 = 2;
const DILATION_Y: i32 = 1;
const PAD_Y: i32 = 0;
const OUT_X: i32 = 2;
const IN_X: i32 = 4;
const DATA_X: i32 = 1;
const KERNEL_X: i32 = 2;
const STRIDE_X: i32 = 2;
const DILATION_X: i32 = 1;
const PAD_X: i32 = 0;
const DATA_0: i32 = 0;
const START: f32 = (-3.4028234663852886e38f);
const LOW_Z: i32 = 0;
const HIGH_Z: i32 = 1;
const LOW_Y: i32 = 0;
const HIGH_Y: i32 = 4;
const LOW_X: i32 = 0;
const HIGH_X: i32 = 4;
const COUNT: i32 = 1536;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn data(at: i32) -> f32 {
    return b0[at];
}
fn combine(a: f32, b: f32) -> f32 {
    return max_f32(a, b);
}
fn finish(a: f32, count: i32) -> f32 {
    return a;
}
fn store(i: i32, value: f32) {
    let v0 = value;
    b1[i] = v0;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 24u);
    let thread = i32(index);
    // One invocation per element. Elements inside the data are combined, those inside LOW..HIGH are counted.
    let i = group * SIZE + thread;
    if (i < COUNT) {
        let x = i % OUT_X;
        let y = i / OUT_X % OUT_Y;
        let z = i / (OUT_X * OUT_Y) % OUT_Z;
        let c = i / (OUT_X * OUT_Y * OUT_Z) % OUT_C;
        let n = i / (OUT_X * OUT_Y * OUT_Z * OUT_C);
        let image = DATA_0 + n * DATA_N + c * DATA_C;
        var value = START;
        var count = 0;
        for (var r = 0; r < KERNEL_Z; r++) {
            let w = z * STRIDE_Z + r * DILATION_Z - PAD_Z;
            for (var s = 0; s < KERNEL_Y; s++) {
                let v = y * STRIDE_Y + s * DILATION_Y - PAD_Y;
                for (var t = 0; t < KERNEL_X; t++) {
                    let u = x * STRIDE_X + t * DILATION_X - PAD_X;
                    if (w >= 0 && w < IN_Z && v >= 0 && v < IN_Y && u >= 0 && u < IN_X) {
                        value = combine(value, data(image + w * DATA_Z + v * DATA_Y + u * DATA_X));
                    }
                    if (w >= LOW_Z && w < HIGH_Z && v >= LOW_Y && v < HIGH_Y && u >= LOW_X && u < HIGH_X) {
                        count = count + 1;
                    }
                }
            }
        }
        store(i, finish(value, count));
    }
}

// kernel 5, matmul: /Relu
// 256 invocations, [2, 1, 1] workgroups
// matmul_slice_k
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 256;
const M: i32 = 8;
const K: i32 = 192;
const N: i32 = 28;
const TILE: i32 = 16;
const TILES_M: i32 = 1;
const TILES_N: i32 = 2;
const SLICES: i32 = 16;
const DEPTH: i32 = 4;
const STEP: i32 = 64;
const PITCH: i32 = 5;
const RIGHT: i32 = 320;
const A_M_STEP: i32 = 64;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 4;
var<workgroup> tile: array<vec4f, 1024>;
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b0[m * 192 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    return b1[k * 28 + n];
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let v0 = value;
        let v1 = b2[n];
        let v2 = v0 + v1;
        let v4 = max_f32(v2, 0.0f);
        b3[m * 28 + n] = v4;
    }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 2u);
    let thread = i32(index);
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
}

// kernel 6, matmul: /out/Gemm/Add
// 64 invocations, [1, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 8;
const K: i32 = 28;
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
    return b0[m * 28 + k];
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

