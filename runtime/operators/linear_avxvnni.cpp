// AVX-VNNI: AVX2's vectors, and products of codes as AVX-512 has them.
#if defined(__x86_64__) || defined(_M_X64)
#include "linear.h"

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define WITH_VNNI
namespace specexport {
namespace avxvnni {
constexpr bool kSigned = false, kPairs = false;
// Registers: 9 sums + 8 unpacked are more than 16 ymm, and some wait in the L1 cache.
constexpr int kMr = 9;  // against 6: 0.89 to 0.98 of the time of 7 to 9 rows, 1.05 of 100 (int8, q4_k; Zen 5)
#include "linear_avx2.h"
}  // namespace avxvnni
const LinearKernels linear_avxvnni = {avxvnni::kMr, avxvnni::kMrFloats, avxvnni::pack, avxvnni::multiply};
}  // namespace specexport
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
