// What the templates' statements mean in C++: they are WGSL with inferred types.
typedef int i32;
typedef unsigned int u32;
typedef float f32;
struct vec4f {
    f32 x, y, z, w;
    __device__ explicit vec4f(f32 v) : x(v), y(v), z(v), w(v) {}
    __device__ vec4f(f32 x, f32 y, f32 z, f32 w) : x(x), y(y), z(z), w(w) {}
    vec4f() = default;
};
__device__ inline vec4f operator+(vec4f a, vec4f b) { return vec4f(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ inline vec4f operator*(f32 a, vec4f b) { return vec4f(a * b.x, a * b.y, a * b.z, a * b.w); }
template <class T> __device__ inline T select(T f, T t, bool c) { return c ? t : f; }
template <class T> __device__ inline T clamp(T v, T low, T high) { return min(max(v, low), high); }
template <class T, class U> __device__ inline T bitcast(U v) { T t; memcpy(&t, &v, sizeof t); return t; }
__device__ inline f32 sign(f32 v) { return f32(v > 0.0f) - f32(v < 0.0f); }
__device__ inline i32 sign(i32 v) { return (v > 0) - (v < 0); }
__device__ inline f32 round(f32 v) { return rintf(v); }
__device__ inline void workgroupBarrier() { __syncthreads(); }
