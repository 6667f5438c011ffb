// One invocation per element. Negative indices count from the end; indices outside the axis are clamped.
let i = group * SIZE + thread;
if (i < COUNT) {
    var source = base(i);
    //@ each index
    let raw$ = index$(i);
    source = source + clamp(select(raw$, raw$ + EXTENT$, raw$ < 0), 0, EXTENT$ - 1) * STRIDE$;
    //@ end
    store(i, data(source));
}
