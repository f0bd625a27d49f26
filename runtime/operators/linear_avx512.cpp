// AVX-512 with VNNI: a vector is a tile. And AMX, for many rows: no compiler makes its instructions of anything else.
#if defined(__x86_64__) || defined(_M_X64)
#include "linear.h"

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in its own headers
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace specexport {
namespace avx512 {
// Registers: 10 sums + 8 unpacked + 3 = 21 of 32 zmm; of floats 18 sums (two chains) + 2 weights = 20.
// Ten rows: 0.93 to 0.99 of the time of nine (q4_k, 10 to 100 rows). 4 KB ahead: 1.1 times as long (both on Zen 5).
constexpr int kLanes = 16, kMr = 10, kMrFloats = 9, kAhead = 8192;
constexpr bool kSigned = false, kPairs = false;
using V = __m512;
using I = __m512i;
using U = __m512i;

INLINE V vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float* p, V v) { _mm512_storeu_ps(p, v); }
INLINE V vset(float x) { return _mm512_set1_ps(x); }
INLINE V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE I izero() { return _mm512_setzero_si512(); }
INLINE I iset(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE V to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE U uload(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE U uand(U a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8(char(mask))); }
INLINE U uxor(U a, int mask) { return _mm512_xor_si512(a, _mm512_set1_epi8(char(mask))); }
INLINE U uor(U a, U b) { return _mm512_or_si512(a, b); }
template <int n>
INLINE U ushl(U a) {
  return _mm512_slli_epi16(a, n);
}
template <int n>
INLINE U ushr(U a) {
  return _mm512_srli_epi16(a, n);
}
INLINE U ulookup(const uint8_t* lut, U a) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lut))), a);
}
INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

template <int bits>
INLINE I dot(I sum, const U* u, const int8_t* values) {
  UNROLL for (int q = 0; q < 4; q++) {
    int32_t quad;
    memcpy(&quad, values + 4 * q, 4);
    sum = _mm512_dpbusd_epi32(sum, u[q], _mm512_set1_epi32(quad));
  }
  return sum;
}
INLINE __m128i bytes16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE __m256i words16(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE V load_halves(const uint8_t* p) { return _mm512_cvtph_ps(words16(p)); }
INLINE V load_bf16(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words16(p)), 16));
}
INLINE I load_int8(const uint8_t* p) { return _mm512_cvtepi8_epi32(bytes16(p)); }
INLINE I load_uint8(const uint8_t* p) { return _mm512_cvtepu8_epi32(bytes16(p)); }
INLINE I imadd(I a, I b, I sum) { return _mm512_add_epi32(sum, _mm512_mullo_epi32(a, b)); }
INLINE I iscaled(I scale, I k) { return _mm512_madd_epi16(scale, k); }
INLINE I ipair(I even, I odd) { return _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16)); }
INLINE I add_pairs(I pairs, int32_t two, I sum) { return _mm512_dpwssd_epi32(sum, pairs, iset(two)); }

INLINE int32_t largest_bits(const float* x) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), mask);
  const __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
  return _mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
}
INLINE void round_block(const float* x, float inverse, int8_t* values, int32_t* sums) {
  for (int half = 0; half < 2; half++) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * half), _mm512_set1_ps(inverse)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16 * half), _mm512_cvtepi32_epi8(rounded));
    sums[half] = _mm512_reduce_add_epi32(rounded);
  }
}
template <class T>
INLINE void pin(T&) {}
#include "linear_tile.h"

#include "linear_amx.h"

// By hand: g++ 12's own functions do not say that they read and write memory.
struct Amx {
  static void begin(int rows) {
    struct {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {};  // of a row of each register: 0 to 3 are sums, 4 to 7 what is multiplied
      uint8_t rows[16] = {};
    } set;
    for (int i = 0; i < 8; i++) set.bytes[i] = uint16_t(i == 4 || i == 5 ? kBlockInputs : 64);
    for (int i = 0; i < 8; i++) set.rows[i] = uint8_t(i < 6 ? rows : 8);
    __asm__ volatile("ldtilecfg %0" : : "m"(set));
  }
  static void end() { __asm__ volatile("tilerelease"); }
  template <int n>
  INLINE void product(const uint8_t* a, size_t stride, const uint8_t* b, int32_t* out) {
    __asm__ volatile(
        "tilezero %%tmm%c5\n\t"
        "tileloadd (%0,%1,1), %%tmm%c6\n\t"
        "tileloadd (%2,%4,1), %%tmm%c7\n\t"
        "tdpbsud %%tmm%c7, %%tmm%c6, %%tmm%c5\n\t"
        "tilestored %%tmm%c5, (%3,%4,1)"
        :
        : "r"(a), "r"(stride), "r"(b), "r"(out), "r"(size_t(64)), "i"(n), "i"(4 + n % 2), "i"(6 + n % 2)
        : "memory");
  }
};
}  // namespace avx512
const LinearKernels linear_avx512 = {avx512::kMr, avx512::kMrFloats, avx512::pack, avx512::multiply};
// From 64 rows: 0.90 to 0.97 of the time of reading 100 and 200 tokens (q4_k, two threads); 16 rows took 1.0 to 1.6.
const LinearKernels linear_amx = {
    avx512::kMr, avx512::kMrFloats, avx512::pack, avx512::multiply_with<avx512::Amx>, avx512::kUnitRows, 64};
bool amx_multiplies_right() { return avx512::multiplies_right<avx512::Amx>(); }
}  // namespace specexport
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
