// One invocation per element of the runs. Its place in its group is the number of elements before it: those of its own run, and what a
// binary search counts in each other run. Of equal ones those of an earlier run come first.
let i = group * SIZE + thread;
if (i < COUNT) {
    let merged = i / FROM / RUNS;
    let run = i / FROM % RUNS;
    let own = named(i);
    var place = i % FROM;
    for (var other = 0; other < RUNS; other++) {
        if (other != run) {
            let first = (merged * RUNS + other) * FROM;
            var low = 0;
            var high = FROM;
            while (low < high) {
                let middle = (low + high) / 2;
                let there = named(first + middle);
                if ((other < run && !precedes(merged, own, there)) || (other > run && precedes(merged, there, own))) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            place = place + low;
        }
    }
    if (place < KEPT) {
        store(merged, place, own);
    }
}
