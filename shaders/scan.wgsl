// One invocation per row. It adds up the row's elements in their order.
let row = group * SIZE + thread;
if (row < COUNT) {
    let outer = row / INNER;
    let inner = row % INNER;
    var sum = ZERO;
    for (var j = 0; j < LENGTH; j++) {
        //@ if REVERSE
        let at = LENGTH - 1 - j;
        //@ else
        let at = j;
        //@ end
        //@ if EXCLUSIVE
        store(outer, at, inner, sum);
        //@ end
        sum = sum + element(outer, at, inner);
        //@ if EXCLUSIVE
        //@ else
        store(outer, at, inner, sum);
        //@ end
    }
}
