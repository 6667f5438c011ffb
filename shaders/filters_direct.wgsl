// Sums of the gradients of filters with few channels per group. A workgroup has LANES pairs of an output and an input channel side by side, and
// a part of the positions. Its invocations take strips of positions along y by turns. They read a row of data once for all positions of the
// strip that have it under their windows, hold the sums of the taps, and meet in a tree.
let lane = thread % LANES;
let turn = thread / LANES;
let pair = group % BLOCKS * LANES + lane;
let share = group / BLOCKS % SHARES;
let part = group / (BLOCKS * SHARES);
let o = pair / GROUP_IN;
let c = pair % GROUP_IN;
let image = DATA_0 + (o / GROUP_OUT * GROUP_IN + c) * DATA_C;
let gradients = GRADIENT_0 + o * GRADIENT_C;
//@ each sum
var SUM = ZERO;
//@ end
let end = select(0, STEPS, pair < PAIRS);
for (var i = turn; i < end; i = i + TURNS) {
    let x = part % ROWS * LINES_X + i % PART_X;
    let first = i / PART_X % STRIPS * STRIP;
    let y = part % ROWS * LINES_Y + first;
    let z = part % ROWS * LINES_Z + i / (PART_X * STRIPS) % PART_Z;
    let n = part / ROWS * IMAGES + i / (PART_X * STRIPS * PART_Z);
    let v = y * STRIDE_Y - PAD_Y;
    let at = gradients + n * GRADIENT_N + z * GRADIENT_Z + y * GRADIENT_Y + x * GRADIENT_X;
    //@ each place
    let by$ = gradient(at + $ * GRADIENT_Y, first + $ < PART_Y);
    //@ end
    //@ each column
    {
        let w = z * STRIDE_Z + (TAP_Z) * DILATION_Z - PAD_Z;
        let u = x * STRIDE_X + (TAP_X) * DILATION_X - PAD_X;
        if (w >= 0 && w < IN_Z && u >= 0 && u < IN_X) {
            let start = image + n * DATA_N + w * DATA_Z + v * DATA_Y + u * DATA_X;
            //@ each row
            let row$ = data(start + DOWN * DATA_Y, INSIDE);
            //@ end
            //@ each term
            OF = OF + ELEMENT * BY;
            //@ end
        }
    }
    //@ end
}
//@ each sum
shared_sums[thread] = SUM;
workgroupBarrier();
for (var half = TURNS / 2; half > 0; half = half / 2) {
    if (turn < half) {
        shared_sums[thread] = shared_sums[thread] + shared_sums[thread + half * LANES];
    }
    workgroupBarrier();
}
if (turn == 0 && pair < PAIRS) {
    store(part, o, c, AT_Z, AT_Y, AT_X, shared_sums[thread]);
}
workgroupBarrier();
//@ end
