// An update outside the axis is left out.
//@ if JOIN
// One invocation per row of updates. They join what is at their places in their order.
let row = group * SIZE + thread;
if (row < COUNT) {
    let first = row / STEP * STEP * UPDATES + row % STEP;
    for (var u = 0; u < UPDATES; u++) {
        let i = first + u * STEP;
        let place = chosen(i);
        if (place >= 0 && place < EXTENT) {
            store(i, place, join(stored(i, place), update(i)));
        }
    }
}
//@ else
// One invocation per update. One whose place a later update has is left out, too.
let i = group * SIZE + thread;
if (i < COUNT) {
    let place = chosen(i);
    var stays = place >= 0 && place < EXTENT;
    //@ if REPEATS
    let end = i + (UPDATES - coordinate(i)) * STEP;
    for (var later = i + STEP; later < end; later = later + STEP) {
        stays = stays && chosen(later) != place;
    }
    //@ end
    if (stays) {
        store(i, place, update(i));
    }
}
//@ end
