// LANES invocations per row, ROWS rows per workgroup. Each lane reduces blocks of its elements, four on their way at a time, then the
// blocks, then the lanes meet in a tree: short sums of short sums, for accuracy. With subgroups, the lanes of each meet in one, and their results
// one after another.
let lane = thread / LANE_STEP % LANES;
let row = group * ROWS + thread / ROW_STEP % ROWS;
let live = row < COUNT;
let end = select(0, LENGTH, live);
//@ each reduction
var all$ = START$;
for (var first = lane; first < end; first = first + BLOCK) {
    var block = START$;
    let last = min(first + BLOCK, end);
    var j = first;
    for (; j + 3 * LANES < last; j = j + 4 * LANES) {
        let a = combine$(element$(row, j), element$(row, j + LANES));
        let b = combine$(element$(row, j + 2 * LANES), element$(row, j + 3 * LANES));
        block = combine$(block, combine$(a, b));
    }
    for (; j < last; j = j + LANES) {
        block = combine$(block, element$(row, j));
    }
    all$ = combine$(all$, block);
}
//@ if LANES
//@ if SUBGROUPS
// Whole subgroups meet by shuffles, and their results in memory. Other ones would read from invocations that are not there.
if (subgroups * width == SIZE) {
    for (var half = width / 2; half > 0; half = half / 2) {
        all$ = combine$(all$, subgroupShuffleXor(all$, u32(half)));
    }
    if (place == 0) {
        SHARED[subgroup] = all$;
    }
    workgroupBarrier();
    all$ = SHARED[0];
    for (var other = 1; other < subgroups; other++) {
        all$ = combine$(all$, SHARED[other]);
    }
    reduced$ = all$;
} else {
//@ end
SHARED[thread] = all$;
workgroupBarrier();
for (var half = LANES / 2; half > 0; half = half / 2) {
    if (lane < half) {
        SHARED[thread] = combine$(SHARED[thread], SHARED[thread + half * LANE_STEP]);
    }
    workgroupBarrier();
}
reduced$ = SHARED[thread - lane * LANE_STEP];
//@ if SUBGROUPS
}
//@ end
workgroupBarrier();
//@ else
reduced$ = all$;
//@ end
//@ end
//@ if PER_ROW
if (live && lane == 0) {
    store(row);
}
//@ else
for (var j = lane; j < end; j = j + LANES) {
    store(row, j);
}
//@ end
