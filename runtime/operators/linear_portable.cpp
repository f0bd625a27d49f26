// Plain C++ for every processor; four outputs at a time, so that compilers can use what vectors there are.
#include <math.h>

#include "linear.h"

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL
#define PLAIN

namespace specexport {
namespace portable {
// Codes are unpacked to memory, not registers: two rows share them.
constexpr int kLanes = 4, kMr = 2, kMrFloats = 2, kAhead = 0;
constexpr bool kSigned = false, kPairs = false;
typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t W __attribute__((vector_size(16)));
typedef uint8_t U __attribute__((vector_size(16)));

template <class T>
INLINE T load(const void* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}
INLINE V vload(const float* p) { return load<V>(p); }
INLINE void vstore(float* p, V v) { memcpy(p, &v, sizeof v); }
INLINE V vset(float x) { return V{x, x, x, x}; }
INLINE V vmul(V a, V b) { return a * b; }
// Rounded once, which processors without FMA do in doubles: the sum's last bit says whether anything was cut off.
INLINE float fma_of(float a, float b, float c) {
#if defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  const double product = double(a) * b;
  double sum = product + c;
  const double back = sum - product, lost = (product - (sum - back)) + (c - back);
  int64_t bits;
  memcpy(&bits, &sum, 8);
  if ((lost > 0 || lost < 0) && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  memcpy(&sum, &bits, 8);
  return float(sum);
#endif
}
INLINE V vfma(V a, V b, V c) {
  return V{fma_of(a[0], b[0], c[0]), fma_of(a[1], b[1], c[1]), fma_of(a[2], b[2], c[2]), fma_of(a[3], b[3], c[3])};
}
INLINE V vmadd(V a, V b, V c) {  // of float weights, for each of which rounding once would take ten operations
#if defined(__aarch64__)
  return vfma(a, b, c);
#else
  return a * b + c;
#endif
}
INLINE I izero() { return I{}; }
INLINE I iset(int32_t x) { return I{x, x, x, x}; }
INLINE I iadd(I a, I b) { return a + b; }
INLINE V to_float(I a) { return V{float(a[0]), float(a[1]), float(a[2]), float(a[3])}; }
INLINE U uload(const uint8_t* p) { return load<U>(p); }
INLINE U uand(U a, int mask) { return a & uint8_t(mask); }
INLINE U uxor(U a, int mask) { return a ^ uint8_t(mask); }
INLINE U uor(U a, U b) { return a | b; }
template <int n>
INLINE U ushl(U a) {
  return a << uint8_t(n);
}
template <int n>
INLINE U ushr(U a) {
  return a >> uint8_t(n);
}
INLINE U ulookup(const uint8_t* lut, U a) {
  for (int i = 0; i < 16; i++) a[i] = lut[a[i]];
  return a;
}
INLINE void prefetch(const uint8_t*) {}

template <int bits>
INLINE I dot(I sum, const U* u, const int8_t* values) {
  uint8_t codes[4][16];  // not elements of vectors, which compilers write to memory one by one
  int32_t sums[4];
  memcpy(codes, u, sizeof codes), memcpy(sums, &sum, sizeof sums);
  for (int q = 0; q < 4; q++)
    for (int i = 0; i < 16; i++) sums[i / 4] += codes[q][i] * values[4 * q + i % 4];
  return load<I>(sums);
}
INLINE V load_halves(const uint8_t* p) { return V{load_half(p), load_half(p + 2), load_half(p + 4), load_half(p + 6)}; }
INLINE V load_bf16(const uint8_t* p) {
  V v;
  for (int i = 0; i < 4; i++) v[i] = float_of_bits(uint32_t(load<uint16_t>(p + 2 * i)) << 16);
  return v;
}
INLINE I load_int8(const uint8_t* p) { return I{int8_t(p[0]), int8_t(p[1]), int8_t(p[2]), int8_t(p[3])}; }
INLINE I load_uint8(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
INLINE I imadd(I a, I b, I sum) { return I(W(sum) + W(a) * W(b)); }
INLINE I iscaled(I scale, I k) { return scale * k; }
INLINE I ipair(I even, I odd) { return I(W(even) & 0xffff) | I(W(odd) << 16); }
INLINE I add_pairs(I pairs, int32_t two, I sum) {
  return imadd(pairs >> 16, iset(two >> 16), imadd(I(W(pairs) << 16) >> 16, iset(int16_t(two)), sum));
}

INLINE int32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlockInputs; i++) {
    const int32_t bits = load<int32_t>(x + i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
INLINE void round_block(const float* x, float inverse, int8_t* values, int32_t* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < kBlockInputs; i++) {
    const int32_t rounded = int32_t(lrintf(x[i] * inverse));
    values[i] = int8_t(rounded);
    sums[i / 16] += rounded;
  }
}
template <class T>
INLINE void pin(T&) {}
#include "linear_tile.h"
}  // namespace portable
const LinearKernels linear_portable = {portable::kMr, portable::kMrFloats, portable::pack, portable::multiply};
}  // namespace specexport
