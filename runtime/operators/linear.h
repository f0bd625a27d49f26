// What instruction sets implement: products of rows with tiles of a packed weight.
#pragma once
#include "formats.h"

namespace specexport {
// Rows of activations, and what they are multiplied with. Kernels take rows in groups of `capacity`, the last of which
// may be smaller; `arranged` has them group by group, so that what a kernel reads together lies together:
//
//   codes   [groups, blocks, capacity] slots of int8 [32], float32 scale, and a share for each part of a block, which
//           corrects for what codes lie above their values: int32 -zero * sum, or float32 scale * sum
//   floats  [groups, K, capacity] float32
struct Product {
  Layout layout;
  const uint8_t* weight;
  const float* bias;  // or null
  const float* x;     // [T, K]
  float* out;         // [T, N]
  uint8_t* arranged;
  int64_t rows, capacity, groups;  // T

  size_t slot_bytes() const { return layout.format.slot_bytes(); }
  size_t group_bytes() const { return size_t(capacity) * layout.row_bytes(); }
  void cut(int64_t most) {  // its rows into groups of much the same size
    groups = (rows + most - 1) / most;
    capacity = (rows + groups - 1) / groups;
  }
};

struct Kernels {
  int64_t most;  // rows of a group
  int64_t many;  // rows of a group of codes, where there are so many rows at least; 0: it makes no difference
  void (*arrange)(const Product&, int64_t first_group, int64_t last_group);
  // Some tiles for some groups. `work` has work_bytes of their rows.
  void (*multiply)(const Product&, int64_t first_tile, int64_t last_tile, int64_t first_group, int64_t last_group,
                   void* work);

  int64_t most_of(const Layout& layout, int64_t rows) const {
    return many && rows >= many && !layout.format.is_float() ? many : most;
  }
};
constexpr int kMostSums = 2;  // chains of a float sum
inline size_t work_bytes(int64_t rows) { return 4 * kTile * (size_t(rows) * kMostSums + 2 * 2 * kStretch / kBlock); }

const Kernels& kernels();  // of this processor
// Some tiles for some groups; false if there is no memory.
bool multiply_tiles(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first_group, int64_t last_group);
extern const Kernels portable_kernels, avx2_kernels, avxvnni_kernels, avx512_kernels, amx_kernels, neon_kernels;
}  // namespace specexport
