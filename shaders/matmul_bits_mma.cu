// Products of 16-bit floats by numbers of few bits, ROWS rows at a time, on tensor cores. A workgroup computes COLUMNS columns; its warps share
// the inner axis. Neighbouring numbers of a column go to the same invocation: products are sums, whose order is free.
//
//           inner axis: four words each of lane 4 g, 4 g + 1, 4 g + 2, 4 g + 3, then those of the next warp
//   column g      |----|----|----|----|
//   column g + 8  |----|----|----|----|      a word of 4 bits has pairs of numbers (0, 4) (1, 5) (2, 6) (3, 7), one of 8 bits (0, 1) (2, 3)
constexpr i32 WARPS = SIZE / 32, TILES = ROWS / 8, CUTS = COLUMNS / 16, OCTETS = PER / 2;
const i32 lane = thread % 32;
const i32 warp = thread / 32;
const i32 n0 = group % TILES_N * COLUMNS;
const i32 m0 = group / TILES_N * ROWS;
f32 sum[CUTS][TILES][4];
#pragma unroll
for (i32 i = 0; i < CUTS * TILES * 4; i++) {
    sum[i / 4 / TILES][i / 4 % TILES][i % 4] = 0.0f;
}
#pragma unroll UNROLL
for (i32 first = warp * 16; first < WORDS; first += WARPS * 16) {
    const i32 w = first + lane % 4 * 4;
    const bool there = w < WORDS;
    const i32 block = there ? w / BLOCK : 0;
    wide<i32, 4> words[CUTS][2];
    f32 zeros[CUTS][2], scales[CUTS][2];
    #pragma unroll
    for (i32 c = 0; c < CUTS * 2; c++) {
        const i32 n = min(n0 + c * 8 + lane / 4, N - 1);
        words[c / 2][c % 2] = {};
        if (there) {
            words[c / 2][c % 2] = words_wide(n, w);
        }
        zeros[c / 2][c % 2] = zero_point(n, block);
        scales[c / 2][c % 2] = scale(n, block);
    }
    #pragma unroll
    for (i32 o = 0; o < OCTETS; o++) {
        u32 a_first[CUTS][4], a_last[CUTS][4];
        #pragma unroll
        for (i32 c = 0; c < CUTS * 2; c++) {
            u32 numbers[4];
            octet<element, BITS, FLOATS>(numbers, words[c / 2][c % 2].v + o * 8 / PER, FLIP, zeros[c / 2][c % 2], scales[c / 2][c % 2]);
            a_first[c / 2][c % 2] = numbers[0];
            a_first[c / 2][c % 2 + 2] = numbers[1];
            a_last[c / 2][c % 2] = numbers[2];
            a_last[c / 2][c % 2 + 2] = numbers[3];
        }
        const i32 k = w * PER + o * 8;
        #pragma unroll
        for (i32 i = 0; i < TILES; i++) {
            const i32 m = m0 + i * 8 + lane / 4;
            wide<element, 8> x = {};
            if (there && k < K && m < M) {
                x = a_wide(0, m, k);
            }
            const auto pairs = bitcast<wide<u32, 4>>(x);
            u32 b[4] = {pairs.v[0], pairs.v[1], pairs.v[2], pairs.v[3]};
            if (BITS == 4) {
                b[0] = bytes_of(pairs.v[0], pairs.v[2], 0x5410);
                b[1] = bytes_of(pairs.v[0], pairs.v[2], 0x7632);
                b[2] = bytes_of(pairs.v[1], pairs.v[3], 0x5410);
                b[3] = bytes_of(pairs.v[1], pairs.v[3], 0x7632);
            }
            #pragma unroll
            for (i32 c = 0; c < CUTS; c++) {
                multiply<element>(sum[c][i], a_first[c], b[0], b[1]);
                multiply<element>(sum[c][i], a_last[c], b[2], b[3]);
            }
        }
    }
}
#pragma unroll
for (i32 i = 0; i < CUTS * TILES * 4; i++) {
    const i32 c = i / 4 / TILES;
    const i32 m = i / 4 % TILES * 8 + lane % 4 * 2 + i % 2;
    const i32 n = c * 16 + lane / 4 + i % 4 / 2 * 8;
    sums[(warp * ROWS + m) * COLUMNS + n] = sum[c][i / 4 % TILES][i % 4];
}
__syncthreads();
for (i32 i = thread; i < ROWS * COLUMNS; i += SIZE) {
    f32 total = 0.0f;
    #pragma unroll
    for (i32 w = 0; w < WARPS; w++) {
        total += sums[w * ROWS * COLUMNS + i];
    }
    store(0, m0 + i / COLUMNS, n0 + i % COLUMNS, total);
}
