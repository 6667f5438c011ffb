// TURNS times WIDTH elements per invocation, in accesses of up to 16 bytes.
#pragma unroll
for (i32 turn = 0; turn < TURNS; turn++) {
    const i32 i = ((group * TURNS + turn) * SIZE + thread) * WIDTH;
    if (i + WIDTH <= COUNT) {
        store_wide(i);
    }
    //@ if TAIL
    else {
        for (i32 j = i; j < COUNT; j++) {
            store(j);
        }
    }
    //@ end
}
