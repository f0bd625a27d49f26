// Plain C++ for every processor; four outputs at a time, so that compilers can use what vectors there are.
#include <math.h>

#include "linear.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL

namespace specexport {
namespace portable {
constexpr int kLanes = 4, kMost = 2, kAhead = 0, kTurn = 32;
constexpr bool kSigned = false;
typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
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
INLINE V vfma(V a, V b, V c) { return a * b + c; }
INLINE I izero() { return I{}; }
INLINE I iset(int32_t x) { return I{x, x, x, x}; }
INLINE I iadd(I a, I b) { return a + b; }
INLINE V to_float(I a) { return V{float(a[0]), float(a[1]), float(a[2]), float(a[3])}; }
INLINE U uload(const uint8_t* p) { return load<U>(p); }
INLINE U uand(U a, int mask) { return a & uint8_t(mask); }
INLINE U uxor(U a, int mask) { return a ^ uint8_t(mask); }
INLINE U uor(U a, U b) { return a | b; }
template <int n>
INLINE U ushl(U a) { return a << uint8_t(n); }
template <int n>
INLINE U ushr(U a) { return a >> uint8_t(n); }
INLINE U ulookup(const uint8_t* book, U a) {
  for (int i = 0; i < 16; i++) a[i] = book[a[i]];
  return a;
}
INLINE void prefetch(const uint8_t*) {}

template <int bits>
INLINE I dot(I sum, const U* u, const int8_t* values) {
  for (int q = 0; q < 4; q++)
    for (int i = 0; i < 16; i++) sum[i / 4] += u[q][i] * values[4 * q + i % 4];
  return sum;
}
INLINE V load_halves(const uint8_t* p) { return V{load_half(p), load_half(p + 2), load_half(p + 4), load_half(p + 6)}; }
INLINE V load_bf16(const uint8_t* p) {
  V v;
  for (int i = 0; i < 4; i++) v[i] = float_of_bits(uint32_t(load<uint16_t>(p + 2 * i)) << 16);
  return v;
}
INLINE V load_levels(const uint8_t* p) {
  return V{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))};
}
INLINE V load_bytes(const uint8_t* p) { return V{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }

INLINE int32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlock; i++) {
    const int32_t bits = load<int32_t>(x + i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
INLINE void round_block(const float* x, float inverse, int8_t* values, int32_t* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < kBlock; i++) {
    const int32_t rounded = int32_t(lrintf(x[i] * inverse));
    values[i] = int8_t(rounded);
    sums[i / 16] += rounded;
  }
}
#include "linear_tile.h"
}  // namespace portable
const Kernels portable_kernels = {portable::kMost, 0, portable::arrange, portable::multiply};
}  // namespace specexport
