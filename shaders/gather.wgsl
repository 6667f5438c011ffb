// One invocation per element. Negative indices count from the end; what is outside is clamped.
let i = group * SIZE + thread;
if (i < COUNT) {
    var from = base(i);
    //@ each index
    let raw$ = index$(i);
    from = from + clamp(select(raw$, raw$ + EXTENT$, raw$ < 0), 0, EXTENT$ - 1) * STRIDE$;
    //@ end
    store(i, data(from));
}
