// One invocation per element. `base` is the offset along the axes that keep their size. Along each other axis, WIDTH neighbours from
// FIRST on contribute.
let i = group * SIZE + thread;
if (i < COUNT) {
    let still = base(i);
    //@ if NEAREST
    var source = still;
    //@ each axis
    let at$ = i32(floor(f32(coordinate$(i)) * SCALE$ + OFFSET$));
    source = source + clamp(at$, 0, EXTENT$ - 1) * STRIDE$;
    //@ end
    store(i, data(source));
    //@ else
    //@ each axis
    let x$ = place(f32(coordinate$(i)) * SCALE$ + OFFSET$, EXTENT$);
    let at$ = i32(floor(x$)) + FIRST;
    //@ end
    var sum = 0.0f;
    var total = 0.0f;
    for (var tap = 0; tap < TAPS; tap++) {
        var rest = tap;
        var source = still;
        var weight = 1.0f;
        //@ each axis
        let near$ = at$ + rest % WIDTH;
        weight = weight * falloff(x$ - f32(near$));
        //@ if INSIDE
        weight = select(0.0f, weight, near$ >= 0 && near$ < EXTENT$);
        //@ end
        source = source + clamp(near$, 0, EXTENT$ - 1) * STRIDE$;
        rest = rest / WIDTH;
        //@ end
        sum = sum + weight * f32(data(source));
        total = total + weight;
    }
    //@ if INSIDE
    sum = sum / total;
    //@ end
    store(i, sum);
    //@ end
}
