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
var<private> reduced0: f32;
var<private> reduced1: f32;
fn element0(row: i32, j: i32) -> f32 {
    let v0 = b0[row * 64 + j];
    return v0;
}
fn combine0(a: f32, b: f32) -> f32 {
    return a + b;
}
fn element1(row: i32, j: i32) -> f32 {
    let v0 = b0[row * 64 + j];
    let v1 = reduced0;
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
    let v1 = reduced0;
    let v3 = v1 / 64.0f;
    let v4 = v0 - v3;
    let v5 = reduced1;
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
    // LANES invocations per row, ROWS rows per workgroup. Each lane reduces blocks of its elements, four on their way at a time, then the
    // blocks, then the lanes meet in a tree: short sums of short sums, for accuracy. With subgroups, the lanes of each meet in one, and their results
    // one after another.
    let lane = thread / LANE_STEP % LANES;
    let row = group * ROWS + thread / ROW_STEP % ROWS;
    let live = row < COUNT;
    let end = select(0, LENGTH, live);
    var all0 = START0;
    for (var first = lane; first < end; first = first + BLOCK) {
        var block = START0;
        let last = min(first + BLOCK, end);
        var j = first;
        for (; j + 3 * LANES < last; j = j + 4 * LANES) {
            let a = combine0(element0(row, j), element0(row, j + LANES));
            let b = combine0(element0(row, j + 2 * LANES), element0(row, j + 3 * LANES));
            block = combine0(block, combine0(a, b));
        }
        for (; j < last; j = j + LANES) {
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
    reduced0 = shared_f32[thread - lane * LANE_STEP];
    workgroupBarrier();
    var all1 = START1;
    for (var first = lane; first < end; first = first + BLOCK) {
        var block = START1;
        let last = min(first + BLOCK, end);
        var j = first;
        for (; j + 3 * LANES < last; j = j + 4 * LANES) {
            let a = combine1(element1(row, j), element1(row, j + LANES));
            let b = combine1(element1(row, j + 2 * LANES), element1(row, j + 3 * LANES));
            block = combine1(block, combine1(a, b));
        }
        for (; j < last; j = j + LANES) {
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
    reduced1 = shared_f32[thread - lane * LANE_STEP];
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
// 128 invocations, [16, 1, 1] workgroups
// attention_vec4
@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
const SIZE: i32 = 128;
const LOWEST: f32 = (-3.4028234663852886e38f);
const M: i32 = 16;
const N: i32 = 16;
const K: i32 = 16;
const COLUMNS_OUT: i32 = 16;
const ROWS: i32 = 8;
const COLUMNS: i32 = 64;
const LANES: i32 = 16;
const SIDE: i32 = 8;
const GROUPS: i32 = 2;
const DEPTH: i32 = 4;
const PITCH: i32 = 5;
const WIDTH: i32 = 4;
const KEYS: i32 = 40;
const VALUES: i32 = 360;
const A_M_STEP: i32 = 4;
const A_K_STEP: i32 = 1;
const B_N_STEP: i32 = 4;
const B_K_STEP: i32 = 1;
var<workgroup> tile: array<vec4f, 616>;
var<workgroup> weights: array<vec4f, 128>;
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
    return b2[batch_0 * 1024 + batch_1 * 16 + n * 64 + e];
}
fn score(batch: i32, m: i32, n: i32, value: f32) -> f32 {
    let v0 = value;
    let v2 = v0 * 0.25f;
    return v2;
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
    let group = i32(id.x + id.y * 16u);
    let thread = i32(index);
    // Attention with sums in registers, of vectors of four along the inner axes. A workgroup computes ROWS rows of the result, LANES invocations
    // SIDE rows apart, and walks along the keys, COLUMNS at a time: their scores, of which an invocation has four that are LANES apart, the
    // largest score and the sum of powers so far, and the values weighted by the powers. What was summed before is scaled down when a larger
    // score appears. Values take the place of keys in workgroup memory where there is no room for both. Nothing is asked for under a
    // condition, and several vectors at a time, so that none waits for another: places outside are those of the last row or key.
    let batch = group / GROUPS;
    let from_m = group % GROUPS * ROWS;
    let lane = thread % LANES;
    let row = thread / LANES;
    let places = vec4<i32>(lane, lane + LANES, lane + LANES * 2, lane + LANES * 3);
    for (var s = thread; s < ROWS * DEPTH; s = s + SIZE * 4) {
        let s0 = s + 0 * SIZE;
        let m0 = s0 / A_M_STEP % ROWS;
        let k0 = s0 / A_K_STEP % DEPTH;
        let at0 = min(from_m + m0, M - 1);
        let four0 = vec4f(a(batch, at0, k0 * 4), a(batch, at0, k0 * 4 + 1), a(batch, at0, k0 * 4 + 2), a(batch, at0, k0 * 4 + 3));
        let s1 = s + 1 * SIZE;
        let m1 = s1 / A_M_STEP % ROWS;
        let k1 = s1 / A_K_STEP % DEPTH;
        let at1 = min(from_m + m1, M - 1);
        let four1 = vec4f(a(batch, at1, k1 * 4), a(batch, at1, k1 * 4 + 1), a(batch, at1, k1 * 4 + 2), a(batch, at1, k1 * 4 + 3));
        let s2 = s + 2 * SIZE;
        let m2 = s2 / A_M_STEP % ROWS;
        let k2 = s2 / A_K_STEP % DEPTH;
        let at2 = min(from_m + m2, M - 1);
        let four2 = vec4f(a(batch, at2, k2 * 4), a(batch, at2, k2 * 4 + 1), a(batch, at2, k2 * 4 + 2), a(batch, at2, k2 * 4 + 3));
        let s3 = s + 3 * SIZE;
        let m3 = s3 / A_M_STEP % ROWS;
        let k3 = s3 / A_K_STEP % DEPTH;
        let at3 = min(from_m + m3, M - 1);
        let four3 = vec4f(a(batch, at3, k3 * 4), a(batch, at3, k3 * 4 + 1), a(batch, at3, k3 * 4 + 2), a(batch, at3, k3 * 4 + 3));
        if (s0 < ROWS * DEPTH) {
            tile[m0 * PITCH + k0] = four0;
        }
        if (s1 < ROWS * DEPTH) {
            tile[m1 * PITCH + k1] = four1;
        }
        if (s2 < ROWS * DEPTH) {
            tile[m2 * PITCH + k2] = four2;
        }
        if (s3 < ROWS * DEPTH) {
            tile[m3 * PITCH + k3] = four3;
        }
    }
    var top0 = LOWEST;
    var total0 = 0.0f;
    let column0 = min(lane + 0 * LANES, WIDTH - 1);
    var sum0 = vec4f(0.0f);
    for (var from_n = 0; from_n < N; from_n = from_n + COLUMNS) {
        workgroupBarrier();
        for (var s = thread; s < COLUMNS * DEPTH; s = s + SIZE * 4) {
            let s0 = s + 0 * SIZE;
            let n0 = s0 / B_N_STEP % COLUMNS;
            let k0 = s0 / B_K_STEP % DEPTH;
            let at0 = min(from_n + n0, N - 1);
            let four0 = vec4f(b(batch, k0 * 4, at0), b(batch, k0 * 4 + 1, at0), b(batch, k0 * 4 + 2, at0), b(batch, k0 * 4 + 3, at0));
            let s1 = s + 1 * SIZE;
            let n1 = s1 / B_N_STEP % COLUMNS;
            let k1 = s1 / B_K_STEP % DEPTH;
            let at1 = min(from_n + n1, N - 1);
            let four1 = vec4f(b(batch, k1 * 4, at1), b(batch, k1 * 4 + 1, at1), b(batch, k1 * 4 + 2, at1), b(batch, k1 * 4 + 3, at1));
            let s2 = s + 2 * SIZE;
            let n2 = s2 / B_N_STEP % COLUMNS;
            let k2 = s2 / B_K_STEP % DEPTH;
            let at2 = min(from_n + n2, N - 1);
            let four2 = vec4f(b(batch, k2 * 4, at2), b(batch, k2 * 4 + 1, at2), b(batch, k2 * 4 + 2, at2), b(batch, k2 * 4 + 3, at2));
            let s3 = s + 3 * SIZE;
            let n3 = s3 / B_N_STEP % COLUMNS;
            let k3 = s3 / B_K_STEP % DEPTH;
            let at3 = min(from_n + n3, N - 1);
            let four3 = vec4f(b(batch, k3 * 4, at3), b(batch, k3 * 4 + 1, at3), b(batch, k3 * 4 + 2, at3), b(batch, k3 * 4 + 3, at3));
            if (s0 < COLUMNS * DEPTH) {
                tile[KEYS + n0 * PITCH + k0] = four0;
            }
            if (s1 < COLUMNS * DEPTH) {
                tile[KEYS + n1 * PITCH + k1] = four1;
            }
            if (s2 < COLUMNS * DEPTH) {
                tile[KEYS + n2 * PITCH + k2] = four2;
            }
            if (s3 < COLUMNS * DEPTH) {
                tile[KEYS + n3 * PITCH + k3] = four3;
            }
        }
        for (var s = thread; s < COLUMNS * WIDTH; s = s + SIZE * 4) {
            let s0 = s + 0 * SIZE;
            let e0 = s0 % WIDTH * 4;
            let at0 = min(from_n + s0 / WIDTH, N - 1);
            let four0 = vec4f(c(batch, at0, e0), c(batch, at0, e0 + 1), c(batch, at0, e0 + 2), c(batch, at0, e0 + 3));
            let s1 = s + 1 * SIZE;
            let e1 = s1 % WIDTH * 4;
            let at1 = min(from_n + s1 / WIDTH, N - 1);
            let four1 = vec4f(c(batch, at1, e1), c(batch, at1, e1 + 1), c(batch, at1, e1 + 2), c(batch, at1, e1 + 3));
            let s2 = s + 2 * SIZE;
            let e2 = s2 % WIDTH * 4;
            let at2 = min(from_n + s2 / WIDTH, N - 1);
            let four2 = vec4f(c(batch, at2, e2), c(batch, at2, e2 + 1), c(batch, at2, e2 + 2), c(batch, at2, e2 + 3));
            let s3 = s + 3 * SIZE;
            let e3 = s3 % WIDTH * 4;
            let at3 = min(from_n + s3 / WIDTH, N - 1);
            let four3 = vec4f(c(batch, at3, e3), c(batch, at3, e3 + 1), c(batch, at3, e3 + 2), c(batch, at3, e3 + 3));
            if (s0 < COLUMNS * WIDTH) {
                // Nothing times infinity is no number.
                tile[VALUES + s0] = select(vec4f(0.0f), four0, from_n + s0 / WIDTH < N);
            }
            if (s1 < COLUMNS * WIDTH) {
                // Nothing times infinity is no number.
                tile[VALUES + s1] = select(vec4f(0.0f), four1, from_n + s1 / WIDTH < N);
            }
            if (s2 < COLUMNS * WIDTH) {
                // Nothing times infinity is no number.
                tile[VALUES + s2] = select(vec4f(0.0f), four2, from_n + s2 / WIDTH < N);
            }
            if (s3 < COLUMNS * WIDTH) {
                // Nothing times infinity is no number.
                tile[VALUES + s3] = select(vec4f(0.0f), four3, from_n + s3 / WIDTH < N);
            }
        }
        workgroupBarrier();
        var score0 = vec4f(0.0f);
        for (var k = 0; k < DEPTH; k++) {
            let key0 = tile[KEYS + places.x * PITCH + k];
            let key1 = tile[KEYS + places.y * PITCH + k];
            let key2 = tile[KEYS + places.z * PITCH + k];
            let key3 = tile[KEYS + places.w * PITCH + k];
            let query0 = tile[(row + 0 * SIDE) * PITCH + k];
            score0 = score0 + vec4f(dot(query0, key0), dot(query0, key1), dot(query0, key2), dot(query0, key3));
        }
        let seen = min(places + vec4<i32>(from_n), vec4<i32>(N - 1));
        let query_row0 = min(from_m + row + 0 * SIDE, M - 1);
        score0.x = score(batch, query_row0, seen.x, score0.x);
        score0.y = score(batch, query_row0, seen.y, score0.y);
        score0.z = score(batch, query_row0, seen.z, score0.z);
        score0.w = score(batch, query_row0, seen.w, score0.w);
        partial[(row + 0 * SIDE) * LANES + lane] = max(max(score0.x, score0.y), max(score0.z, score0.w));
        workgroupBarrier();
        var largest0 = top0;
        for (var l = 0; l < LANES; l++) {
            largest0 = max(largest0, partial[(row + 0 * SIDE) * LANES + l]);
        }
        let fade0 = exp(top0 - largest0);
        top0 = largest0;
        score0 = exp(score0 - vec4f(top0));
        score0 = select(vec4f(0.0f), score0, places + vec4<i32>(from_n) < vec4<i32>(N));
        total0 = total0 * fade0 + (score0.x + score0.y + score0.z + score0.w);
        weights[(row + 0 * SIDE) * LANES + lane] = score0;
        sum0 = sum0 * fade0;
        workgroupBarrier();
        for (var l = 0; l < LANES; l++) {
            let weight0 = weights[(row + 0 * SIDE) * LANES + l];
            let first0 = tile[VALUES + l * WIDTH + column0];
            let second0 = tile[VALUES + (l + LANES) * WIDTH + column0];
            let third0 = tile[VALUES + (l + LANES * 2) * WIDTH + column0];
            let fourth0 = tile[VALUES + (l + LANES * 3) * WIDTH + column0];
            sum0 = sum0 + weight0.x * first0 + weight0.y * second0 + weight0.z * third0 + weight0.w * fourth0;
        }
    }
    partial[(row + 0 * SIDE) * LANES + lane] = total0;
    workgroupBarrier();
    var whole0 = 0.0f;
    for (var l = 0; l < LANES; l++) {
        whole0 = whole0 + partial[(row + 0 * SIDE) * LANES + l];
    }
    sum0 = sum0 / whole0;
    store(batch, from_m + row + 0 * SIDE, (lane + 0 * LANES) * 4, sum0.x);
    store(batch, from_m + row + 0 * SIDE, (lane + 0 * LANES) * 4 + 1, sum0.y);
    store(batch, from_m + row + 0 * SIDE, (lane + 0 * LANES) * 4 + 2, sum0.z);
    store(batch, from_m + row + 0 * SIDE, (lane + 0 * LANES) * 4 + 3, sum0.w);
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

