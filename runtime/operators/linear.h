// What instruction sets implement: products of rows with tiles of a packed weight.
#pragma once
#include "formats.h"

namespace specexport {
// Rows of activations, and what they are multiplied with. Kernels take rows in groups of `capacity`, the last of which
// may be smaller; `packed_rows` has them group by group, so that what a kernel reads together lies together: floats are
// [groups, K, capacity] float32, codes [groups, supers, capacity] slots of 256 activations.
//
// One arithmetic for all instruction sets, so that they have the same bits (docstring of block_format.py). A sum of
// codes is one of integers, in any order; what follows it is rounded in one order, over blocks and in a block over its
// parts. S, T are int32, `fma` rounds once:
//
//   levels  activation = unit * k * code, with one unit for 256 and k from 1 to 16 for 32 of them:
//           S = sum of level * k * (weight's code - zero) * code, T = sum of minimum * k * code, over 256 inputs
//           out = fma(S * base, unit, out), or fma(fma(T, least, S * base), unit, out)
//   others  activation = scale * code, for 32 of them: S = sum of (weight's code - zero) * code over a block's part
//           out = fma(S, weight's scale * scale, out), then out = fma(offset, scale * sum of codes, out)
constexpr size_t kScales = 256;   // float32 [8] behind the codes
constexpr size_t kStarts = 288;   // int32 [8, parts]: what S begins with, for codes that lie above their values;
                                  // then, for offsets, float32 [8, parts]: scale * sum of codes
constexpr size_t kFactors = 256;  // of levels: int32 [8]: k, and where products are of pairs the same in both halves
constexpr size_t kUnit = 288;     // float32
constexpr size_t kSums = 292;     // int16 [8, 2]: k * sum of 16 codes, at most 16 * 16 * 127 < 2^15. Or, where there
                                  // are no minima and products are of quads, what S begins with, as above
constexpr size_t slot_bytes(bool level, int parts, bool shifted) {
  const size_t starts = 32 * size_t(parts);
  return ((level ? kSums + starts : shifted ? kStarts + 2 * starts : kStarts + starts) + 31) / 32 * 32;
}

inline size_t slot_bytes(const Format& f) { return slot_bytes(f.is_level(), f.parts(), f.shifted()); }
inline size_t row_bytes(const Layout& layout) {  // packed
  return layout.format.is_float() ? 4 * size_t(layout.K) : size_t(layout.supers()) * slot_bytes(layout.format);
}
struct Product {
  Layout layout;
  const uint8_t* weight;
  const float* bias;  // or null
  const float* x;     // [T, K]
  float* out;         // [T, N]
  uint8_t* packed_rows;
  int64_t rows, capacity, groups;  // T

  size_t group_bytes() const { return size_t(capacity) * row_bytes(layout); }
  void cut(int64_t most) {  // its rows into groups of much the same size
    groups = (rows + most - 1) / most;
    capacity = (rows + groups - 1) / groups;
  }
};

struct Kernels {
  int64_t most, most_floats;  // rows of a group: of codes, of floats
  void (*pack)(const Product&, int64_t first_group, int64_t last_group);
  // Some tiles for some groups. `work` has work_bytes of their rows.
  void (*multiply)(const Product&, int64_t first_tile, int64_t last_tile, int64_t first_group, int64_t last_group,
                   void* work);
  int64_t many = 0, many_from = 0;  // rows of a group of codes where there are so many rows at least; 0: there are none

  int64_t most_of(const Layout& layout, int64_t rows) const {
    if (layout.format.is_float()) return most_floats;
    return many && rows >= many_from && layout.format.parts() == 1 ? many : most;
  }
};
constexpr int kMostSums = 2;  // chains of a float sum
inline size_t work_bytes(int64_t rows) { return 4 * kNr * (size_t(rows) * kMostSums + 2 * 2 * kPanel / kBlock); }

const Kernels& kernels();  // of this processor
// Some tiles for some groups; false if there is no memory.
bool multiply_tiles(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first_group, int64_t last_group);
extern const Kernels portable_kernels, avx2_kernels, avxvnni_kernels, avx512_kernels, amx_kernels, neon_kernels;
}  // namespace specexport
