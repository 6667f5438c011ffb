// The invocations of a workgroup look through the indices together. An invocation computes EACH elements: one, unless the workgroup notes all
// indices ONCE.
let base = group * SIZE * EACH;
let first = base / INNER;
let last = (base + (min(SIZE * EACH, COUNT - base) - 1)) / INNER;
//@ if ONCE
// Each counts those of its share that are for the workgroup's places, and lists them where the sum of all counts before tells: all then read
// LISTED of them at a time. Most workgroups of a large table find few.
var own = 0;
var count = 0;
for (var bit = 0; bit < BITS; bit++) {
    let u = bit * SIZE + thread;
    if (u < UPDATES) {
        let at = chosen(u);
        if (at >= first && at <= last) {
            own = own | (1 << u32(bit));
            count = count + 1;
        }
    }
}
notes[thread] = count;
workgroupBarrier();
for (var distance = 1; distance < SIZE; distance = distance * 2) {
    var before = 0;
    if (thread >= distance) {
        before = notes[thread - distance];
    }
    workgroupBarrier();
    notes[thread] = notes[thread] + before;
    workgroupBarrier();
}
let begin = notes[thread] - count;
let total = workgroupUniformLoad(&notes[SIZE - 1]);
for (var e = 0; e < EACH; e++) {
    let i = base + e * SIZE + thread;
    let place = i / INNER;
    let rest = i % INNER;
    var sum = ZERO;
    for (var window = 0; window < total; window = window + LISTED) {
        if (e == 0 || total > LISTED) {
            workgroupBarrier();
            var slot = begin - window;
            for (var bit = 0; bit < BITS; bit++) {
                if (((own >> u32(bit)) & 1) != 0) {
                    if (slot >= 0 && slot < LISTED) {
                        let u = bit * SIZE + thread;
                        listed[slot] = u;
                        places[slot] = chosen(u);
                    }
                    slot = slot + 1;
                }
            }
            workgroupBarrier();
        }
        for (var k = 0; k < min(LISTED, total - window); k++) {
            if (places[k] == place) {
                sum = sum + update(listed[k], rest);
            }
        }
    }
    if (i < COUNT) {
        store(i, sum);
    }
}
//@ else
// Each notes, a bit per index, which of its share are for the workgroup's places. One of TEAM sums up what these noted. Then all read the
// sums, and the notes where there are some.
let place = (base + thread) / INNER;
let rest = (base + thread) % INNER;
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
    workgroupBarrier();
}
if (base + thread < COUNT) {
    store(base + thread, sum);
}
//@ end
