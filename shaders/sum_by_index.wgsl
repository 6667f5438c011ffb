// The invocations of a workgroup look through the indices together. Each notes, a bit per index, which of its share are for the workgroup's
// places. One of TEAM sums up what these noted. Then all read the sums, and the notes where there are some: most workgroups of a large table
// have none. An invocation computes EACH elements: one, unless the workgroup notes all indices ONCE.
let base = group * SIZE * EACH;
let first = base / INNER;
let last = (base + SIZE * EACH - 1) / INNER;
var sum = ZERO;
for (var start = 0; start < UPDATES; start = start + BITS * SIZE) {
    var own = 0;
    for (var bit = 0; bit < BITS; bit++) {
        let u = start + bit * SIZE + thread;
        if (u < UPDATES) {
            let at = chosen(u);
            if (at >= first && at <= last) {
                own = own | (1 << u32(bit));
            }
        }
    }
    notes[thread] = own;
    workgroupBarrier();
    if (thread % TEAM == 0) {
        var all = 0;
        for (var other = thread; other < min(thread + TEAM, SIZE); other++) {
            all = all | notes[other];
        }
        teams[thread / TEAM] = all;
    }
    workgroupBarrier();
    for (var e = 0; e < EACH; e++) {
        let i = base + e * SIZE + thread;
        let place = i / INNER;
        let rest = i % INNER;
//@ if ONCE
        sum = ZERO;
//@ end
        for (var head = 0; head < SIZE; head = head + TEAM) {
            if (teams[head / TEAM] != 0) {
                for (var other = head; other < min(head + TEAM, SIZE); other++) {
                    let note = notes[other];
                    if (note != 0) {
                        for (var bit = 0; bit < BITS; bit++) {
                            let u = start + bit * SIZE + other;
                            if (((note >> u32(bit)) & 1) != 0) {
                                if (chosen(u) == place) {
                                    sum = sum + update(u, rest);
                                }
                            }
                        }
                    }
                }
            }
        }
//@ if ONCE
        if (i < COUNT) {
            store(i, sum);
        }
//@ end
    }
    workgroupBarrier();
}
//@ if ONCE
//@ else
if (base + thread < COUNT) {
    store(base + thread, sum);
}
//@ end
