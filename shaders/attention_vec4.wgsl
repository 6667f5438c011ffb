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
    //@ each four
    let s$ = s + $ * SIZE;
    let m$ = s$ / A_M_STEP % ROWS;
    let k$ = s$ / A_K_STEP % DEPTH;
    let at$ = min(from_m + m$, M - 1);
    let four$ = vec4f(a(batch, at$, k$ * 4), a(batch, at$, k$ * 4 + 1), a(batch, at$, k$ * 4 + 2), a(batch, at$, k$ * 4 + 3));
    //@ end
    //@ each four
    if (s$ < ROWS * DEPTH) {
        tile[m$ * PITCH + k$] = four$;
    }
    //@ end
}
//@ each row
var top$ = LOWEST;
var total$ = 0.0f;
//@ end
//@ each piece
let column$ = min(lane + $ * LANES, WIDTH - 1);
//@ end
//@ each sum
var sum$ = vec4f(0.0f);
//@ end
//@ if BAND
for (var from_n = first_key(from_m) / COLUMNS * COLUMNS; from_n < end_key(from_m + ROWS); from_n = from_n + COLUMNS) {
//@ else
for (var from_n = 0; from_n < N; from_n = from_n + COLUMNS) {
//@ end
    workgroupBarrier();
    for (var s = thread; s < COLUMNS * DEPTH; s = s + SIZE * 4) {
        //@ each four
        let s$ = s + $ * SIZE;
        let n$ = s$ / B_N_STEP % COLUMNS;
        let k$ = s$ / B_K_STEP % DEPTH;
        let at$ = min(from_n + n$, N - 1);
        let four$ = vec4f(b(batch, k$ * 4, at$), b(batch, k$ * 4 + 1, at$), b(batch, k$ * 4 + 2, at$), b(batch, k$ * 4 + 3, at$));
        //@ end
        //@ each four
        if (s$ < COLUMNS * DEPTH) {
            tile[KEYS + n$ * PITCH + k$] = four$;
        }
        //@ end
    }
    //@ if APART
    for (var s = thread; s < COLUMNS * WIDTH; s = s + SIZE * 4) {
        //@ each four
        let s$ = s + $ * SIZE;
        let e$ = s$ % WIDTH * 4;
        let at$ = min(from_n + s$ / WIDTH, N - 1);
        let four$ = vec4f(c(batch, at$, e$), c(batch, at$, e$ + 1), c(batch, at$, e$ + 2), c(batch, at$, e$ + 3));
        //@ end
        //@ each four
        if (s$ < COLUMNS * WIDTH) {
            //@ if RAGGED
            // Nothing times infinity is no number.
            tile[VALUES + s$] = select(vec4f(0.0f), four$, from_n + s$ / WIDTH < N);
            //@ else
            tile[VALUES + s$] = four$;
            //@ end
        }
        //@ end
    }
    //@ end
    workgroupBarrier();
    //@ each row
    var score$ = vec4f(0.0f);
    //@ end
    for (var k = 0; k < DEPTH; k++) {
        let key0 = tile[KEYS + places.x * PITCH + k];
        let key1 = tile[KEYS + places.y * PITCH + k];
        let key2 = tile[KEYS + places.z * PITCH + k];
        let key3 = tile[KEYS + places.w * PITCH + k];
        //@ each row
        let query$ = tile[(row + $ * SIDE) * PITCH + k];
        score$ = score$ + vec4f(dot(query$, key0), dot(query$, key1), dot(query$, key2), dot(query$, key3));
        //@ end
    }
    let seen = min(places + vec4<i32>(from_n), vec4<i32>(N - 1));
    //@ each row
    let query_row$ = min(from_m + row + $ * SIDE, M - 1);
    score$.x = score(batch, query_row$, seen.x, score$.x);
    score$.y = score(batch, query_row$, seen.y, score$.y);
    score$.z = score(batch, query_row$, seen.z, score$.z);
    score$.w = score(batch, query_row$, seen.w, score$.w);
    partial[(row + $ * SIDE) * LANES + lane] = max(max(score$.x, score$.y), max(score$.z, score$.w));
    //@ end
    workgroupBarrier();
    //@ if APART
    //@ else
    for (var s = thread; s < COLUMNS * WIDTH; s = s + SIZE * 4) {
        //@ each four
        let s$ = s + $ * SIZE;
        let e$ = s$ % WIDTH * 4;
        let at$ = min(from_n + s$ / WIDTH, N - 1);
        let four$ = vec4f(c(batch, at$, e$), c(batch, at$, e$ + 1), c(batch, at$, e$ + 2), c(batch, at$, e$ + 3));
        //@ end
        //@ each four
        if (s$ < COLUMNS * WIDTH) {
            //@ if RAGGED
            // Nothing times infinity is no number.
            tile[VALUES + s$] = select(vec4f(0.0f), four$, from_n + s$ / WIDTH < N);
            //@ else
            tile[VALUES + s$] = four$;
            //@ end
        }
        //@ end
    }
    //@ end
    //@ each row
    var largest$ = top$;
    for (var l = 0; l < LANES; l++) {
        largest$ = max(largest$, partial[(row + $ * SIDE) * LANES + l]);
    }
    let fade$ = exp(top$ - largest$);
    top$ = largest$;
    score$ = exp(score$ - vec4f(top$));
    //@ if RAGGED
    score$ = select(vec4f(0.0f), score$, places + vec4<i32>(from_n) < vec4<i32>(N));
    //@ end
    total$ = total$ * fade$ + (score$.x + score$.y + score$.z + score$.w);
    weights[(row + $ * SIDE) * LANES + lane] = score$;
    //@ end
    //@ each sum
    sum$ = sum$ * FADE;
    //@ end
    workgroupBarrier();
    for (var l = 0; l < LANES; l++) {
        //@ each row
        let weight$ = weights[(row + $ * SIDE) * LANES + l];
        //@ end
        //@ each piece
        let first$ = tile[VALUES + l * WIDTH + column$];
        let second$ = tile[VALUES + (l + LANES) * WIDTH + column$];
        let third$ = tile[VALUES + (l + LANES * 2) * WIDTH + column$];
        let fourth$ = tile[VALUES + (l + LANES * 3) * WIDTH + column$];
        //@ end
        //@ each sum
        sum$ = sum$ + WEIGHT.x * FIRST + WEIGHT.y * SECOND + WEIGHT.z * THIRD + WEIGHT.w * FOURTH;
        //@ end
    }
}
//@ each row
partial[(row + $ * SIDE) * LANES + lane] = total$;
//@ end
workgroupBarrier();
//@ each row
var whole$ = 0.0f;
for (var l = 0; l < LANES; l++) {
    whole$ = whole$ + partial[(row + $ * SIDE) * LANES + l];
}
//@ end
//@ each sum
sum$ = sum$ / WHOLE;
//@ if GUARDED
sum$ = select(vec4f(0.0f), sum$, WHOLE > 0.0f && TOP > LOWEST);
//@ end
store(batch, from_m + row + DOWN * SIDE, (lane + OVER * LANES) * 4, sum$.x);
store(batch, from_m + row + DOWN * SIDE, (lane + OVER * LANES) * 4 + 1, sum$.y);
store(batch, from_m + row + DOWN * SIDE, (lane + OVER * LANES) * 4 + 2, sum$.z);
store(batch, from_m + row + DOWN * SIDE, (lane + OVER * LANES) * 4 + 3, sum$.w);
//@ end
