// Products of few rows by numbers of few bits. TEAM invocations compute ROWS sums of a column: each takes every TEAM-th word of it, so that
// neighbours read neighbours. A column has WORDS words, BLOCK of them in a block, of PER numbers each.
let lane = thread % TEAM;
let n = group % TILES_N * COLUMNS + thread / TEAM;
let m0 = group / TILES_N * ROWS;
//@ each row
var sum$ = 0.0f;
//@ end
if (n < N) {
    for (var w = lane; w < WORDS; w = w + TEAM) {
        let word = words(n * WORDS + w);
        let block = w / BLOCK;
        let zero = zero_point(n, block);
        //@ each row
        var part$ = 0.0f;
        //@ end
        for (var j = 0; j < PER; j++) {
            let k = w * PER + j;
            if (k < K) {
                let number = f32((word >> u32(j * BITS)) & MASK) - zero;
                //@ each row
                part$ = part$ + a(0, min(m0 + $, M - 1), k) * number;
                //@ end
            }
        }
        let by = scale(n, block);
        //@ each row
        sum$ = sum$ + part$ * by;
        //@ end
    }
}
//@ each row
sums[thread] = sum$;
for (var step = TEAM / 2; step > 0; step = step / 2) {
    workgroupBarrier();
    if (lane < step) {
        sums[thread] = sums[thread] + sums[thread + step];
    }
}
if (lane == 0) {
    store(0, m0 + $, n, sums[thread]);
}
workgroupBarrier();
//@ end
