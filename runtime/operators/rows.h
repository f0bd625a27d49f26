// Passes over a row of logits, for each instruction set: what rows.cpp draws from.
#pragma once
#include <stdint.h>
#include <string.h>

namespace specexport {
// exp((x - peak) * inverse) * scale; `inverse` is 1 / T.
struct Softmax {
  double peak, inverse, scale;
};

struct RowKernels {
  float (*top)(const float* x, int64_t count);  // the largest; NaN if any is
  // Sum of the weights of `count` logits, which go to `weights` unless that is null.
  double (*weigh)(const float* x, int64_t count, const Softmax& softmax, double* weights);
  // The same of max(0, q - p), where `q` and `p` are logits.
  double (*residual)(const float* q, const Softmax& of_q, const float* p, const Softmax& of_p, int64_t count, double* masses);
};
extern const RowKernels rows_portable, rows_avx2, rows_avx512;
}  // namespace specexport
