// One invocation per element. A row of the right operand has BLOCKS blocks of WORDS words, of PER numbers each.
let i = group * SIZE + thread;
if (i < COUNT) {
    let row = i / COLUMNS;
    let column = i % COLUMNS;
    var sum = 0.0f;
    for (var block = 0; block < BLOCKS; block++) {
        let zero = zero_point(column, block);
        var part = 0.0f;
        for (var w = 0; w < WORDS; w++) {
            let word = words((column * BLOCKS + block) * WORDS + w);
            let first = (block * WORDS + w) * PER;
            for (var j = 0; j < PER; j++) {
                if (first + j < TERMS) {
                    let number = (word >> u32(j * BITS)) & MASK;
                    part = part + left(row, first + j) * (f32(number) - zero);
                }
            }
        }
        sum = sum + part * scale(column, block);
    }
    store(i, sum);
}
