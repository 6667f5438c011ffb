// CUDA C++ as a host compiler takes it: the threads of a workgroup are contexts that take turns, from one barrier to the next. The
// workgroups of a cluster are threads of the host.
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <setjmp.h>
#include <thread>
#include <ucontext.h>
#include <utility>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z)
#define POOL(bytes) __shared__ __align__(1024) u8 pool[bytes]
using std::abs; using std::ceil; using std::cos; using std::erf; using std::exp; using std::floor; using std::fmod;
using std::log; using std::memcpy; using std::pow; using std::rint; using std::sin; using std::sqrt; using std::tanh;
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x, y, z; };
static thread_local Dim blockIdx, threadIdx;
static void (*entry)();
// Where a thread waits, if it has not ended.
enum Place { END, WARP, WORKGROUP };
// A thread's context goes on to the thread of its number in the next workgroup. Contexts change by jumps, which ask nothing of the system
// as `swapcontext` does; only to begin, one needs more.
struct Thread {
    std::unique_ptr<char[]> stack;
    jmp_buf point;
    Place place;
    bool given;
};
static thread_local Thread threads[1024];
static thread_local jmp_buf scheduler;
static void turn(Place place) {
    Thread& own = threads[threadIdx.x];
    own.place = place;
    if (_setjmp(own.point) == 0) _longjmp(scheduler, 1);
}
static void run_threads() {
    for (;; turn(END)) entry();
}
static void resume(unsigned t) {
    threadIdx = {t, 0, 0};
    Thread& next = threads[t];
    if (_setjmp(scheduler) != 0) return;
    if (next.stack) _longjmp(next.point, 1);
    const size_t size = 256 << 10;
    next.stack.reset(new char[size]);
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = next.stack.get();
    start.uc_stack.ss_size = size;
    makecontext(&start, run_threads, 0);
    setcontext(&start);
}
// What a case did that no result shows.
static std::atomic<const char*> fault;
// One warp after another runs to the next barrier of the workgroup; its lanes take turns, from one barrier of the warp to the next. Upwards
// and downwards: what should wait for another and does not goes wrong in one of them.
static void workgroup(unsigned size, bool down) {
    for (unsigned t = 0; t < size; t++) {
        threads[t].place = WORKGROUP;
        threads[t].given = false;
    }
    const unsigned warps = (size + 31) / 32;
    for (bool more = true; more;) {
        more = false;
        for (unsigned w = 0; w < warps; w++) {
            const unsigned warp = (down ? warps - 1 - w : w) * 32, lanes = min(32u, size - warp);
            unsigned at[3];
            do {
                at[END] = at[WARP] = at[WORKGROUP] = 0;
                for (unsigned l = 0; l < lanes; l++) {
                    const unsigned t = warp + (down ? lanes - 1 - l : l);
                    if (threads[t].place != END) resume(t);
                    at[threads[t].place]++;
                }
                if (at[WARP] > 0 && at[WARP] < lanes) fault = "a warp meets without all of its lanes";
            } while (at[WARP] > 0);
            more |= at[WORKGROUP] > 0;
        }
    }
}
inline void __syncthreads() { turn(WORKGROUP); }
inline void __syncwarp() { turn(WARP); }
// What each thread lays open for the others of its warp, in two places by turns: when one is written again, it has been read.
static thread_local char given[2][1024][64];
template <class T> inline auto exchange(const T& v) {
    const unsigned t = threadIdx.x;
    const auto place = given[threads[t].given ^= true];
    memcpy(place[t], &v, sizeof v);
    turn(WARP);
    return [warp = place + t / 32 * 32](unsigned lane) {
        T other;
        memcpy(&other, warp[lane % 32], sizeof other);
        return other;
    };
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int lanes) {
    if (mask != 0xffffffffu) fault = "only whole warps shuffle here";
    return exchange(v)(threadIdx.x ^ lanes);
}
PRELUDE
inline u16 to_f16(f32 v) { _Float16 h = v; u16 b; memcpy(&b, &h, 2); return b; }
inline f32 from_f16(u16 b) { _Float16 h; memcpy(&h, &b, 2); return h; }
struct Eight { u16 v[8]; };
inline void matrices(u32 (&r)[4], const void* p, bool transposed) {
    const unsigned lane = threadIdx.x % 32;
    Eight row;
    memcpy(&row, p, sizeof row);
    const auto row_of = exchange(row);
    for (unsigned j = 0; j < 4; j++) {
        u16 pair[2];
        for (unsigned e = 0; e < 2; e++) {
            const unsigned along = lane % 4 * 2 + e, across = lane / 4;
            pair[e] = transposed ? row_of(8 * j + along).v[across] : row_of(8 * j + across).v[along];
        }
        memcpy(&r[j], pair, 4);
    }
}
inline void load_matrices(u32 (&r)[4], const void* p) { matrices(r, p, false); }
inline void load_transposed(u32 (&r)[4], const void* p) { matrices(r, p, true); }
inline i32 dot_of_bytes(u32 unsigned_bytes, u32 signed_bytes, i32 sum) {
    for (int v = 0; v < 32; v += 8) sum += i32(unsigned_bytes >> v & 255) * i32(i8(signed_bytes >> v));
    return sum;
}
struct Words { u32 a[4], b[2]; };
template <bool LEFT_UNSIGNED> inline void multiply_bytes(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const unsigned lane = threadIdx.x % 32;
    const auto of = exchange(Words{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    // Word `w` of a row has bytes 4 w to 4 w + 3 of the inner axis.
    for (unsigned w = 0; w < 8; w++) {
        const Words rows = of(lane / 4 * 4 + w % 4);
        for (unsigned e = 0; e < 2; e++) {
            const u32 y = of((lane % 4 * 2 + e) * 4 + w % 4).b[w / 4];
            for (unsigned r = 0; r < 2; r++) {
                const u32 x = rows.a[w / 4 * 2 + r];
                i32& sum = c[r * 2 + e];
                sum = LEFT_UNSIGNED ? dot_of_bytes(x, y, sum) : dot_of_bytes(y, x, sum);
            }
        }
    }
}
struct Share { f32 a[8], b[4]; };
template <class T> inline void multiply(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const unsigned lane = threadIdx.x % 32;
    const u32 bits[6] = {a[0], a[1], a[2], a[3], b0, b1};
    T halves[12];
    memcpy(halves, bits, sizeof bits);
    Share own;
    for (unsigned i = 0; i < 12; i++) (i < 8 ? own.a[i] : own.b[i - 8]) = f32(halves[i]);
    const auto of = exchange(own);
    for (unsigned k = 0; k < 16; k += 2) {
        // Slices k and k + 1.
        const Share rows = of(lane / 4 * 4 + k % 8 / 2);
        for (unsigned e = 0; e < 2; e++) {
            const Share column = of((lane % 4 * 2 + e) * 4 + k % 8 / 2);
            for (unsigned v = 0; v < 2; v++) {
                const f32 y = column.b[k / 8 * 2 + v];
                c[e] += rows.a[k / 8 * 4 + v] * y;
                c[e + 2] += rows.a[k / 8 * 4 + 2 + v] * y;
            }
        }
    }
}
template <class T> inline u32 pair(f32 low, f32 high) {
    const T halves[2] = {T(low), T(high)};
    u32 bits;
    memcpy(&bits, halves, 4);
    return bits;
}
template <class T> inline u32 fused(u32 a, u32 b, u32 c) {
    const u32 words[3] = {a, b, c};
    T halves[6];
    memcpy(halves, words, sizeof words);
    const auto of = [&](int i) { return std::fma(f32(halves[i]), f32(halves[2 + i]), f32(halves[4 + i])); };
    return pair<T>(of(0), of(1));
}
inline u32 bytes_of(u32 a, u32 b, u32 which) {
    const u64 all = a | u64(b) << 32;
    u32 bytes = 0;
    for (int i = 0; i < 4; i++) bytes |= u32(all >> (which >> (4 * i) & 7) * 8 & 255) << 8 * i;
    return bytes;
}
inline f32 power_of_two(f32 v) { return std::exp2(v); }
inline f32 decay(f32 v) { return exp(v); }
// What is copied is there when it is waited for, and not before.
struct Copy { void* to; unsigned char bytes[16]; int commit; };
static thread_local std::vector<Copy> copies[1024];
static thread_local int commits[1024];
inline void copy_async(void* to, const void* from, bool there) {
    Copy copy = {to, {}, commits[threadIdx.x]};
    if (there) memcpy(copy.bytes, from, 16);
    copies[threadIdx.x].push_back(copy);
}
inline void commit_copies() { commits[threadIdx.x]++; }
inline void finish(int until) {
    std::vector<Copy> later;
    for (const Copy& copy : copies[threadIdx.x]) {
        if (copy.commit < until) memcpy(copy.to, copy.bytes, 16);
        else later.push_back(copy);
    }
    copies[threadIdx.x] = later;
}
inline void wait_copies() { finish(commits[threadIdx.x] + 1); }
template <int LATER> inline void wait_copies() { finish(commits[threadIdx.x] - LATER); }
// Products of tiles are made when they are waited for, and not before: what is overwritten too soon shows.
struct Order { void (*make)(const Order&); f32* c; const void *a, *b; };
static thread_local std::vector<Order> orders[1024], committed_orders[1024];
template <class T> inline T in_tile(const T* tile, int row, int k) {
    const size_t at = reinterpret_cast<size_t>(tile + row * 64 + k);
    return *reinterpret_cast<const T*>(at ^ (at >> 7 & 7) << 4);
}
// Most of the work: optimized.
template <class T> __attribute__((optimize("O2"))) static void make(const Order& order) {
    const T *a = static_cast<const T*>(order.a), *b = static_cast<const T*>(order.b);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    f32 rows[2][16];
    for (int k = 0; k < 32; k++) rows[k / 16][k % 16] = f32(in_tile(a, warp * 16 + k / 16 * 8 + lane / 4, k % 16));
    for (int n = 0; n < 64; n++) {
        f32 *const first = order.c + n / 2 * 4 + n % 2, *const second = first + 2;
        for (int k = 0; k < 16; k++) {
            const f32 y = f32(in_tile(b, n / 2 * 8 + lane % 4 * 2 + n % 2, k));
            *first += rows[0][k] * y;
            *second += rows[1][k] * y;
        }
    }
}
template <class T> inline void multiply_tiles(f32 (&c)[128], const T* a, const T* b) {
    for (const T* tile : {a, b}) {
        if (reinterpret_cast<size_t>(tile) % 1024 >= 128) fault = "a tile begins between multiples of 1024 bytes";
    }
    orders[threadIdx.x].push_back({make<T>, c, a, b});
}
inline void show_tiles() {}
inline void begin_tiles() {}
inline void commit_tiles() {
    auto& own = orders[threadIdx.x];
    committed_orders[threadIdx.x].insert(committed_orders[threadIdx.x].end(), own.begin(), own.end());
    own.clear();
}
inline void wait_tiles() {
    for (const Order& order : committed_orders[threadIdx.x]) order.make(order);
    committed_orders[threadIdx.x].clear();
}
// The workgroups of a cluster: where each has its memory, and how many of them are at the barrier.
static std::mutex lock;
static std::condition_variable all_here;
static unsigned cluster_size, here, meetings;
static char* memories[16];
static thread_local char memory;
static void meet() {
    std::unique_lock<std::mutex> held(lock);
    const unsigned meeting = meetings;
    if (++here == cluster_size) { here = 0; meetings++; all_here.notify_all(); }
    all_here.wait(held, [&] { return meetings != meeting; });
}
inline void meet_cluster() {
    turn(WORKGROUP);
    if (threadIdx.x == 0) meet();
    turn(WORKGROUP);
}
template <class T> inline const T* neighbours(const T* p, i32 rank) {
    return reinterpret_cast<const T*>(memories[rank] + (reinterpret_cast<const char*>(p) - &memory));
}
template <class... A, size_t... I> static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel((A)args[I]...);
}
template <class... A> static const char* launch(void (*kernel)(A...), void** args, unsigned x, unsigned y, unsigned size, unsigned cluster) {
    static void (*function)(A...);
    static void** arguments;
    function = kernel;
    arguments = args;
    entry = [] { call(function, arguments, std::index_sequence_for<A...>()); };
    cluster_size = cluster;
    const auto group = [=](unsigned g) {
        memories[g % cluster] = &memory;
        meet();
        blockIdx = {g % x, g / x, 0};
        workgroup(size, g / cluster % 2 > 0);
        for (auto& own : copies) {
            if (!own.empty()) fault = "what was copied is not waited for";
            own.clear();
        }
        for (auto list : {orders, committed_orders}) {
            for (unsigned t = 0; t < size; t++) {
                if (!list[t].empty()) fault = "a product is not waited for";
                list[t].clear();
            }
        }
    };
    for (unsigned g = 0; g < x * y; g += cluster) {
        std::vector<std::thread> others;
        for (unsigned rank = 1; rank < cluster; rank++) others.emplace_back(group, g + rank);
        group(g);
        for (auto& other : others) other.join();
    }
    return fault.exchange(nullptr);
}
