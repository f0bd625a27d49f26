// How packed weights lie: `specexport/passes/block_format.py` says it in full. A new format is a line of `kFormats`.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace specexport {
constexpr int kNr = 16;             // outputs of a tile
constexpr int kBlockInputs = 32;    // inputs of a block
constexpr int kPanelInputs = 1024;  // inputs of a panel
constexpr int kSuperInputs = 256;   // inputs of a super-block, which share d and dmin

enum class Scale { half, single, k_quant, power, f32, bf16, f16 };  // the last three are floats themselves, no codes
enum class OffsetKind { none, stored, zero_point, mins };

struct Format {
  const char* name;
  int bits;               // of a code
  const uint8_t* lookup;  // codes are places in this codebook
  int group;              // inputs that share a scale
  Scale scale;            // k_quant: a sub-block scale (int8) times the super-block's d (float16)
  OffsetKind offset_kind;

  bool is_float() const { return scale >= Scale::f32; }
  bool is_k_quant() const { return scale == Scale::k_quant; }
  int parts() const { return group < kBlockInputs ? 2 : 1; }  // scales of a block
  bool has_offset() const { return offset_kind != OffsetKind::none; }
  int zero_point() const { return has_offset() ? 0 : lookup ? 128 : 1 << (bits - 1); }  // the code that stands for 0
};
constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFp4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
constexpr Format kFormats[] = {
    {"f32", 32, nullptr, 1, Scale::f32, OffsetKind::none},
    {"bf16", 16, nullptr, 1, Scale::bf16, OffsetKind::none},
    {"f16", 16, nullptr, 1, Scale::f16, OffsetKind::none},
    {"int8", 8, nullptr, 32, Scale::half, OffsetKind::none},
    {"int4", 4, nullptr, 32, Scale::half, OffsetKind::none},
    {"int4_offset", 4, nullptr, 32, Scale::half, OffsetKind::stored},
    {"int5", 5, nullptr, 32, Scale::half, OffsetKind::none},
    {"int5_offset", 5, nullptr, 32, Scale::half, OffsetKind::stored},
    {"q2_k", 2, nullptr, 16, Scale::k_quant, OffsetKind::mins},
    {"q3_k", 3, nullptr, 16, Scale::k_quant, OffsetKind::none},
    {"q4_k", 4, nullptr, 32, Scale::k_quant, OffsetKind::mins},
    {"q5_k", 5, nullptr, 32, Scale::k_quant, OffsetKind::mins},
    {"q6_k", 6, nullptr, 16, Scale::k_quant, OffsetKind::none},
    {"iq4_nl", 4, kIq4, 32, Scale::half, OffsetKind::none},
    {"iq4_xs", 4, kIq4, 32, Scale::k_quant, OffsetKind::none},
    {"mxfp4", 4, kFp4, 32, Scale::power, OffsetKind::none},
};

// `group4_64_f16`, `group8_128_f32_zero`, …: bits, inputs of a group, type of scales, and what offsets are made of.
inline bool find_format(const char* name, Format& found) {
  for (const Format& format : kFormats)
    if (!strcmp(format.name, name)) return found = format, true;
  if (strncmp(name, "group", 5) || (name[5] != '4' && name[5] != '8') || name[6] != '_') return false;
  char* rest;
  const long group = strtol(name + 7, &rest, 10);
  if (group < 16 || group > kPanelInputs || (group & (group - 1))) return false;
  const bool half = !strncmp(rest, "_f16", 4);
  if (!half && strncmp(rest, "_f32", 4)) return false;
  const char* end = rest + 4;
  OffsetKind offset_kind = !*end                     ? OffsetKind::none
                           : !strcmp(end, "_offset") ? OffsetKind::stored
                                                     : OffsetKind::zero_point;
  if (offset_kind == OffsetKind::zero_point && strcmp(end, "_zero")) return false;
  found = {"group", name[5] - '0', nullptr, int(group), half ? Scale::half : Scale::single, offset_kind};
  return true;
}

// Where the arrays of a panel of `inputs` lie, in bytes from its start.
struct Panel {
  int64_t blocks, groups, super_blocks;
  size_t scales, d, offsets, dmin, codes, end;
};
inline Panel panel(const Format& format, int64_t inputs) {
  const int number = format.scale == Scale::half ? 2 : format.scale == Scale::single ? 4 : 1;
  const int offset_kind = format.offset_kind == OffsetKind::none     ? 0
                          : format.offset_kind == OffsetKind::stored ? number
                                                                     : 1;
  Panel s = {};
  s.blocks = (inputs + kBlockInputs - 1) / kBlockInputs;
  s.groups = (inputs + format.group - 1) / format.group;
  s.super_blocks = (inputs + kSuperInputs - 1) / kSuperInputs;
  s.d = size_t(s.groups) * kNr * number;
  s.offsets = s.d + (format.scale == Scale::k_quant ? size_t(s.super_blocks) * kNr * 2 : 0);
  s.dmin = s.offsets + size_t(s.groups) * kNr * offset_kind;
  s.codes = s.dmin + (format.offset_kind == OffsetKind::mins ? size_t(s.super_blocks) * kNr * 2 : 0);
  s.codes = (s.codes + 63) / 64 * 64;
  s.end = s.codes + size_t(s.blocks) * 64 * format.bits;
  return s;
}

// A weight [N, K] of a format.
struct Layout {
  Format format;
  int64_t N, K, blocks, tiles;
  size_t tile_bytes;
  Panel whole, last;  // of 1024 inputs, and of what is left

  int64_t super_blocks() const { return (K + kSuperInputs - 1) / kSuperInputs; }
  void make(const Format& chosen, int64_t n, int64_t k) {
    format = chosen, N = n, K = k;
    blocks = (K + kBlockInputs - 1) / kBlockInputs;
    tiles = (N + kNr - 1) / kNr;
    if (format.is_float()) {
      tile_bytes = (size_t(K) * kNr * (format.bits / 8) + 63) / 64 * 64;
    } else {
      whole = panel(format, kPanelInputs), last = panel(format, K % kPanelInputs);
      tile_bytes = size_t(K / kPanelInputs) * whole.end + last.end;
    }
  }
};

inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) {
    const float value = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  return float_of_bits(sign | (exponent == 31 ? 0xffu << 23 : (exponent + 112) << 23) | fraction << 13);
}
inline float power_of(uint32_t e) { return 0.5f * float_of_bits(e << 23 | uint32_t(e == 0) << 22); }  // 2^(e - 128)
inline float load_half(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return half_to_float(half);
}
inline float load_single(const uint8_t* p) {
  float value;
  memcpy(&value, p, 4);
  return value;
}
}  // namespace specexport
