// TEAM invocations compute an element: each takes every TEAM-th word of the right operand's row, so that neighbours read neighbours. A row has
// WORDS words, BLOCK of them in a block, of PER numbers each.
let lane = thread % TEAM;
let i = group * (SIZE / TEAM) + thread / TEAM;
var sum = 0.0f;
if (i < COUNT) {
    let row = i / COLUMNS;
    let column = i % COLUMNS;
    for (var w = lane; w < WORDS; w = w + TEAM) {
        let word = words(column * WORDS + w);
        let block = w / BLOCK;
        let zero = zero_point(column, block);
        let first = w * PER;
        var part = 0.0f;
        for (var j = 0; j < PER; j++) {
            if (first + j < TERMS) {
                let number = (word >> u32(j * BITS)) & MASK;
                part = part + left(row, first + j) * (f32(number) - zero);
            }
        }
        sum = sum + part * scale(column, block);
    }
}
sums[thread] = sum;
for (var step = TEAM / 2; step > 0; step = step / 2) {
    workgroupBarrier();
    if (lane < step) {
        sums[thread] = sums[thread] + sums[thread + step];
    }
}
if (i < COUNT && lane == 0) {
    store(i, sums[thread]);
}
