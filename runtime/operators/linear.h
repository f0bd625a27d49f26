// What instruction sets implement: products of rows with tiles of a packed weight.
#pragma once
#include "formats.h"

namespace specexport {
// Rows of activations, and what they are multiplied with: arguments of a GEMM. Kernels take rows in groups of
// `capacity`, the last of which may be smaller; `packed_rows` has them group by group, so that what a kernel reads
// together lies together: floats are [groups, K, capacity] float32, codes [groups, super-blocks, capacity] slots of 256
// activations.
//
// One arithmetic for all instruction sets, so that they have the same bits (docstring of block_format.py). A sum of
// codes is one of integers, in any order; what follows it is rounded in one order, over blocks and in a block over its
// parts. S, T are int32, `fma` rounds once:
//
//   K-quants  activation = unit * k * code, with one unit for 256 and k from 1 to 16 for 32 of them:
//             S = sum of sub-block scale * k * (weight's code - zero) * code, T = sum of min * k * code, over 256
//             out = fma(S * d, unit, out), or fma(fma(T, dmin, S * d), unit, out)
//   others    activation = scale * code, for 32 of them: S = sum of (weight's code - zero) * code over a block's part
//             out = fma(S, weight's scale * scale, out), then out = fma(offset, scale * sum of codes, out)
constexpr size_t kSlotScales = 256;        // float32 [8] after the codes
constexpr size_t kSlotCompensation = 288;  // int32 [8, parts], zero-point compensation: what S begins with;
                                           // then, for offsets, float32 [8, parts]: scale * sum of codes
constexpr size_t kSlotFactors = 256;       // of K-quants: int32 [8]: k, in both halves where products are of pairs
constexpr size_t kSlotUnit = 288;          // float32
constexpr size_t kSlotSums = 292;  // int16 [8, 2]: k * sum of 16 codes, at most 16 * 16 * 127 < 2^15. Or, where there
                                   // are no mins and products are of quads, what S begins with, as above
constexpr size_t slot_bytes(bool k_quant, int parts, bool has_offset) {
  const size_t starts = 32 * size_t(parts);
  return ((k_quant         ? kSlotSums + starts
              : has_offset ? kSlotCompensation + 2 * starts
                           : kSlotCompensation + starts) +
             31) /
         32 * 32;
}

inline size_t slot_bytes(const Format& f) { return slot_bytes(f.is_k_quant(), f.parts(), f.has_offset()); }
inline size_t row_bytes(const Layout& layout) {  // packed
  return layout.format.is_float() ? 4 * size_t(layout.K) : size_t(layout.super_blocks()) * slot_bytes(layout.format);
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
  void split(int64_t most) {  // its rows into groups of much the same size
    groups = (rows + most - 1) / most;
    capacity = (rows + groups - 1) / groups;
  }
};

struct LinearKernels {
  int64_t mr, mr_floats;  // rows of a group: of codes, of floats
  void (*pack)(const Product&, int64_t first_group, int64_t last_group);
  // Some tiles for some groups. `work` has work_bytes of their rows.
  void (*multiply)(
      const Product&, int64_t first_tile, int64_t last_tile, int64_t first_group, int64_t last_group, void* work);
  int64_t unit_mr = 0, unit_from = 0;  // of codes, where there are `unit_from` rows or more; 0: never

  int64_t group_rows(const Layout& layout, int64_t rows) const {
    if (layout.format.is_float()) return mr_floats;
    return unit_mr && rows >= unit_from && layout.format.parts() == 1 ? unit_mr : mr;
  }
};
// Weights of a part that a thread claims, 2 us of a read at 31 GB/s, where to divide costs 1 us; and the most parts.
constexpr size_t kPartBytes = 64 << 10, kMaxParts = 32;
constexpr int kMaxChains = 2;  // chains of a float sum
inline size_t work_bytes(int64_t rows) {
  return 4 * kNr * (size_t(rows) * kMaxChains + 2 * 2 * kPanelInputs / kBlockInputs);
}

// Some tiles for some groups; false if there is no memory.
bool multiply_tiles(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first_group, int64_t last_group);
extern const LinearKernels linear_portable, linear_avx2, linear_avxvnni, linear_avx512, linear_amx, linear_neon;
}  // namespace specexport
