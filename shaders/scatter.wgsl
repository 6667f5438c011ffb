// One invocation per update. An update outside the axis is left out, and so is one whose place a later update has.
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
