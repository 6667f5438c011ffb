// An invocation reduces WIDTH neighbouring rows, whose elements lie side by side. LANES invocations share the elements of these rows, AHEAD of
// them on their way at a time; ACROSS such groups stand side by side. Blocks of elements are reduced by themselves, for accuracy; then the
// lanes meet in a tree.
const i32 place = thread % ACROSS;
const i32 lane = thread / ACROSS;
const i32 first = (group * ACROSS + place) * WIDTH;
const i32 length = first < COUNT ? LENGTH : 0;
//@ each reduction
VALUE all$[WIDTH];
#pragma unroll
for (i32 v = 0; v < WIDTH; v++) {
    all$[v] = START$;
}
//@ end
for (i32 start = lane; start < length; start += BLOCK) {
    //@ each reduction
    VALUE block$[WIDTH];
    #pragma unroll
    for (i32 v = 0; v < WIDTH; v++) {
        block$[v] = START$;
    }
    //@ end
    for (i32 j = start; j < min(start + BLOCK, length); j += AHEAD * LANES) {
        #pragma unroll
        for (i32 c = 0; c < AHEAD; c++) {
            const i32 at = min(j + c * LANES, length - 1);
            //@ each held
            x$[c] = load_x$(first, at);
            //@ end
        }
        #pragma unroll
        for (i32 c = 0; c < AHEAD; c++) {
            if (j + c * LANES < length) {
                #pragma unroll
                for (i32 v = 0; v < WIDTH; v++) {
                    //@ each reduction
                    block$[v] = combine$(block$[v], element$(first + v, j + c * LANES, c, v));
                    //@ end
                }
            }
        }
    }
    //@ each reduction
    #pragma unroll
    for (i32 v = 0; v < WIDTH; v++) {
        all$[v] = combine$(all$[v], block$[v]);
    }
    //@ end
}
//@ if LANES
//@ each reduction
#pragma unroll
for (i32 v = 0; v < WIDTH; v++) {
    SHARED[thread * WIDTH + v] = all$[v];
}
__syncthreads();
for (i32 half = LANES / 2; half > 0; half /= 2) {
    if (lane < half) {
        #pragma unroll
        for (i32 v = 0; v < WIDTH; v++) {
            const i32 at = thread * WIDTH + v;
            SHARED[at] = combine$(SHARED[at], SHARED[at + half * ACROSS * WIDTH]);
        }
    }
    __syncthreads();
}
#pragma unroll
for (i32 v = 0; v < WIDTH; v++) {
    all$[v] = SHARED[place * WIDTH + v];
}
__syncthreads();
//@ end
//@ end
if (first < COUNT && lane == 0) {
    #pragma unroll
    for (i32 v = 0; v < WIDTH; v++) {
        //@ each reduction
        reduced$ = all$[v];
        //@ end
        store(first + v);
    }
}
