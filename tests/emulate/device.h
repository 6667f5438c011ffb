// CUDA C++ as a host compiler takes it: the threads of a workgroup are contexts that take turns, from one barrier to the next. The
// workgroups of a cluster are threads of the host.
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <ucontext.h>
#include <utility>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n)
#define __cluster_dims__(x, y, z)
#define POOL(bytes) __shared__ __align__(16) u8 pool[bytes]
using std::abs; using std::ceil; using std::cos; using std::erf; using std::exp; using std::floor; using std::fmod;
using std::log; using std::memcpy; using std::pow; using std::rint; using std::sin; using std::sqrt; using std::tanh;
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x, y, z; };
static thread_local Dim blockIdx, threadIdx;
static thread_local ucontext_t scheduler;
static thread_local std::vector<ucontext_t> contexts;
static thread_local std::vector<char> finished;
static void (*entry)();
static void turn() { swapcontext(&contexts[threadIdx.x], &scheduler); }
static void run_thread() { entry(); finished[threadIdx.x] = 1; swapcontext(&contexts[threadIdx.x], &scheduler); }
static void workgroup(unsigned size) {
    static thread_local std::vector<std::vector<char>> stacks;
    while (stacks.size() < size) stacks.emplace_back(256 << 10);
    contexts.resize(1024);
    finished.assign(size, 0);
    for (unsigned t = 0; t < size; t++) {
        getcontext(&contexts[t]);
        contexts[t].uc_stack.ss_sp = stacks[t].data();
        contexts[t].uc_stack.ss_size = stacks[t].size();
        contexts[t].uc_link = nullptr;
        makecontext(&contexts[t], run_thread, 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (unsigned t = 0; t < size; t++) {
            if (finished[t]) continue;
            threadIdx = {t, 0, 0};
            swapcontext(&scheduler, &contexts[t]);
            more |= !finished[t];
        }
    }
}
inline void __syncthreads() { turn(); }
inline void __syncwarp() { turn(); }
// What each thread lays open for the others, until the next turn but one.
static thread_local unsigned long long given[1024][8];
template <class T> inline T __shfl_xor_sync(unsigned, T v, int lanes) {
    memcpy(given[threadIdx.x], &v, sizeof v);
    turn();
    T other;
    memcpy(&other, given[threadIdx.x ^ lanes], sizeof other);
    turn();
    return other;
}
PRELUDE
inline u16 to_f16(f32 v) { _Float16 h = v; u16 b; memcpy(&b, &h, 2); return b; }
inline f32 from_f16(u16 b) { _Float16 h; memcpy(&h, &b, 2); return h; }
inline void matrices(u32 (&r)[4], const void* p, bool transposed) {
    const unsigned t = threadIdx.x, lane = t % 32, warp = t - lane;
    memcpy(given[t], &p, sizeof p);
    turn();
    for (unsigned j = 0; j < 4; j++) {
        u16 pair[2];
        for (unsigned e = 0; e < 2; e++) {
            const unsigned along = lane % 4 * 2 + e, across = lane / 4;
            const u16* row;
            memcpy(&row, given[warp + 8 * j + (transposed ? along : across)], sizeof row);
            pair[e] = row[transposed ? across : along];
        }
        memcpy(&r[j], pair, 4);
    }
    turn();
}
inline void load_matrices(u32 (&r)[4], const void* p) { matrices(r, p, false); }
inline void load_transposed(u32 (&r)[4], const void* p) { matrices(r, p, true); }
template <class T> inline void multiply(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const unsigned t = threadIdx.x, lane = t % 32, warp = t - lane;
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(given[t], own, sizeof own);
    turn();
    const auto half = [&](unsigned from, unsigned slot, unsigned e) {
        T v;
        memcpy(&v, reinterpret_cast<char*>(given[warp + from]) + 4 * slot + 2 * e, 2);
        return f32(v);
    };
    for (unsigned e = 0; e < 4; e++) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + e % 2, low = e / 2;
        for (unsigned k = 0; k < 16; k++) {
            const f32 x = half(row * 4 + k % 8 / 2, low + k / 8 * 2, k % 2);
            const f32 y = half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
            c[e] += x * y;
        }
    }
    turn();
}
template <class T> inline u32 pair(f32 low, f32 high) {
    const T halves[2] = {T(low), T(high)};
    u32 bits;
    memcpy(&bits, halves, 4);
    return bits;
}
inline f32 power_of_two(f32 v) { return std::exp2(v); }
inline f32 decay(f32 v) { return exp(v); }
// What is sent is there when it is waited for, and not before.
struct Parcel { void* to; unsigned char bytes[16]; int post; };
static thread_local std::vector<Parcel> parcels[1024];
static thread_local int posts[1024];
inline void send(void* to, const void* from, bool there) {
    Parcel parcel = {to, {}, posts[threadIdx.x]};
    if (there) memcpy(parcel.bytes, from, 16);
    parcels[threadIdx.x].push_back(parcel);
}
inline void post() { posts[threadIdx.x]++; }
inline void deliver(int until) {
    std::vector<Parcel> later;
    for (const Parcel& parcel : parcels[threadIdx.x]) {
        if (parcel.post < until) memcpy(parcel.to, parcel.bytes, 16);
        else later.push_back(parcel);
    }
    parcels[threadIdx.x] = later;
}
inline void arrive() { deliver(posts[threadIdx.x] + 1); }
template <int LATER> inline void arrive() { deliver(posts[threadIdx.x] - LATER); }
// The workgroups of a cluster: where each has its memory, and how many of them are at the barrier.
static std::mutex lock;
static std::condition_variable all_here;
static unsigned cluster_size, here, meetings;
static char* memories[16];
static thread_local char memory;
inline void meet_cluster() {
    turn();
    if (threadIdx.x == 0) {
        std::unique_lock<std::mutex> held(lock);
        const unsigned meeting = meetings;
        if (++here == cluster_size) { here = 0; meetings++; all_here.notify_all(); }
        all_here.wait(held, [&] { return meetings != meeting; });
    }
    turn();
}
template <class T> inline const T* neighbours(const T* p, i32 rank) {
    return reinterpret_cast<const T*>(memories[rank] + (reinterpret_cast<const char*>(p) - &memory));
}
template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel((A)args[I]...);
}
template <class... A> void launch(void (*kernel)(A...), void** args, unsigned x, unsigned y, unsigned size, unsigned cluster) {
    static void (*function)(A...);
    static void** arguments;
    function = kernel;
    arguments = args;
    entry = [] { call(function, arguments, std::index_sequence_for<A...>()); };
    cluster_size = cluster;
    const auto group = [=](unsigned g) {
        memories[g % cluster] = &memory;
        blockIdx = {g % x, g / x, 0};
        for (auto& own : parcels) own.clear();
        workgroup(size);
    };
    for (unsigned g = 0; g < x * y; g += cluster) {
        std::vector<std::thread> others;
        for (unsigned rank = 1; rank < cluster; rank++) others.emplace_back(group, g + rank);
        group(g);
        for (auto& other : others) other.join();
    }
}
