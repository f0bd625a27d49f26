// A unit of tiles in plain C++, for kernels that need one: see runtime/operators/linear_amx.h.
#pragma once
#include <stdlib.h>

#include "../../runtime/operators/linear.h"

namespace specexport {
namespace {  // each file compiles it for its own processor
struct EmulatedTiles {
  static int& rows() {
    static thread_local int rows = 0;
    return rows;
  }
  static void begin(int new_rows) {
    if (rows() || new_rows < 1 || new_rows > 16) abort();
    rows() = new_rows;
  }
  static void end() { rows() = 0; }
  template <int n>
  static void product(const uint8_t* a, size_t stride, const uint8_t* b, int32_t* out) {
    if (!rows()) abort();
    for (int m = 0; m < rows(); m++)
      for (int i = 0; i < 16; i++) {
        int32_t sum = 0;
        for (int k = 0; k < 32; k++) sum += int8_t(a[m * stride + k]) * b[k / 4 * 64 + 4 * i + k % 4];
        out[16 * m + i] = sum;
      }
  }
};
}  // namespace
extern const LinearKernels tiles_and_portable, tiles_and_avx512;
bool the_check_knows_right_units();
}  // namespace specexport
