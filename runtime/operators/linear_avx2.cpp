// AVX2 with FMA and F16C.
#if defined(__x86_64__) || defined(_M_X64)
#include "linear.h"

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define WITH_PAIRS

namespace specexport {
namespace avx2 {
constexpr bool kSigned = true, kPairs = true;
// Registers: 8 unpacked + 4 quads + 2 factors = 14 of 16 ymm; sums wait in the L1 cache, so that rows are not bound.
constexpr int kMr = 10;  // against 6: 0.91 of the time of 9 rows, 0.96 of 16 (q4_k, Zen 5)
#include "linear_avx2.h"
}  // namespace avx2
const LinearKernels linear_avx2 = {avx2::kMr, avx2::kMrFloats, avx2::pack, avx2::multiply};
}  // namespace specexport
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
