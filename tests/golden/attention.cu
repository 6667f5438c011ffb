// What the templates' statements mean in C++: they are WGSL with inferred types. No header is needed.
typedef signed char i8;
typedef short i16;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
#define DEVICE __device__ __forceinline__

template <class T, class U> DEVICE T bitcast(U v) {
    static_assert(sizeof(T) == sizeof(U), "bits are kept");
    T t;
    memcpy(&t, &v, sizeof t);
    return t;
}

// Halves are what is stored; all is computed in f32.
DEVICE u16 to_f16(f32 v);
DEVICE f32 from_f16(u16 bits);
struct f16 {
    u16 bits;
    f16() = default;
    DEVICE explicit f16(f32 v) : bits(to_f16(v)) {}
    DEVICE operator f32() const { return from_f16(bits); }
};
struct bf16 {
    u16 bits;
    bf16() = default;
    DEVICE explicit bf16(f32 v) {
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
#else
        const u32 u = bitcast<u32>(v);
        bits = v != v ? 0x7fff : u16((u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
    }
    DEVICE operator f32() const { return bitcast<f32>(u32(bits) << 16); }
};

struct alignas(8) vec2f {
    f32 x, y;
    DEVICE explicit vec2f(f32 v) : x(v), y(v) {}
    DEVICE vec2f(f32 x, f32 y) : x(x), y(y) {}
    vec2f() = default;
};
struct alignas(16) vec4f {
    f32 x, y, z, w;
    DEVICE explicit vec4f(f32 v) : x(v), y(v), z(v), w(v) {}
    DEVICE vec4f(f32 x, f32 y, f32 z, f32 w) : x(x), y(y), z(z), w(w) {}
    DEVICE vec4f(vec2f a, vec2f b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
    vec4f() = default;
};
DEVICE vec2f operator+(vec2f a, vec2f b) { return vec2f(a.x + b.x, a.y + b.y); }
DEVICE vec2f operator*(vec2f a, vec2f b) { return vec2f(a.x * b.x, a.y * b.y); }
DEVICE vec2f operator*(f32 a, vec2f b) { return vec2f(a * b.x, a * b.y); }
DEVICE vec4f operator+(vec4f a, vec4f b) { return vec4f(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE vec4f operator*(vec4f a, vec4f b) { return vec4f(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
DEVICE vec4f operator*(f32 a, vec4f b) { return vec4f(a * b.x, a * b.y, a * b.z, a * b.w); }

template <class T> DEVICE T select(T f, T t, bool c) { return c ? t : f; }
// What is not a number stays none.
template <class T> DEVICE T clamp(T v, T low, T high) { return v < low ? low : v > high ? high : v; }
DEVICE f32 max_f32(f32 a, f32 b) { return a > b || a != a ? a : b; }
DEVICE f64 max_f64(f64 a, f64 b) { return a > b || a != a ? a : b; }
DEVICE f32 min_f32(f32 a, f32 b) { return a < b || a != a ? a : b; }
DEVICE f64 min_f64(f64 a, f64 b) { return a < b || a != a ? a : b; }
template <class T> DEVICE T sign(T v) { return v != v ? v : T(v > T(0)) - T(v < T(0)); }
DEVICE f32 sign_f32(f32 v) { return sign(v); }
DEVICE void workgroupBarrier() { __syncthreads(); }
template <class T> DEVICE T workgroupUniformLoad(const T* at) {
    workgroupBarrier();
    const T value = *at;
    workgroupBarrier();
    return value;
}

DEVICE i32 whole_i32_f32(f32 v) { return v != v ? 0 : i32(v); }
DEVICE i32 whole_i32_f64(f64 v) { return v != v ? 0 : i32(v); }
DEVICE i64 whole_i64_f32(f32 v) { return v != v ? 0 : i64(v); }
DEVICE i64 whole_i64_f64(f64 v) { return v != v ? 0 : i64(v); }
DEVICE u64 whole_u64_f32(f32 v) { return v > 0.0f ? u64(v) : 0; }
DEVICE u64 whole_u64_f64(f64 v) { return v > 0.0 ? u64(v) : 0; }
DEVICE f32 tanh_f32(f32 x) { return tanhf(x); }
DEVICE f32 erf_f32(f32 x) { return erff(x); }
DEVICE f64 erf_f64(f64 x) { return erf(x); }
// The sine of x + quarter * pi / 2.
DEVICE f32 sin_f32(f32 x, i32 quarter) { return quarter == 0 ? sinf(x) : cosf(x); }
DEVICE f64 sin_f64(f64 x, i32 quarter) { return quarter == 0 ? sin(x) : cos(x); }
DEVICE f32 pow_f32(f32 x, f32 y) { return powf(x, y); }
DEVICE f64 pow_f64(f64 x, f64 y) { return pow(x, y); }
DEVICE f32 rem_f32(f32 x, f32 y) { return fmodf(x, y); }
DEVICE f64 rem_f64(f64 x, f64 y) { return fmod(x, y); }
template <class T> DEVICE T div_int(T x, T y) { return y == 0 ? 0 : y == -1 ? T(0) - x : x / y; }
template <class T> DEVICE T rem_int(T x, T y) { return y == 0 || y == -1 ? 0 : x % y; }
template <class T> DEVICE T pow_int(T x, T y) {
    if (y < 0) { return x == 1 || x == -1 ? ((y & 1) == 0 ? 1 : x) : 0; }
    T power = 1;
    for (T square = x; y > 0; y /= 2, square *= square) {
        if ((y & 1) != 0) { power *= square; }
    }
    return power;
}
DEVICE i32 div_i32(i32 x, i32 y) { return div_int(x, y); }
DEVICE i64 div_i64(i64 x, i64 y) { return div_int(x, y); }
DEVICE i32 rem_i32(i32 x, i32 y) { return rem_int(x, y); }
DEVICE i64 rem_i64(i64 x, i64 y) { return rem_int(x, y); }
DEVICE i32 pow_i32(i32 x, i32 y) { return pow_int(x, y); }
DEVICE i64 pow_i64(i64 x, i64 y) { return pow_int(x, y); }
DEVICE u64 div_u64(u64 x, u64 y) { return y == 0 ? 0 : x / y; }
DEVICE u64 rem_u64(u64 x, u64 y) { return y == 0 ? 0 : x % y; }
DEVICE u64 pow_u64(u64 x, u64 y) { return pow_int(x, y); }

// Elements that move together: N of them take a power of two of bytes, 16 at most.
template <class T, i32 N> struct alignas(sizeof(T) * N) wide {
    T v[N];
};
template <i32 BYTES> struct raw {};
template <> struct raw<1> { typedef u8 type; };
template <> struct raw<2> { typedef u16 type; };
template <> struct raw<4> { typedef u32 type; };
template <> struct raw<8> { typedef uint2 type; };
template <> struct raw<16> { typedef uint4 type; };
template <class T, i32 N, class P> DEVICE wide<T, N> read(const P* p) {
    return bitcast<wide<T, N>>(*reinterpret_cast<const typename raw<sizeof(T) * N>::type*>(p));
}
template <class T, i32 N, class P> DEVICE void write(P* p, wide<T, N> w) {
    typedef typename raw<sizeof(T) * N>::type bits;
    *reinterpret_cast<bits*>(p) = bitcast<bits>(w);
}
// Two halves that lie side by side, the first in the low bits.
template <class T> DEVICE vec2f unpack(u32 bits);
template <> DEVICE vec2f unpack<f16>(u32 bits) { return vec2f(from_f16(u16(bits)), from_f16(u16(bits >> 16))); }
template <> DEVICE vec2f unpack<bf16>(u32 bits) { return vec2f(bitcast<f32>(bits << 16), bitcast<f32>(bits & 0xffff0000u)); }

// How numbers of few bits become halves: they are put into the bits of one that is larger by VALUE, whose last bit stands for 1.
template <class T> struct larger;
template <> struct larger<f16> {
    static constexpr u32 PAIR = 0x64006400;
    static constexpr f32 VALUE = 1024.0f;
    static constexpr bool HAS_BYTES = true;
};
template <> struct larger<bf16> {
    static constexpr u32 PAIR = 0x43004300;
    static constexpr f32 VALUE = 128.0f;
    static constexpr bool HAS_BYTES = false;
};
template <class T> DEVICE u32 pair(f32 low, f32 high);
template <class T> DEVICE u32 fused(u32 a, u32 b, u32 c);
DEVICE u32 bytes_of(u32 a, u32 b, u32 which);
// Eight numbers of BITS bits, less the zero point, times the scale, as pairs of halves: of numbers that follow one another, or, of 4 bits, that
// are four apart.
template <class T, i32 BITS, bool FLOATS> DEVICE void octet(u32 (&to)[4], const i32* words, i32 flip, f32 zero, f32 scale) {
    typedef larger<T> base;
    const u32 one = pair<T>(1.0f, 1.0f), by = pair<T>(scale, scale);
    #pragma unroll
    for (i32 j = 0; j < 4; j++) {
        if (BITS == 8 && !base::HAS_BYTES) {
            const u32 bytes = u32(words[j / 2] ^ flip) >> (j % 2 * 16);
            to[j] = pair<T>(f32(bytes & 255) - zero, f32(bytes >> 8 & 255) - zero);
        } else {
            if (BITS == 8) {
                to[j] = bytes_of(u32(words[j / 2] ^ flip), base::PAIR, j % 2 == 0 ? 0x5150 : 0x5352);
            } else {
                to[j] = (u32(words[0] ^ flip) >> (j * 4) & 0x000f000f) | base::PAIR;
            }
            // The sum of both is no half if the zero point is none of the numbers.
            const f32 first = FLOATS ? base::VALUE : base::VALUE + zero;
            to[j] = fused<T>(to[j], one, pair<T>(-first, -first));
            if (FLOATS) { to[j] = fused<T>(to[j], one, pair<T>(-zero, -zero)); }
        }
        to[j] = fused<T>(to[j], by, 0);
    }
}
// The words of eight numbers.
template <i32 BITS> struct numbers_of { typedef wide<i32, BITS / 4> octet; };
// The reduction of what TEAM neighbouring invocations, whole warps of one workgroup, hold; `shared` has an element per warp.
template <i32 TEAM, class T, class F> DEVICE T team_fold(T v, const F& combine, T* shared, i32 thread) {
    #pragma unroll
    for (i32 lanes = 16; lanes > 0; lanes /= 2) { v = combine(v, __shfl_xor_sync(0xffffffffu, v, lanes)); }
    if (TEAM > 32) {
        __syncthreads();
        if (thread % 32 == 0) { shared[thread / 32] = v; }
        __syncthreads();
        const i32 first = thread / TEAM * (TEAM / 32);
        v = shared[first];
        for (i32 w = 1; w < TEAM / 32; w++) { v = combine(v, shared[first + w]); }
    }
    return v;
}

// What only PTX can say.
DEVICE u16 to_f16(f32 v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}
DEVICE f32 from_f16(u16 bits) {
    f32 v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}
// Four matrices of 8 x 8 halves from workgroup memory, the address of row i of matrix j from lane 8 j + i: each lane gets two elements of
// its quarter of a row, or of a column.
DEVICE void load_matrices(u32 (&r)[4], const void* p) {
    const u32 at = u32(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
DEVICE void load_transposed(u32 (&r)[4], const void* p) {
    const u32 at = u32(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
// c += a b, where a is 16 x 16 and b 16 x 8, over the lanes of a warp.
template <class T> DEVICE void multiply(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void multiply<f16>(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void multiply<bf16>(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The sum, more by the products of four bytes, the first of u8 and the second of i8.
DEVICE i32 dot_of_bytes(u32 unsigned_bytes, u32 signed_bytes, i32 sum) {
#if __CUDA_ARCH__ >= 610
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(unsigned_bytes), "r"(signed_bytes));
#else
    #pragma unroll
    for (i32 v = 0; v < 32; v += 8) { sum += i32(unsigned_bytes >> v & 255) * i8(signed_bytes >> v); }
#endif
    return sum;
}
// c += a b, where a is 16 x 32 and b 32 x 8, of u8 and i8, over the lanes of a warp.
template <bool LEFT_UNSIGNED> DEVICE void multiply_bytes(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
#define MULTIPLY_BYTES(LEFT_UNSIGNED, A, B) \
    template <> DEVICE void multiply_bytes<LEFT_UNSIGNED>(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." A "." B ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
    }
MULTIPLY_BYTES(true, "u8", "s8")
MULTIPLY_BYTES(false, "s8", "u8")
#undef MULTIPLY_BYTES
// Two halves side by side, the first in the low bits.
template <> DEVICE u32 pair<f16>(f32 low, f32 high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
template <> DEVICE u32 pair<bf16>(f32 low, f32 high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
// a b + c of two halves side by side.
template <> DEVICE u32 fused<f16>(u32 a, u32 b, u32 c) {
    u32 bits;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
    return bits;
}
template <> DEVICE u32 fused<bf16>(u32 a, u32 b, u32 c) {
    u32 bits;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
    return bits;
}
// Four of the eight bytes of two words, by their numbers, those of the second word from 4 on.
DEVICE u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }
// Two to the power of what is not positive, or hardly: what is tiny beside 1 is 0.
DEVICE f32 power_of_two(f32 v) {
    f32 power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
// The exponential of what is not positive, from which a sum has begun that is 1 at least: what is tiny beside it is 0.
DEVICE f32 decay(f32 v) { return power_of_two(v * 1.4426950409f); }
// Asynchronous copies to workgroup memory, 16 bytes of memory each, or zeros. A wait ends when all copies of the invocation are done, or
// all but those of the last few commits.
DEVICE void copy_async(void* to, const void* from, bool there) {
    const u32 at = u32(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <i32 LATER> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(LATER) : "memory"); }
DEVICE void wait_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }
// Workgroup memory that is as large as the launch says, aligned as a tile wants it that comes first.
#define POOL(bytes) extern __shared__ __align__(1024) u8 pool[]
// Products of tiles of halves in workgroup memory by compute capability 9.0 (wgmma), which four warps ask for together and which take their
// own time. A tile is made of rows of 64 that lie one after another from a multiple of 1024 bytes on, piece p of eight of row r in place
// p ^ r % 8. What was written there is shown to the products before a barrier; they begin after all other uses of their sums; what was
// committed is done after a wait.
DEVICE void show_tiles() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
DEVICE void begin_tiles() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void commit_tiles() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
DEVICE void wait_tiles() { asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory"); }
// An address as products take it: in steps of 16 bytes, 1024 from eight rows to the next eight, their pieces as said above.
DEVICE u64 tile_at(const void* p) {
    return (u32(__cvta_generic_to_shared(p)) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// c += a b', where a is 64 x 16 and b 256 x 16: c as of `multiply`, warp w of the four has rows 16 w to 16 w + 15.
#define TEN(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define MULTIPLY_TILES(T, NAME) \
    DEVICE void multiply_tiles(f32 (&c)[128], const T* a, const T* b) { \
        asm volatile("{ .reg .pred more; setp.ne.b32 more, 1, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {" \
                     TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) \
                     "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, more, 1, 1, 0, 0; }" \
                     : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112) \
                     : "l"(tile_at(a)), "l"(tile_at(b))); \
    }
MULTIPLY_TILES(f16, "f16")
MULTIPLY_TILES(bf16, "bf16")
#undef MULTIPLY_TILES
#undef SIXTEEN
#undef FOUR
#undef TEN
// Waits for all workgroups of a cluster; what they wrote to workgroup memory is seen by all.
DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" : : : "memory");
}
// Where the workgroup of this rank in the cluster has what this one has here.
template <class T> DEVICE const T* neighbours(const T* p, i32 rank) {
    u64 at;
    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(p), "r"(rank));
    return reinterpret_cast<const T*>(at);
}

// kernel 0, row: normed/Add
// 128 invocations, [8, 1, 1] workgroups
// row_warp
constexpr f32 START0 = 0.0f;
constexpr f32 START1 = 0.0f;
constexpr i32 COUNT = 32;
constexpr i32 LENGTH = 64;
constexpr i32 TEAM = 32;
constexpr i32 ROWS = 4;
constexpr i32 WIDTH = 4;
constexpr i32 CHUNKS = 1;
constexpr i32 SIZE = 128;
extern "C" __global__ void __launch_bounds__(128) kernel(const f32* __restrict__ b0, const f32* __restrict__ b1, const f32* __restrict__ b2, f32* __restrict__ b3) {
    __shared__ __align__(16) f32 shared_f32[4];
    f32 reduced0;
    f32 reduced1;
    wide<f32, 4> x0[1];
    const auto load_x0 = [&](i32 row, i32 j) -> wide<f32, 4> {
        return read<f32, 4>(b0 + (row * 64 + j));
    };
    wide<f32, 4> y0[1];
    const auto load_y0 = [&](i32 row, i32 j) -> wide<f32, 4> {
        return read<f32, 4>(b1 + (j));
    };
    wide<f32, 4> y1[1];
    const auto load_y1 = [&](i32 row, i32 j) -> wide<f32, 4> {
        return read<f32, 4>(b2 + (j));
    };
const auto element0 = [&](i32 row, i32 j, i32 c, i32 v) -> f32 {
    const auto v0 = x0[c].v[v];
    return v0;
};
const auto combine0 = [&](f32 a, f32 b) -> f32 {
    return a + b;
};
const auto element1 = [&](i32 row, i32 j, i32 c, i32 v) -> f32 {
    const auto v0 = x0[c].v[v];
    const auto v1 = reduced0;
    const auto v3 = v1 / 64.0f;
    const auto v4 = v0 - v3;
    const auto v5 = v4 * v4;
    return v5;
};
const auto combine1 = [&](f32 a, f32 b) -> f32 {
    return a + b;
};
const auto finish = [&](i32 row, i32 j, i32 c) -> void {
    wide<f32, 4> o0;
    #pragma unroll
    for (i32 v = 0; v < 4; v++) {
        const auto v0 = x0[c].v[v];
        const auto v1 = reduced0;
        const auto v3 = v1 / 64.0f;
        const auto v4 = v0 - v3;
        const auto v5 = reduced1;
        const auto v6 = v5 / 64.0f;
        const auto v8 = v6 + 1e-5f;
        const auto v9 = sqrt(v8);
        const auto v10 = 1.0f / v9;
        const auto v11 = v4 * v10;
        const auto v12 = y0[0].v[v];
        const auto v13 = v11 * v12;
        const auto v14 = y1[0].v[v];
        const auto v15 = v13 + v14;
        o0.v[v] = v15;
    }
    write(b3 + (row * 64 + j), o0);
};
    const i32 group = blockIdx.x + blockIdx.y * 8u;
    const i32 thread = threadIdx.x;
    // TEAM invocations per row (whole warps), ROWS rows per workgroup. Each holds what reductions read of its CHUNKS times WIDTH elements, so
    // that memory is read once; rows too long for that are read again by every reduction.
    const i32 lane = thread % TEAM;
    const i32 row = group * ROWS + thread / TEAM;
    const i32 end = row < COUNT ? LENGTH : 0;
    #pragma unroll
    for (i32 c = 0; c < CHUNKS; c++) {
        const i32 j = (c * TEAM + lane) * WIDTH;
        if (j < end) {
            x0[c] = load_x0(row, j);
        }
    }
    {
        auto all = START0;
        #pragma unroll
        for (i32 c = 0; c < CHUNKS; c++) {
            const i32 j = (c * TEAM + lane) * WIDTH;
            if (j < end) {
                #pragma unroll
                for (i32 v = 0; v < WIDTH; v++) {
                    all = combine0(all, element0(row, j + v, c, v));
                }
            }
        }
        reduced0 = team_fold<TEAM>(all, combine0, shared_f32, thread);
    }
    {
        auto all = START1;
        #pragma unroll
        for (i32 c = 0; c < CHUNKS; c++) {
            const i32 j = (c * TEAM + lane) * WIDTH;
            if (j < end) {
                #pragma unroll
                for (i32 v = 0; v < WIDTH; v++) {
                    all = combine1(all, element1(row, j + v, c, v));
                }
            }
        }
        reduced1 = team_fold<TEAM>(all, combine1, shared_f32, thread);
    }
    #pragma unroll
    for (i32 chunk = 0; chunk < CHUNKS; chunk++) {
        const i32 j = (chunk * TEAM + lane) * WIDTH;
        if (j < end) {
            const i32 c = chunk;
            y0[0] = load_y0(row, j);
            y1[0] = load_y1(row, j);
            finish(row, j, c);
        }
    }
}

// kernel 1, matmul: query_sum, key_sum, value_sum
// 256 invocations, [4, 1, 1] workgroups
// matmul_slice_k_warp
constexpr i32 M = 32;
constexpr i32 K = 64;
constexpr i32 N = 64;
constexpr i32 TILES_M = 2;
constexpr i32 TILES_N = 2;
constexpr i32 TILE_M = 16;
constexpr i32 SIZE = 256;
extern "C" __global__ void __launch_bounds__(256) kernel(const f32* __restrict__ b0, const f32* __restrict__ b1, const f32* __restrict__ b2, f32* __restrict__ b3) {
    __shared__ __align__(16) f32 tile[9216];
    const auto a_at = [&](i32 batch, i32 m, i32 k) -> const void* {
        return b0 + (m * 64 + k);
    };
    const auto b_at = [&](i32 batch, i32 k, i32 n) -> const void* {
        return b1 + (k * 64 + n);
    };
const auto a = [&](i32 batch, i32 m, i32 k) -> f32 {
    return b0[m * 64 + k];
};
const auto b = [&](i32 batch, i32 k, i32 n) -> f32 {
    return b1[k * 64 + n];
};
const auto store = [&](i32 batch, i32 m, i32 n, f32 value) -> void {
    if (m < M && n < N) {
        const auto v0 = value;
        const auto v1 = b2[n];
        const auto v2 = v0 + v1;
        b3[m * 64 + n] = v2;
    }
};
    const i32 group = blockIdx.x + blockIdx.y * 4u;
    const i32 thread = threadIdx.x;
    // Products of few tiles, of f32 that lies 16 bytes at a time. Each warp sums its share of the inner axis for all of a tile of TILE_M x 32,
    // TILE_M / 4 x 4 per lane: STEP slices at a time, which pass through workgroup memory of its own, where two of three stages are on
    // their way while one is used. Warps wait for each other at the end alone, where what they have summed is added. Where 16 bytes of a line
    // stand in a stage depends on the line, so that what eight lanes read at once is spread over all banks.
    constexpr i32 TILE_N = 32, STEP = 8, STAGES = 3, STAGE = (TILE_M + TILE_N) * STEP, TEAMS = SIZE / 32, ROW = TILE_M / 4;
    const i32 batch = group / (TILES_M * TILES_N);
    const i32 m0 = group / TILES_N % TILES_M * TILE_M;
    const i32 n0 = group % TILES_N * TILE_N;
    const i32 lane = thread % 32;
    const i32 row = lane / 8;
    const i32 column = lane % 8;
    f32* const own = tile + thread / 32 * STAGES * STAGE;
    const auto along_k = [](i32 line, i32 k) { return line * STEP + (k / 4 ^ line / 4) % 2 * 4; };
    const auto at_b = [](i32 k, i32 n) { return TILE_M * STEP + k * TILE_N + n; };
    const auto place_b = [&](i32 piece) { return at_b(piece * 4 + lane / 8, lane % 8 * 4); };
    // What a lane sends of each operand: where from, and how many slices of the inner axis it still has.
    constexpr i32 LEFT = TILE_M / 16, RIGHT = TILE_N / 16;
    const char* from[LEFT + RIGHT];
    i32 left[LEFT + RIGHT];
    const i32 first = thread / 32 * STEP;
    #pragma unroll
    for (i32 p = 0; p < LEFT; p++) {
        const i32 m = m0 + p * 16 + lane / 2;
        from[p] = (const char*)a_at(batch, m < M ? m : 0, 0) + (first + lane % 2 * 4) * 4;
        left[p] = m < M ? K - first - lane % 2 * 4 : 0;
    }
    const i64 b_step = (const char*)b_at(batch, 1, 0) - (const char*)b_at(batch, 0, 0);
    #pragma unroll
    for (i32 p = 0; p < RIGHT; p++) {
        const i32 k = first + p * 4 + lane / 8;
        const i32 n = n0 + lane % 8 * 4;
        from[LEFT + p] = (const char*)b_at(batch, 0, n < N ? n : 0) + k * b_step;
        left[LEFT + p] = n < N ? K - k : 0;
    }
    const auto fetch = [&](f32* stage) {
        #pragma unroll
        for (i32 p = 0; p < LEFT + RIGHT; p++) {
            const i32 place = p < LEFT ? along_k(p * 16 + lane / 2, lane % 2 * 4) : place_b(p - LEFT);
            copy_async(stage + place, from[p], left[p] > 0);
            from[p] += TEAMS * STEP * (p < LEFT ? 4 : b_step);
            left[p] -= TEAMS * STEP;
        }
    };
    f32 sum[ROW][4];
    #pragma unroll
    for (i32 i = 0; i < ROW * 4; i++) {
        sum[i / 4][i % 4] = 0.0f;
    }
    #pragma unroll
    for (i32 s = 0; s < STAGES - 1; s++) {
        fetch(own + s * STAGE);
        commit_copies();
    }
    i32 used = 0;
    for (i32 k0 = 0; k0 < K; k0 += TEAMS * STEP) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        if (k0 + (STAGES - 1) * TEAMS * STEP < K) {
            fetch(own + (used + STAGES - 1) % STAGES * STAGE);
        }
        commit_copies();
        const f32* const stage = own + used * STAGE;
        used = (used + 1) % STAGES;
        #pragma unroll
        for (i32 k = 0; k < STEP; k += 4) {
            wide<f32, 4> y[4];
            #pragma unroll
            for (i32 v = 0; v < 4; v++) {
                y[v] = read<f32, 4>(stage + at_b(k + v, column * 4));
            }
            #pragma unroll
            for (i32 i = 0; i < ROW; i++) {
                const auto x = read<f32, 4>(stage + along_k(i * 4 + row, k));
                #pragma unroll
                for (i32 v = 0; v < 4; v++) {
                    #pragma unroll
                    for (i32 j = 0; j < 4; j++) {
                        sum[i][j] += x.v[v] * y[v].v[j];
                    }
                }
            }
        }
    }
    wait_copies();
    __syncthreads();
    #pragma unroll
    for (i32 i = 0; i < ROW * 4; i++) {
        const i32 n = column * 4 + i % 4;
        tile[(thread / 32 * TILE_M + i / 4 * 4 + row) * TILE_N + n] = sum[i / 4][i % 4];
    }
    __syncthreads();
    #pragma unroll
    for (i32 s = thread; s < TILE_M * TILE_N; s += SIZE) {
        f32 total = 0.0f;
        #pragma unroll
        for (i32 t = 0; t < TEAMS; t++) {
            total += tile[t * TILE_M * TILE_N + s];
        }
        store(batch, m0 + s / TILE_N, n0 + s % TILE_N, total);
    }
}

// kernel 2, attention: heads
// 128 invocations, [8, 1, 1] workgroups
// attention_regs
constexpr f32 LOWEST = (-3.4028234663852886e38f);
constexpr i32 M = 16;
constexpr i32 N = 16;
constexpr i32 K = 16;
constexpr i32 COLUMNS_OUT = 16;
constexpr i32 ROWS = 16;
constexpr i32 COLUMNS = 64;
constexpr i32 WIDTH = 16;
constexpr i32 EACH = 1;
constexpr i32 CLUSTER = 1;
constexpr i32 GROUPS = 1;
constexpr i32 A_M_STEP = 16;
constexpr i32 A_K_STEP = 1;
constexpr i32 B_N_STEP = 16;
constexpr i32 B_K_STEP = 1;
constexpr i32 SIZE = 128;
extern "C" __global__ void __launch_bounds__(128) kernel(const f32* __restrict__ b0, const f32* __restrict__ b1, const f32* __restrict__ b2, f32* __restrict__ b3) {
    __shared__ __align__(16) f32 tile[2304];
    const auto a_wide = [&](i32 batch, i32 m, i32 k) -> wide<f32, 4> {
        const auto batch_1 = i32(u32(batch) % 4u);
        const auto batch_0 = i32(u32(batch) / 4u);
        return read<f32, 4>(b0 + (batch_0 * 1024 + batch_1 * 16 + m * 64 + k));
    };
    const auto b_wide = [&](i32 batch, i32 k, i32 n) -> wide<f32, 4> {
        const auto batch_1 = i32(u32(batch) % 4u);
        const auto batch_0 = i32(u32(batch) / 4u);
        return read<f32, 4>(b1 + (batch_0 * 1024 + batch_1 * 16 + k + n * 64));
    };
    const auto c_wide = [&](i32 batch, i32 n, i32 e) -> wide<f32, 4> {
        const auto batch_1 = i32(u32(batch) % 4u);
        const auto batch_0 = i32(u32(batch) / 4u);
        return read<f32, 4>(b2 + (batch_0 * 1024 + batch_1 * 16 + n * 64 + e));
    };
const auto a = [&](i32 batch, i32 m, i32 k) -> f32 {
    const auto batch_1 = i32(u32(batch) % 4u);
    const auto batch_0 = i32(u32(batch) / 4u);
    return b0[batch_0 * 1024 + batch_1 * 16 + m * 64 + k];
};
const auto b = [&](i32 batch, i32 k, i32 n) -> f32 {
    const auto batch_1 = i32(u32(batch) % 4u);
    const auto batch_0 = i32(u32(batch) / 4u);
    return b1[batch_0 * 1024 + batch_1 * 16 + k + n * 64];
};
const auto c = [&](i32 batch, i32 n, i32 e) -> f32 {
    const auto batch_1 = i32(u32(batch) % 4u);
    const auto batch_0 = i32(u32(batch) / 4u);
    auto value = 0.0f;
    if (e < 16) { value = b2[batch_0 * 1024 + batch_1 * 16 + n * 64 + e]; }
    return value;
};
const auto look = [&](i32 batch, i32 m, i32 n, i32 pair) -> void {
};
const auto score = [&](i32 batch, i32 m, i32 n, i32 pair, i32 v, f32 value) -> f32 {
    auto result = value;
    const auto v0 = value;
    const auto v2 = v0 * 0.25f;
    result = v2;
    return result;
};
const auto store = [&](i32 batch, i32 m, i32 n, f32 value) -> void {
    if (m < M && n < COLUMNS_OUT) {
        const auto batch_1 = i32(u32(batch) % 4u);
        const auto batch_0 = i32(u32(batch) / 4u);
        const auto v0 = value;
        b3[batch_0 * 1024 + batch_1 * 16 + m * 64 + n] = v0;
    }
};
    const i32 group = blockIdx.x + blockIdx.y * 8u;
    const i32 thread = threadIdx.x;
    // Attention with sums in registers. A workgroup of 128 computes ROWS rows of the result, sixteen invocations ROW of them, and walks along
    // the keys, COLUMNS at a time: their scores, of which an invocation has COLUMN neighbours, the largest score and the sum of powers so
    // far, and the values weighted by the powers. What was summed before is scaled down when a larger score appears. Weights take the place of
    // keys in workgroup memory, where four rows of theirs stand elsewhere for each invocation that writes them, so that banks are shared
    // evenly. CLUSTER neighbouring workgroups take turns at the keys of the same rows.
    constexpr i32 ROW = ROWS / 8, COLUMN = COLUMNS / 16, PIECES = WIDTH / 16 / EACH, SIDE = ROW < 4 ? ROW : 4;
    const i32 rank = group % CLUSTER;
    const i32 batch = group / CLUSTER / GROUPS;
    const i32 m0 = group / CLUSTER % GROUPS * ROWS;
    const i32 lane = thread % 16;
    const i32 row = thread / 16 * ROW;
    f32* const queries = tile;
    f32* const keys = queries + K * ROWS;
    f32* const values = keys + (K > ROWS ? K : ROWS) * COLUMNS;
    const auto weight_at = [&](i32 n, i32 m) {
        return keys + n * ROWS + (m / 4 ^ n / COLUMN) % (ROWS / 4) * 4 + m % 4;
    };
    for (i32 s = thread; s < ROWS * K / 4; s += SIZE) {
        const i32 m = s % ROWS;
        const i32 k = s / ROWS * 4;
        wide<f32, 4> four = {};
        if (m0 + m < M) {
            four = a_wide(batch, m0 + m, k);
        }
        #pragma unroll
        for (i32 v = 0; v < 4; v++) {
            queries[(k + v) * ROWS + m] = four.v[v];
        }
    }
    f32 top[ROW], total[ROW], sum[ROW][PIECES * EACH];
    #pragma unroll
    for (i32 i = 0; i < ROW; i++) {
        top[i] = LOWEST;
        total[i] = 0.0f;
        #pragma unroll
        for (i32 e = 0; e < PIECES * EACH; e++) {
            sum[i][e] = 0.0f;
        }
    }
    for (i32 n0 = rank * COLUMNS; n0 < N; n0 += CLUSTER * COLUMNS) {
        __syncthreads();
        for (i32 s = thread; s < COLUMNS * K / 4; s += SIZE) {
            const i32 n = s % COLUMNS;
            const i32 k = s / COLUMNS * 4;
            wide<f32, 4> four = {};
            if (n0 + n < N) {
                four = b_wide(batch, k, n0 + n);
            }
            #pragma unroll
            for (i32 v = 0; v < 4; v++) {
                keys[(k + v) * COLUMNS + n] = four.v[v];
            }
        }
        for (i32 s = thread; s < COLUMNS * WIDTH / 4; s += SIZE) {
            const i32 n = s / (WIDTH / 4);
            const i32 e = s % (WIDTH / 4) * 4;
            wide<f32, 4> four = {};
            if (n0 + n < N && e < COLUMNS_OUT) {
                four = c_wide(batch, n0 + n, e);
            }
            write(values + n * WIDTH + e, four);
        }
        __syncthreads();
        f32 score_of[ROW][COLUMN];
        #pragma unroll
        for (i32 i = 0; i < ROW * COLUMN; i++) {
            score_of[i / COLUMN][i % COLUMN] = 0.0f;
        }
        #pragma unroll 8
        for (i32 k = 0; k < K; k++) {
            const auto y = read<f32, COLUMN>(keys + k * COLUMNS + lane * COLUMN);
            #pragma unroll
            for (i32 side = 0; side < ROW; side += SIDE) {
                const auto x = read<f32, SIDE>(queries + k * ROWS + row + side);
                #pragma unroll
                for (i32 i = 0; i < SIDE * COLUMN; i++) {
                    score_of[side + i / COLUMN][i % COLUMN] += x.v[i / COLUMN] * y.v[i % COLUMN];
                }
            }
        }
        __syncthreads();
        #pragma unroll
        for (i32 i = 0; i < ROW; i++) {
            f32 largest = top[i];
            #pragma unroll
            for (i32 j = 0; j < COLUMN; j++) {
                const i32 n = n0 + lane * COLUMN + j;
                if (j % 2 == 0) {
                    look(batch, m0 + row + i, n, 0);
                }
                score_of[i][j] = score(batch, m0 + row + i, n, 0, j % 2, score_of[i][j]);
                if (n >= N) {
                    score_of[i][j] = bitcast<f32>(0xff800000u);
                }
                largest = max(largest, score_of[i][j]);
            }
            #pragma unroll
            for (i32 lanes = 8; lanes > 0; lanes /= 2) {
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
            }
            const f32 fade = decay(top[i] - largest);
            top[i] = largest;
            total[i] *= fade;
            #pragma unroll
            for (i32 e = 0; e < PIECES * EACH; e++) {
                sum[i][e] *= fade;
            }
            #pragma unroll
            for (i32 j = 0; j < COLUMN; j++) {
                score_of[i][j] = decay(score_of[i][j] - largest);
                total[i] += score_of[i][j];
            }
        }
        #pragma unroll
        for (i32 j = 0; j < COLUMN; j++) {
            #pragma unroll
            for (i32 side = 0; side < ROW; side += SIDE) {
                wide<f32, SIDE> weights;
                #pragma unroll
                for (i32 i = 0; i < SIDE; i++) {
                    weights.v[i] = score_of[side + i][j];
                }
                write(weight_at(lane * COLUMN + j, row + side), weights);
            }
        }
        __syncthreads();
        #pragma unroll 8
        for (i32 n = 0; n < COLUMNS; n++) {
            wide<f32, EACH> y[PIECES];
            #pragma unroll
            for (i32 p = 0; p < PIECES; p++) {
                y[p] = read<f32, EACH>(values + n * WIDTH + (p * 16 + lane) * EACH);
            }
            #pragma unroll
            for (i32 side = 0; side < ROW; side += SIDE) {
                const auto x = read<f32, SIDE>(weight_at(n, row + side));
                #pragma unroll
                for (i32 i = 0; i < SIDE; i++) {
                    #pragma unroll
                    for (i32 e = 0; e < PIECES * EACH; e++) {
                        sum[side + i][e] += x.v[i] * y[e / EACH].v[e % EACH];
                    }
                }
            }
        }
    }
    #pragma unroll
    for (i32 i = 0; i < ROW; i++) {
        #pragma unroll
        for (i32 lanes = 8; lanes > 0; lanes /= 2) {
            total[i] += __shfl_xor_sync(0xffffffffu, total[i], lanes);
        }
    }
    #pragma unroll
    for (i32 i = 0; i < ROW; i++) {
        const f32 scale = 1.0f / total[i];
        #pragma unroll
        for (i32 e = 0; e < PIECES * EACH; e++) {
            f32& value = sum[i][e];
            value *= scale;
        }
        #pragma unroll
        for (i32 e = 0; e < PIECES * EACH; e++) {
            const i32 n = (e / EACH * 16 + lane) * EACH + e % EACH;
            store(batch, m0 + row + i, n, sum[i][e]);
        }
    }
}

// kernel 3, matmul: y
// 256 invocations, [4, 1, 1] workgroups
// matmul_slice_k_warp
constexpr i32 M = 32;
constexpr i32 K = 64;
constexpr i32 N = 64;
constexpr i32 TILES_M = 2;
constexpr i32 TILES_N = 2;
constexpr i32 TILE_M = 16;
constexpr i32 SIZE = 256;
extern "C" __global__ void __launch_bounds__(256) kernel(const f32* __restrict__ b0, const f32* __restrict__ b1, const f32* __restrict__ b2, const f32* __restrict__ b3, f32* __restrict__ b4) {
    __shared__ __align__(16) f32 tile[9216];
    const auto a_at = [&](i32 batch, i32 m, i32 k) -> const void* {
        return b0 + (m * 64 + k);
    };
    const auto b_at = [&](i32 batch, i32 k, i32 n) -> const void* {
        return b1 + (k * 64 + n);
    };
const auto a = [&](i32 batch, i32 m, i32 k) -> f32 {
    return b0[m * 64 + k];
};
const auto b = [&](i32 batch, i32 k, i32 n) -> f32 {
    return b1[k * 64 + n];
};
const auto store = [&](i32 batch, i32 m, i32 n, f32 value) -> void {
    if (m < M && n < N) {
        const auto v0 = b3[m * 64 + n];
        const auto v1 = value;
        const auto v2 = b2[n];
        const auto v3 = v1 + v2;
        const auto v4 = v0 + v3;
        b4[m * 64 + n] = v4;
    }
};
    const i32 group = blockIdx.x + blockIdx.y * 4u;
    const i32 thread = threadIdx.x;
    // Products of few tiles, of f32 that lies 16 bytes at a time. Each warp sums its share of the inner axis for all of a tile of TILE_M x 32,
    // TILE_M / 4 x 4 per lane: STEP slices at a time, which pass through workgroup memory of its own, where two of three stages are on
    // their way while one is used. Warps wait for each other at the end alone, where what they have summed is added. Where 16 bytes of a line
    // stand in a stage depends on the line, so that what eight lanes read at once is spread over all banks.
    constexpr i32 TILE_N = 32, STEP = 8, STAGES = 3, STAGE = (TILE_M + TILE_N) * STEP, TEAMS = SIZE / 32, ROW = TILE_M / 4;
    const i32 batch = group / (TILES_M * TILES_N);
    const i32 m0 = group / TILES_N % TILES_M * TILE_M;
    const i32 n0 = group % TILES_N * TILE_N;
    const i32 lane = thread % 32;
    const i32 row = lane / 8;
    const i32 column = lane % 8;
    f32* const own = tile + thread / 32 * STAGES * STAGE;
    const auto along_k = [](i32 line, i32 k) { return line * STEP + (k / 4 ^ line / 4) % 2 * 4; };
    const auto at_b = [](i32 k, i32 n) { return TILE_M * STEP + k * TILE_N + n; };
    const auto place_b = [&](i32 piece) { return at_b(piece * 4 + lane / 8, lane % 8 * 4); };
    // What a lane sends of each operand: where from, and how many slices of the inner axis it still has.
    constexpr i32 LEFT = TILE_M / 16, RIGHT = TILE_N / 16;
    const char* from[LEFT + RIGHT];
    i32 left[LEFT + RIGHT];
    const i32 first = thread / 32 * STEP;
    #pragma unroll
    for (i32 p = 0; p < LEFT; p++) {
        const i32 m = m0 + p * 16 + lane / 2;
        from[p] = (const char*)a_at(batch, m < M ? m : 0, 0) + (first + lane % 2 * 4) * 4;
        left[p] = m < M ? K - first - lane % 2 * 4 : 0;
    }
    const i64 b_step = (const char*)b_at(batch, 1, 0) - (const char*)b_at(batch, 0, 0);
    #pragma unroll
    for (i32 p = 0; p < RIGHT; p++) {
        const i32 k = first + p * 4 + lane / 8;
        const i32 n = n0 + lane % 8 * 4;
        from[LEFT + p] = (const char*)b_at(batch, 0, n < N ? n : 0) + k * b_step;
        left[LEFT + p] = n < N ? K - k : 0;
    }
    const auto fetch = [&](f32* stage) {
        #pragma unroll
        for (i32 p = 0; p < LEFT + RIGHT; p++) {
            const i32 place = p < LEFT ? along_k(p * 16 + lane / 2, lane % 2 * 4) : place_b(p - LEFT);
            copy_async(stage + place, from[p], left[p] > 0);
            from[p] += TEAMS * STEP * (p < LEFT ? 4 : b_step);
            left[p] -= TEAMS * STEP;
        }
    };
    f32 sum[ROW][4];
    #pragma unroll
    for (i32 i = 0; i < ROW * 4; i++) {
        sum[i / 4][i % 4] = 0.0f;
    }
    #pragma unroll
    for (i32 s = 0; s < STAGES - 1; s++) {
        fetch(own + s * STAGE);
        commit_copies();
    }
    i32 used = 0;
    for (i32 k0 = 0; k0 < K; k0 += TEAMS * STEP) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        if (k0 + (STAGES - 1) * TEAMS * STEP < K) {
            fetch(own + (used + STAGES - 1) % STAGES * STAGE);
        }
        commit_copies();
        const f32* const stage = own + used * STAGE;
        used = (used + 1) % STAGES;
        #pragma unroll
        for (i32 k = 0; k < STEP; k += 4) {
            wide<f32, 4> y[4];
            #pragma unroll
            for (i32 v = 0; v < 4; v++) {
                y[v] = read<f32, 4>(stage + at_b(k + v, column * 4));
            }
            #pragma unroll
            for (i32 i = 0; i < ROW; i++) {
                const auto x = read<f32, 4>(stage + along_k(i * 4 + row, k));
                #pragma unroll
                for (i32 v = 0; v < 4; v++) {
                    #pragma unroll
                    for (i32 j = 0; j < 4; j++) {
                        sum[i][j] += x.v[v] * y[v].v[j];
                    }
                }
            }
        }
    }
    wait_copies();
    __syncthreads();
    #pragma unroll
    for (i32 i = 0; i < ROW * 4; i++) {
        const i32 n = column * 4 + i % 4;
        tile[(thread / 32 * TILE_M + i / 4 * 4 + row) * TILE_N + n] = sum[i / 4][i % 4];
    }
    __syncthreads();
    #pragma unroll
    for (i32 s = thread; s < TILE_M * TILE_N; s += SIZE) {
        f32 total = 0.0f;
        #pragma unroll
        for (i32 t = 0; t < TEAMS; t++) {
            total += tile[t * TILE_M * TILE_N + s];
        }
        store(batch, m0 + s / TILE_N, n0 + s % TILE_N, total);
    }
}

