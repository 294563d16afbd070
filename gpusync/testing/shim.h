// CUDA C as plain C++20, for kernels without barriers, shuffles and shared memory: those are compile errors here. This
// text stands before the kernels, and launch.h behind them, in one translation unit. The grid is two nested loops that a
// kernel is inlined into, so that it runs at the speed of a plain loop.
#include <cstddef>
#include <utility>

// Standard headers come first: they use names that are macros from here on.
#define __global__ inline __attribute__((always_inline))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct gs_dim3 {
    unsigned int x, y, z;
};

// Nothing takes their addresses, so that a store through a byte pointer does not make the compiler load them again.
static thread_local gs_dim3 threadIdx, blockIdx, blockDim, gridDim;

struct __align__(8) uint2 {
    unsigned int x, y;
};
struct __align__(16) uint4 {
    unsigned int x, y, z, w;
};
struct __align__(16) ulonglong2 {
    unsigned long long x, y;
};

static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w)
{
    return {x, y, z, w};
}
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Atomic, although one thread runs a grid: other host threads may run other queues.
#define GS_ATOMICS(T)                                                                             \
    static inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }  \
    static inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }    \
    static inline T atomicMax(T* p, T v)                                                          \
    {                                                                                             \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                             \
        while (old < v && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED,        \
                                                       __ATOMIC_RELAXED)) {                       \
        }                                                                                         \
        return old;                                                                               \
    }
GS_ATOMICS(unsigned int)
GS_ATOMICS(unsigned long long)
#undef GS_ATOMICS
