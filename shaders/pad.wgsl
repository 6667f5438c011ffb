// One invocation per element. `base` is the offset along the axes without padding; the padded axes are added one by one.
let i = group * SIZE + thread;
if (i < COUNT) {
    var source = base(i);
    var value = FILL;
    //@ if CONSTANT
    var inside = true;
    //@ end
    //@ each axis
    let at$ = coordinate$(i) - BEFORE$;
    //@ if CONSTANT
    inside = inside && at$ >= 0 && at$ < EXTENT$;
    source = source + at$ * STRIDE$;
    //@ else
    source = source + outside(at$, EXTENT$) * STRIDE$;
    //@ end
    //@ end
    //@ if CONSTANT
    if (inside) {
        value = data(source);
    }
    //@ else
    value = data(source);
    //@ end
    store(i, value);
}
