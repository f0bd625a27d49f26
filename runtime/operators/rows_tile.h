// Passes over a row of logits in vectors of LANES doubles. Included once an instruction set, with TARGET (the attribute
// of its functions) and FMA(a, b, c) defined; KERNELS is what it defines.
#define INLINE TARGET static inline __attribute__((always_inline))
#include "exp.h"

namespace specexport {
namespace {
typedef double V __attribute__((vector_size(LANES * 8)));
typedef int64_t I __attribute__((vector_size(LANES * 8)));
typedef uint64_t U __attribute__((vector_size(LANES * 8)));  // where what is not used may wrap
typedef float F __attribute__((vector_size(LANES * 4)));

INLINE V masses_of(const float* x, const Softmax& softmax) {
  F loaded;
  memcpy(&loaded, x, sizeof loaded);
  return exp_of<ExpDouble, U>((__builtin_convertvector(loaded, V) - softmax.peak) * softmax.inverse) * softmax.scale;
}

INLINE double total(V value) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += value[i];
  return sum;
}

TARGET float largest(const float* x, int64_t count) {
  F peak = F{} - __builtin_inff();
  decltype(peak == peak) nan = peak != peak;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    F loaded;
    memcpy(&loaded, x + i, sizeof loaded);
    nan |= loaded != loaded;
    peak = loaded > peak ? loaded : peak;
  }
  float found = -__builtin_inff();
  bool has_nan = false;
  for (int lane = 0; lane < LANES; lane++) {
    has_nan |= nan[lane] != 0;
    found = peak[lane] > found ? peak[lane] : found;
  }
  for (; i < count; i++) {
    has_nan |= x[i] != x[i];
    found = x[i] > found ? x[i] : found;
  }
  return has_nan ? __builtin_nanf("") : found;
}

// The last logits of a row, and -inf after them: what has no mass.
struct Rest {
  float x[LANES];
  Rest(const float* from, int64_t count) {
    for (int64_t i = 0; i < LANES; i++) x[i] = i < count ? from[i] : -__builtin_inff();
  }
};

// Sum of what `mass_at(place)` gives for each vector; those after the last whole one are of `rest`.
template <bool kStores, class Mass, class Last>
INLINE double over(int64_t count, double* out, Mass mass, Last last) {
  V sum = V{}, other = V{};
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    const V one = mass(i), two = mass(i + LANES);
    if (kStores) memcpy(out + i, &one, sizeof one), memcpy(out + i + LANES, &two, sizeof two);
    sum += one, other += two;
  }
  for (; i < count; i += LANES) {
    const bool is_whole = i + LANES <= count;
    const V each = is_whole ? mass(i) : last(i);
    if (kStores) memcpy(out + i, &each, size_t(is_whole ? LANES : count - i) * sizeof(double));
    sum += each;
  }
  return total(sum + other);
}

template <bool kStores>
INLINE double sum_as(const float* x, int64_t count, const Softmax& softmax, double* masses) {
  return over<kStores>(
      count, masses, [&](int64_t i) TARGET { return masses_of(x + i, softmax); },
      [&](int64_t i) TARGET { return masses_of(Rest(x + i, count - i).x, softmax); });
}

INLINE V above(V q, V p) {
  const V left = q - p;
  return (V)((I)left & (I)(left > V{}));
}

template <bool kStores>
INLINE double residual_as(
    const float* q, const Softmax& of_q, const float* p, const Softmax& of_p, int64_t count, double* masses) {
  return over<kStores>(
      count, masses, [&](int64_t i) TARGET { return above(masses_of(q + i, of_q), masses_of(p + i, of_p)); },
      [&](int64_t i) TARGET {
        return above(masses_of(Rest(q + i, count - i).x, of_q), masses_of(Rest(p + i, count - i).x, of_p));
      });
}

TARGET double sum(const float* x, int64_t count, const Softmax& softmax, double* masses) {
  return masses ? sum_as<true>(x, count, softmax, masses) : sum_as<false>(x, count, softmax, nullptr);
}

TARGET double residual(
    const float* q, const Softmax& of_q, const float* p, const Softmax& of_p, int64_t count, double* masses) {
  return masses ? residual_as<true>(q, of_q, p, of_p, count, masses)
                : residual_as<false>(q, of_q, p, of_p, count, nullptr);
}
}  // namespace

extern const RowKernels KERNELS = {largest, sum, residual};
}  // namespace specexport
