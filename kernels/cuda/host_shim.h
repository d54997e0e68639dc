// What kvtide.cu needs of CUDA, for an ordinary C++ compiler (GCC or Clang): the kernels become
// functions that run one thread of the launch. No header is included and nothing is linked.
#pragma once

#define __global__
#define __device__ static

// In front of loops over a few elements that should stay in registers.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

struct Dim3 {
    unsigned int x, y, z;
};

// What a thread of a launch sees of its place; set by the launch before each call of a kernel.
static __thread Dim3 threadIdx, blockIdx, blockDim, gridDim;

// Aligned as on the device, so that a misaligned access is one here too (and is found by the
// undefined-behaviour sanitizer).
struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

static inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

static inline float __uint_as_float(unsigned int bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// Compiled with -ffp-contract=off: each is one operation, rounded once.
static inline float __fadd_rn(float left, float right) {
    return left + right;
}

static inline float __fmul_rn(float left, float right) {
    return left * right;
}

static inline float __fdiv_rn(float left, float right) {
    return left / right;
}

static inline unsigned long long __umul64hi(unsigned long long left, unsigned long long right) {
    return (unsigned long long)((unsigned __int128)left * right >> 64);
}

// One thread runs at a time within a launch, but two launches may run at once.
static inline unsigned int atomicMax(unsigned int* place, unsigned int value) {
    unsigned int old = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (old < value &&
           !__atomic_compare_exchange_n(
               place, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED
           )) {
    }
    return old;
}
