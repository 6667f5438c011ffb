// TEAM invocations per row (whole warps), ROWS rows per workgroup. Each holds what reductions read of its CHUNKS times WIDTH elements, so
// that memory is read once; rows too long for that are read again by every reduction.
const i32 lane = thread % TEAM;
const i32 row = group * ROWS + thread / TEAM;
const i32 end = row < COUNT ? LENGTH : 0;
//@ if KEEPS
#pragma unroll
for (i32 c = 0; c < CHUNKS; c++) {
    const i32 j = (c * TEAM + lane) * WIDTH;
    if (j < end) {
        //@ each held
        x$[c] = load_x$(row, j);
        //@ end
    }
}
//@ end
//@ each reduction
{
    auto all = START$;
    //@ if KEEPS
    #pragma unroll
    for (i32 c = 0; c < CHUNKS; c++) {
        const i32 j = (c * TEAM + lane) * WIDTH;
        if (j < end) {
            #pragma unroll
            for (i32 v = 0; v < WIDTH; v++) {
                all = combine$(all, element$(row, j + v, c, v));
            }
        }
    }
    //@ else
    for (i32 first = lane * WIDTH; first < end; first += AHEAD * TEAM * WIDTH) {
        #pragma unroll
        for (i32 c = 0; c < AHEAD; c++) {
            again(row, min(first + c * TEAM * WIDTH, LENGTH - WIDTH), c);
        }
        #pragma unroll
        for (i32 c = 0; c < AHEAD; c++) {
            const i32 j = first + c * TEAM * WIDTH;
            if (j < end) {
                #pragma unroll
                for (i32 v = 0; v < WIDTH; v++) {
                    all = combine$(all, element$(row, j + v, c, v));
                }
            }
        }
    }
    //@ end
    reduced$ = team_fold<TEAM>(all, combine$, SHARED, thread);
}
//@ end
//@ if PER_ROW
if (end > 0 && lane == 0) {
    store(row);
}
//@ else
//@ if KEEPS
#pragma unroll
//@ end
for (i32 chunk = 0; chunk < CHUNKS; chunk++) {
    const i32 j = (chunk * TEAM + lane) * WIDTH;
    if (j < end) {
        //@ if KEEPS
        const i32 c = chunk;
        //@ else
        const i32 c = 0;
        again(row, j, c);
        //@ end
        //@ each late
        y$[0] = load_y$(row, j);
        //@ end
        finish(row, j, c);
    }
}
//@ end
