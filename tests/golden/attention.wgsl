// kernel 0, row: normed/Add
// 256 invocations, [2, 1, 1] workgroups
// row
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 256;
const START0: f32 = 0.0f;
const START1: f32 = 0.0f;
const COUNT: i32 = 32;
const LENGTH: i32 = 64;
const LANES: i32 = 16;
const ROWS: i32 = 16;
const LANE_STEP: i32 = 1;
const ROW_STEP: i32 = 16;
const BLOCK: i32 = 1024;
var<workgroup> shared_f32: array<f32, 256>;
var<private> fold0: f32;
var<private> fold1: f32;
fn element0(row: i32, j: i32) -> f32 {
    let v0 = b0[row * 64 + j];
    return v0;
}
fn combine0(a: f32, b: f32) -> f32 {
    return a + b;
}
fn element1(row: i32, j: i32) -> f32 {
    let v0 = b0[row * 64 + j];
    let v1 = fold0;
    let v3 = v1 / 64.0f;
    let v4 = v0 - v3;
    let v5 = v4 * v4;
    return v5;
}
fn combine1(a: f32, b: f32) -> f32 {
    return a + b;
}
fn store(row: i32, j: i32) {
    let v0 = b0[row * 64 + j];
    let v1 = fold0;
    let v3 = v1 / 64.0f;
    let v4 = v0 - v3;
    let v5 = fold1;
    let v6 = v5 / 64.0f;
    let v8 = v6 + 1e-5f;
    let v9 = sqrt(v8);
    let v10 = 1.0f / v9;
    let v11 = v4 * v10;
    let v12 = b1[j];
    let v13 = v11 * v12;
    let v14 = b2[j];
    let v15 = v13 + v14;
    b3[row * 64 + j] = v15;
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 2u);
    let thread = i32(index);
    // LANES invocations per row, ROWS rows per workgroup. Each lane folds blocks of its elements, then the blocks, then the
    // lanes meet in a tree: short sums of short sums, for accuracy.
    let lane = thread / LANE_STEP % LANES;
    let row = group * ROWS + thread / ROW_STEP % ROWS;
    let live = row < COUNT;
    let end = select(0, LENGTH, live);
    var all0 = START0;
    for (var first = lane; first < end; first = first + BLOCK) {
        var block = START0;
        let last = min(first + BLOCK, end);
        for (var j = first; j < last; j = j + LANES) {
            block = combine0(block, element0(row, j));
        }
        all0 = combine0(all0, block);
    }
    shared_f32[thread] = all0;
    workgroupBarrier();
    for (var half = LANES / 2; half > 0; half = half / 2) {
        if (lane < half) {
            shared_f32[thread] = combine0(shared_f32[thread], shared_f32[thread + half * LANE_STEP]);
        }
        workgroupBarrier();
    }
    fold0 = shared_f32[thread - lane * LANE_STEP];
    workgroupBarrier();
    var all1 = START1;
    for (var first = lane; first < end; first = first + BLOCK) {
        var block = START1;
        let last = min(first + BLOCK, end);
        for (var j = first; j < last; j = j + LANES) {
            block = combine1(block, element1(row, j));
        }
        all1 = combine1(all1, block);
    }
    shared_f32[thread] = all1;
    workgroupBarrier();
    for (var half = LANES / 2; half > 0; half = half / 2) {
        if (lane < half) {
            shared_f32[thread] = combine1(shared_f32[thread], shared_f32[thread + half * LANE_STEP]);
        }
        workgroupBarrier();
    }
    fold1 = shared_f32[thread - lane * LANE_STEP];
    workgroupBarrier();
    for (var j = lane; j < end; j = j + LANES) {
        store(row, j);
    }
}

// kernel 1, matmul: query_sum, key_sum, value_sum
// 64 invocations, [2, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 32;
const K: i32 = 64;
const N: i32 = 64;
const TILE_M: i32 = 32;
const TILE_N: i32 = 32;
const TILES_M: i32 = 1;
const TILES_N: i32 = 2;
const STEP: i32 = 16;
const A_M_STEP: i32 = 16;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 32;
var<workgroup> tile_a: array<f32, 512>;
var<workgroup> tile_b: array<f32, 512>;
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b0[m * 64 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    return b1[k * 64 + n];
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let v0 = value;
        let v1 = b2[n];
        let v2 = v0 + v1;
        b3[m * 64 + n] = v2;
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

// kernel 2, attention: heads
// 128 invocations, [128, 1, 1] workgroups
// attention
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 128;
const LOWEST: f32 = (-3.4028235e38f);
const M: i32 = 16;
const N: i32 = 16;
const K: i32 = 16;
const COLUMNS_OUT: i32 = 16;
const ROWS: i32 = 1;
const COLUMNS: i32 = 128;
const LANES: i32 = 128;
const GROUPS: i32 = 16;
const STEP: i32 = 16;
const A_M_STEP: i32 = 16;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 16;
const B_K_STEP: i32 = 1;
var<workgroup> tile_a: array<f32, 16>;
var<workgroup> tile_b: array<f32, 2048>;
var<workgroup> scores: array<f32, 128>;
var<workgroup> partial: array<f32, 128>;
fn a(batch: i32, m: i32, k: i32) -> f32 {
    let batch_1 = i32(u32(batch) % 4u);
    let batch_0 = i32(u32(batch) / 4u);
    return b0[batch_0 * 1024 + batch_1 * 16 + m * 64 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    let batch_1 = i32(u32(batch) % 4u);
    let batch_0 = i32(u32(batch) / 4u);
    return b1[batch_0 * 1024 + batch_1 * 16 + k + n * 64];
}
fn c(batch: i32, n: i32, e: i32) -> f32 {
    let batch_1 = i32(u32(batch) % 4u);
    let batch_0 = i32(u32(batch) / 4u);
    var value = 0.0f;
    if (e < 16) { value = b2[batch_0 * 1024 + batch_1 * 16 + n * 64 + e]; }
    return value;
}
fn score(batch: i32, m: i32, n: i32, value: f32) -> f32 {
    var result = LOWEST;
    if (m < M && n < N) {
        let v0 = value;
        let v2 = v0 * 0.25f;
        result = v2;
    }
    return result;
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < COLUMNS_OUT) {
        let batch_1 = i32(u32(batch) % 4u);
        let batch_0 = i32(u32(batch) / 4u);
        let v0 = value;
        b3[batch_0 * 1024 + batch_1 * 16 + m * 64 + n] = v0;
    }
}
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = i32(id.x + id.y * 128u);
    let thread = i32(index);
    // A workgroup computes ROWS rows of the result. It walks along the keys, COLUMNS at a time: their scores, the largest
    // score and the sum of powers so far, and the values weighted by the powers. What was summed before is scaled down when
    // a larger score appears. LANES invocations share a row.
    let batch = group / GROUPS;
    let m0 = group % GROUPS * ROWS;
    let row = thread / LANES;
    let lane = thread % LANES;
    var top = LOWEST;
    var total = 0.0f;
    var sum0 = 0.0f;
    for (var n0 = 0; n0 < N; n0 = n0 + COLUMNS) {
        var product0 = 0.0f;
        for (var k0 = 0; k0 < K; k0 = k0 + STEP) {
            for (var s = thread; s < ROWS * STEP; s = s + SIZE) {
                let m = s / A_M_STEP % ROWS;
                let k = s / A_K_STEP % STEP;
                var value = 0.0f;
                if (m0 + m < M && k0 + k < K) {
                    value = a(batch, m0 + m, k0 + k);
                }
                tile_a[k * ROWS + m] = value;
            }
            for (var s = thread; s < COLUMNS * STEP; s = s + SIZE) {
                let n = s / B_N_STEP % COLUMNS;
                let k = s / B_K_STEP % STEP;
                var value = 0.0f;
                if (n0 + n < N && k0 + k < K) {
                    value = b(batch, k0 + k, n0 + n);
                }
                tile_b[k * COLUMNS + n] = value;
            }
            workgroupBarrier();
            for (var k = 0; k < STEP; k++) {
                let right = tile_b[k * COLUMNS + thread % COLUMNS];
                product0 = product0 + tile_a[k * ROWS + (thread + 0 * SIZE) / COLUMNS] * right;
            }
            workgroupBarrier();
        }
        scores[thread + 0 * SIZE] = score(batch, m0 + (thread + 0 * SIZE) / COLUMNS, n0 + thread % COLUMNS, product0);
        workgroupBarrier();
        let end = min(COLUMNS, N - n0);
        var largest = top;
        for (var n = lane; n < end; n = n + LANES) {
            largest = max(largest, scores[row * COLUMNS + n]);
        }
        partial[thread] = largest;
        workgroupBarrier();
        for (var half = LANES / 2; half > 0; half = half / 2) {
            if (lane < half) {
                partial[thread] = max(partial[thread], partial[thread + half]);
            }
            workgroupBarrier();
        }
        largest = partial[thread - lane];
        workgroupBarrier();
        let fade = exp(top - largest);
        top = largest;
        var part = 0.0f;
        for (var n = lane; n < end; n = n + LANES) {
            let power = exp(scores[row * COLUMNS + n] - top);
            scores[row * COLUMNS + n] = power;
            part = part + power;
        }
        partial[thread] = part;
        workgroupBarrier();
        for (var half = LANES / 2; half > 0; half = half / 2) {
            if (lane < half) {
                partial[thread] = partial[thread] + partial[thread + half];
            }
            workgroupBarrier();
        }
        total = total * fade + partial[thread - lane];
        sum0 = sum0 * fade;
        for (var n = 0; n < end; n++) {
            let weight = scores[row * COLUMNS + n];
            sum0 = sum0 + weight * c(batch, n0 + n, lane + 0 * LANES);
        }
        workgroupBarrier();
    }
    store(batch, m0 + row, lane + 0 * LANES, sum0 / total);
}

// kernel 3, matmul: y
// 64 invocations, [2, 1, 1] workgroups
// matmul
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read> b3: array<f32>;
@group(0) @binding(4) var<storage, read_write> b4: array<f32>;
const SIZE: i32 = 64;
const M: i32 = 32;
const K: i32 = 64;
const N: i32 = 64;
const TILE_M: i32 = 32;
const TILE_N: i32 = 32;
const TILES_M: i32 = 1;
const TILES_N: i32 = 2;
const STEP: i32 = 16;
const A_M_STEP: i32 = 16;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 1;
const B_K_STEP: i32 = 32;
var<workgroup> tile_a: array<f32, 512>;
var<workgroup> tile_b: array<f32, 512>;
fn a(batch: i32, m: i32, k: i32) -> f32 {
    return b0[m * 64 + k];
}
fn b(batch: i32, k: i32, n: i32) -> f32 {
    return b1[k * 64 + n];
}
fn store(batch: i32, m: i32, n: i32, value: f32) {
    if (m < M && n < N) {
        let v0 = b3[m * 64 + n];
        let v1 = value;
        let v2 = b2[n];
        let v3 = v1 + v2;
        let v4 = v0 + v3;
        b4[m * 64 + n] = v4;
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

