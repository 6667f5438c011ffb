// Products of 16-bit floats by numbers of few bits, ROWS rows at a time, on tensor cores. A workgroup computes 16 columns; its warps share the
// inner axis. Neighbouring numbers of a column go to the same invocation: products are sums, whose order is free.
//
//           inner axis: four words each of lane 4 g, 4 g + 1, 4 g + 2, 4 g + 3, then those of the next warp
//   column g      |----|----|----|----|
//   column g + 8  |----|----|----|----|      a word of 4 bits has pairs of numbers (0, 4) (1, 5) (2, 6) (3, 7), one of 8 bits (0, 1) (2, 3)
constexpr i32 WARPS = SIZE / 32, TILES = ROWS / 8, OCTETS = PER / 2;
const i32 lane = thread % 32;
const i32 warp = thread / 32;
const i32 n0 = group % TILES_N * 16;
const i32 m0 = group / TILES_N * ROWS;
const i32 low = min(n0 + lane / 4, N - 1);
const i32 high = min(n0 + lane / 4 + 8, N - 1);
// Eight numbers of 16 bytes, as pairs of halves, less the zero point, times the scale. A number is put into the bits of a half that is by so much
// larger, where it counts ones.
//@ if F16
constexpr u32 LARGER_BITS = 0x64006400;
constexpr f32 LARGER = 1024.0f;
//@ else
constexpr u32 LARGER_BITS = 0x43004300;
constexpr f32 LARGER = 128.0f;
//@ end
const auto octet = [&](u32 (&to)[4], const i32* words, i32 o, f32 zero, f32 scale) {
    const u32 by = pair<element>(scale, scale);
    //@ if BYTES
    #pragma unroll
    for (i32 j = 0; j < 4; j++) {
        const u32 word = u32(words[o * 2 + j / 2] ^ FLIP);
        //@ if F16
        to[j] = bytes_of(word, LARGER_BITS, j % 2 == 0 ? 0x5150 : 0x5352);
        //@ else
        // It has too few bits for that.
        const u32 bytes = word >> (j % 2 * 16);
        to[j] = fused<element>(pair<element>(f32(bytes & 255) - zero, f32(bytes >> 8 & 255) - zero), by, 0);
        //@ end
    }
    //@ else
    #pragma unroll
    for (i32 j = 0; j < 4; j++) {
        to[j] = u32(words[o] ^ FLIP) >> (j * 4) & 0x000f000f | LARGER_BITS;
    }
    //@ end
    //@ if RAISED
    const u32 one = pair<element>(1.0f, 1.0f);
    #pragma unroll
    for (i32 j = 0; j < 4; j++) {
        //@ if FLOATS
        to[j] = fused<element>(fused<element>(to[j], one, pair<element>(-LARGER, -LARGER)), one, pair<element>(-zero, -zero));
        //@ else
        to[j] = fused<element>(to[j], one, pair<element>(-LARGER - zero, -LARGER - zero));
        //@ end
        to[j] = fused<element>(to[j], by, 0);
    }
    //@ end
};
f32 sum[TILES][4];
#pragma unroll
for (i32 i = 0; i < TILES * 4; i++) {
    sum[i / 4][i % 4] = 0.0f;
}
#pragma unroll 4
for (i32 first = warp * 16; first < WORDS; first += WARPS * 16) {
    const i32 w = first + lane % 4 * 4;
    const bool there = w < WORDS;
    wide<i32, 4> words_low = {}, words_high = {};
    if (there) {
        words_low = words_wide(low, w);
        words_high = words_wide(high, w);
    }
    const i32 block = there ? w / BLOCK : 0;
    const f32 zero_low = zero_point(low, block), zero_high = zero_point(high, block);
    const f32 scale_low = scale(low, block), scale_high = scale(high, block);
    #pragma unroll
    for (i32 o = 0; o < OCTETS; o++) {
        u32 a_low[4], a_high[4];
        octet(a_low, words_low.v, o, zero_low, scale_low);
        octet(a_high, words_high.v, o, zero_high, scale_high);
        const u32 a_first[4] = {a_low[0], a_high[0], a_low[1], a_high[1]};
        const u32 a_last[4] = {a_low[2], a_high[2], a_low[3], a_high[3]};
        const i32 k = w * PER + o * 8;
        #pragma unroll
        for (i32 i = 0; i < TILES; i++) {
            const i32 m = m0 + i * 8 + lane / 4;
            wide<element, 8> x = {};
            if (there && k < K && m < M) {
                x = a_wide(0, m, k);
            }
            const auto pairs = bitcast<wide<u32, 4>>(x);
            const auto& v = pairs.v;
            u32 b[4] = {v[0], v[1], v[2], v[3]};
            //@ if BYTES
            //@ else
            b[0] = bytes_of(v[0], v[2], 0x5410);
            b[1] = bytes_of(v[0], v[2], 0x7632);
            b[2] = bytes_of(v[1], v[3], 0x5410);
            b[3] = bytes_of(v[1], v[3], 0x7632);
            //@ end
            multiply<element>(sum[i], a_first, b[0], b[1]);
            multiply<element>(sum[i], a_last, b[2], b[3]);
        }
    }
}
#pragma unroll
for (i32 i = 0; i < TILES * 4; i++) {
    const i32 m = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const i32 n = lane / 4 + i % 4 / 2 * 8;
    sums[(warp * ROWS + m) * 16 + n] = sum[i / 4][i % 4];
}
__syncthreads();
for (i32 i = thread; i < ROWS * 16; i += SIZE) {
    f32 total = 0.0f;
    #pragma unroll
    for (i32 w = 0; w < WARPS; w++) {
        total += sums[w * ROWS * 16 + i];
    }
    store(0, m0 + i / 16, n0 + i % 16, total);
}
