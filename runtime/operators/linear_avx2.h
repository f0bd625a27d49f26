// 256 bits: included by linear_avx2.cpp and linear_avxvnni.cpp inside their namespaces. A tile is two slices.
// Registers of floats: 12 sums (two chains) + 2 weights + 1 = 15 of 16 ymm.
constexpr int kLanes = 8, kMrFloats = 6, kAhead = 8192;  // 4 KB: up to 1.4 times as long, 16 KB the same (Zen 5)
using V = __m256;
using I = __m256i;
using U = __m256i;

INLINE V vload(const float* p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float* p, V v) { _mm256_storeu_ps(p, v); }
INLINE V vset(float x) { return _mm256_set1_ps(x); }
INLINE V vmul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE I izero() { return _mm256_setzero_si256(); }
INLINE I iset(int32_t x) { return _mm256_set1_epi32(x); }
INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE V to_float(I a) { return _mm256_cvtepi32_ps(a); }
INLINE U uload(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE U uand(U a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8(char(mask))); }
INLINE U uxor(U a, int mask) { return _mm256_xor_si256(a, _mm256_set1_epi8(char(mask))); }
INLINE U uor(U a, U b) { return _mm256_or_si256(a, b); }
template <int n>
INLINE U ushl(U a) {
  return _mm256_slli_epi16(a, n);
}
template <int n>
INLINE U ushr(U a) {
  return _mm256_srli_epi16(a, n);
}
INLINE U ulookup(const uint8_t* lut, U a) {
  const U codes =
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lut))), a);
  return kSigned ? uxor(codes, 0x80) : codes;
}
INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Computes a value here. Else the compiler mixes rows, or halves of a block, and spills: 0.75 of the speed (int4, 5
// rows, AVX2 on Zen 5).
template <class T>
INLINE void pin(T& value) {
  __asm__ volatile("" : "+x"(value));
}
INLINE I quad(const int8_t* values) {
  int32_t bits;
  memcpy(&bits, values, 4);
  return _mm256_set1_epi32(bits);
}
#if defined(WITH_VNNI)
template <int bits>
INLINE I dot(I sum, const U* u, const int8_t* values) {
  UNROLL for (int q = 0; q < 4; q++) sum = _mm256_dpbusd_avx_epi32(sum, u[q], quad(values + 4 * q));
  return sum;
}
#endif
INLINE __m128i bytes8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
INLINE __m128i words8(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE V load_halves(const uint8_t* p) { return _mm256_cvtph_ps(words8(p)); }
INLINE V load_bf16(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words8(p)), 16));
}
INLINE I load_int8(const uint8_t* p) { return _mm256_cvtepi8_epi32(bytes8(p)); }
INLINE I load_uint8(const uint8_t* p) { return _mm256_cvtepu8_epi32(bytes8(p)); }
INLINE I imadd(I a, I b, I sum) { return _mm256_add_epi32(sum, _mm256_mullo_epi32(a, b)); }
INLINE I iscaled(I scale, I k) { return _mm256_madd_epi16(scale, k); }
INLINE I ipair(I even, I odd) { return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa); }
INLINE I add_pairs(I pairs, int32_t two, I sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, iset(two))); }

INLINE int32_t largest_bits(const float* x) {
  I largest = izero();
  for (int i = 0; i < kBlockInputs; i += 8)
    largest = _mm256_max_epi32(largest,
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), _mm256_set1_epi32(0x7fffffff)));
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
INLINE void round_block(const float* x, float inverse, int8_t* values, int32_t* sums) {
  for (int part = 0; part < 2; part++) {
    const I low = _mm256_cvtps_epi32(_mm256_mul_ps(vload(x + 16 * part), vset(inverse)));
    const I high = _mm256_cvtps_epi32(_mm256_mul_ps(vload(x + 16 * part + 8), vset(inverse)));
    const I words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16 * part),
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    const I sum = _mm256_add_epi32(low, high);
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    sums[part] = _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
  }
}
#include "linear_tile.h"
