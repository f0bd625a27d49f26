// What lies between an expert's two matrices: gate * sigmoid(alpha * gate) * (up + beta), both limited on request.
#pragma once
#include "formats.h"
#include "operator.h"

namespace specexport {
enum Order : int64_t { kGatesFirst, kInTurn, kEach };  // of gates and ups; kEach: a value is both

struct Gating {
  int64_t width, order;  // how many gates, and which of `Order`
  float alpha, beta, limit;
  int64_t inputs() const { return order == kEach ? width : 2 * width; }
};
inline Status* make_gating(const KernelInfo* info, Gating& gating) {
  TRY(attribute(info, "I", 1, kMostSize / 2, gating.width));
  TRY(attribute(info, "interleaved", kGatesFirst, kEach, gating.order));
  TRY(attribute(info, "alpha", gating.alpha));
  TRY(attribute(info, "beta", gating.beta));
  return attribute(info, "limit", gating.limit);
}

// e^x for x <= 0, to 2 units in the last place; below -87 it is 0, and NaN stays NaN. No fma: compilers may take any
// vectors for it, and lanes and single values have the same bits.
inline float exp_of(float x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float turned = x * 1.44269504f + magic, n = turned - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  uint32_t bits;
  memcpy(&bits, &turned, 4);
  return x < -87.0f ? 0.0f : y * float_of_bits((bits - 0x4b400000u + 127) << 23);
}

template <Order order>
inline void gate_row(const Gating& gating, const float* both, float* out) {
  const float most = gating.limit > 0 ? gating.limit : __builtin_inff(), alpha = gating.alpha, beta = gating.beta;
  const float* ups = both + (order == kGatesFirst ? gating.width : order == kInTurn);
  for (int64_t i = 0; i < gating.width; i++) {
    float gate = both[order == kInTurn ? 2 * i : i], up = ups[order == kInTurn ? 2 * i : i];
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    const float z = alpha * gate, e = exp_of(z < 0 ? z : -z);
    out[i] = gate * ((z < 0 ? e : 1.0f) / (1.0f + e)) * (up + beta);
  }
}
inline void gate(const Gating& gating, const float* both, float* out) {
  if (gating.order == kGatesFirst) return gate_row<kGatesFirst>(gating, both, out);
  if (gating.order == kInTurn) return gate_row<kInTurn>(gating, both, out);
  gate_row<kEach>(gating, both, out);
}
}  // namespace specexport
