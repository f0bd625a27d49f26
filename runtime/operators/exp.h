// e^x for x <= 0 of floats or doubles, one or a vector of them; NaN stays NaN. INLINE and FMA(a, b, c) are of who
// includes it: without a fused FMA a vector's lanes and single values have the same bits.
#pragma once
#include <stdint.h>
#include <string.h>

namespace specexport {
namespace {
struct ExpFloat {                               // to 2 units in the last place; below -87 it is 0
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  static constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kLowest = -87.0f;
  static constexpr float kTerms[] = {
      1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  static constexpr uint32_t kMagicBits = 0x4b400000, kBias = 127;
  static constexpr int kMantissaBits = 23;
};
struct ExpDouble {                                      // within 2e-16 of it; below -708 it is 0
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2e = 1.4426950408889634, kLowest = -708.0;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  // Taylor's series from x^12 / 12! down, for |x| <= ln 2 / 2.
  static constexpr double kTerms[] = {2.08767569878681e-09, 2.505210838544172e-08, 2.755731922398589e-07,
      2.7557319223985893e-06, 2.48015873015873e-05, 1.984126984126984e-04, 1.388888888888889e-03, 8.333333333333333e-03,
      4.1666666666666664e-02, 1.6666666666666666e-01, 0.5};
  static constexpr uint64_t kMagicBits = 0x4338000000000000, kBias = 1023;
  static constexpr int kMantissaBits = 52;
};

// Of V, whose bits are unsigned integers U.
template <class E, class U, class V>
INLINE V exp_of(V x) {
  const V magic = V{} + E::kMagic, rounded = FMA(x, V{} + E::kLog2e, magic), whole = rounded - magic;
  V rest = FMA(whole, V{} - E::kLn2High, x);  // whole * ln 2 in two parts, the first of them exact
  rest = FMA(whole, V{} - E::kLn2Low, rest);
  V sum = V{} + E::kTerms[0];
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof E::kTerms / sizeof *E::kTerms; i++) sum = FMA(sum, rest, V{} + E::kTerms[i]);
  sum = FMA(sum, rest * rest, rest) + 1;
  U bits;
  memcpy(&bits, &rounded, sizeof bits);
  bits = (bits - E::kMagicBits + E::kBias) << E::kMantissaBits;
  V power;
  memcpy(&power, &bits, sizeof power);
  return x < V{} + E::kLowest ? V{} : sum * power;
}
}  // namespace
}  // namespace specexport
