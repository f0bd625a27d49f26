// What lies between an expert's two matrices: gate * sigmoid(alpha * gate) * (up + beta), both limited on request.
#pragma once
#include "formats.h"
#include "operator.h"

#define INLINE static inline
#define FMA(a, b, c) ((a) * (b) + (c))  // compilers may take any vectors for it
#include "exp.h"

namespace specexport {
enum Order : int64_t { kGatesFirst, kInTurn, kEach };  // of gates and ups; kEach: a value is both

struct Gating {
  int64_t width, order;  // how many gates, and which of `Order`
  float alpha, beta, limit;
  int64_t inputs() const { return order == kEach ? width : 2 * width; }
};
inline Status* make_gating(const KernelInfo* info, Gating& gating) {
  TRY(attribute(info, "I", 1, kMaxSize / 2, gating.width));
  TRY(attribute(info, "interleaved", kGatesFirst, kEach, gating.order));
  TRY(attribute(info, "alpha", gating.alpha));
  TRY(attribute(info, "beta", gating.beta));
  return attribute(info, "limit", gating.limit);
}

template <Order order>
inline void gate_row(const Gating& gating, const float* both, float* out) {
  const float most = gating.limit > 0 ? gating.limit : __builtin_inff(), alpha = gating.alpha, beta = gating.beta;
  const float* ups = both + (order == kGatesFirst ? gating.width : order == kInTurn);
  for (int64_t i = 0; i < gating.width; i++) {
    float gate = both[order == kInTurn ? 2 * i : i], up = ups[order == kInTurn ? 2 * i : i];
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    const float z = alpha * gate, e = exp_of<ExpFloat, uint32_t>(z < 0 ? z : -z);
    out[i] = gate * ((z < 0 ? e : 1.0f) / (1.0f + e)) * (up + beta);
  }
}
inline void gate(const Gating& gating, const float* both, float* out) {
  if (gating.order == kGatesFirst) return gate_row<kGatesFirst>(gating, both, out);
  if (gating.order == kInTurn) return gate_row<kInTurn>(gating, both, out);
  gate_row<kEach>(gating, both, out);
}
}  // namespace specexport
