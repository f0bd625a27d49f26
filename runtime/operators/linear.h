// What instruction sets implement: products of rows with tiles of a packed weight.
#pragma once
#include "formats.h"

namespace specexport {
// Rows of activations and what they are multiplied with. Codes' activations are int8, with a scale a block of 32;
// `shares` corrects for what codes lie above their values: int32 -zero * sum of a part, or float scale * sum of it.
struct Product {
  Layout layout;
  const uint8_t* weight;
  const float* bias;  // or null
  const float* x;     // [T, K]
  float* out;         // [T, N]
  int8_t* values;     // [T, blocks * 32]
  float* scales;      // [T, blocks]
  int32_t* shares;    // [T, blocks, parts]
};

struct Kernels {
  void (*quantize)(const Product&, int64_t first_row, int64_t last_row);
  // Some tiles for some rows. `work` has room for work_bytes of so many rows.
  void (*multiply)(const Product&, int64_t first_tile, int64_t last_tile, int64_t first_row, int64_t last_row, void* work);
};
constexpr int kMostSums = 2;  // chains of a float sum
inline size_t work_bytes(int64_t rows) { return 4 * kTile * (size_t(rows) * kMostSums + 2 * 2 * kStretch / kBlock); }

const Kernels& kernels();  // of this processor
extern const Kernels portable_kernels, avx2_kernels, avxvnni_kernels, avx512_kernels, neon_kernels;
}  // namespace specexport
