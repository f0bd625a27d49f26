// The products, in terms of an instruction set's own vectors: included by each file of one, inside its namespace.
//
// V are floats, I are int32 of kLanes outputs; U are the bytes of a line for these outputs. A row's sum is taken in one
// order, whatever rows stand beside it: over blocks, and in a block over its parts.

constexpr int kSlices = kNr / kLanes;
constexpr int kLookup = 0;  // stands for the codebook where bits are asked for

// Codes of one block, from unsigned planes of lines; signed ones where the products want them (8 bits, codebook).
template <int from, int to>
INLINE U field(U line, int mask) {
  if constexpr (from > to) return uand(ushr<from - to>(line), mask);
  if constexpr (from < to) return uand(ushl<to - from>(line), mask);
  return uand(line, mask);
}
template <int bits, int q>
INLINE U unpack_quad(const uint8_t* p, const uint8_t* lut) {
  if constexpr (bits == 8) return kSigned ? uxor(uload(p + 64 * q), 0x80) : uload(p + 64 * q);
  U code = uload(p);
  if constexpr (bits == kLookup || bits >= 4) {
    const U line = uload(p + 64 * (q % 4));
    code = uand(q < 4 ? line : ushr<4>(line), 15);
    p += 256;
  }
  if constexpr (bits == kLookup) return ulookup(lut, code);
  if constexpr (bits == 6) code = uor(code, field<q / 2 * 2, 4>(uload(p + 64 * (q % 2)), 0x30));
  if constexpr (bits == 2 || bits == 3) {
    code = field<q / 2 * 2, 0>(uload(p + 64 * (q % 2)), 3);
    p += 128;
  }
  if constexpr (bits == 3 || bits == 5) code = uor(code, field<q, bits - 1>(uload(p), 1 << (bits - 1)));
  return code;
}
template <int bits, int q = 0>
INLINE void unpack(const uint8_t* p, const uint8_t* lut, U* u) {
  u[q] = unpack_quad<bits, q>(p, lut);
  if constexpr (q < 7) unpack<bits, q + 1>(p, lut, u);
}

// Whether sums of codes begin with a compensation: see put_compensation.
template <int bits, bool has_offset>
constexpr bool kCompensates = !has_offset || (kSigned && bits == 8);

// What a call of a kernel gets: a panel of a tile, and some rows from its first block on.
struct Part {
  const uint8_t *head, *codes;  // of the panel
  const Panel& s;
  const float *scales, *offsets;  // [blocks, parts, 16], of formats without super-blocks
  const uint8_t* slots;
  size_t stride;  // bytes of 256 inputs' slots
  float* sums;    // [rows, 16], added to
  const uint8_t* lut;
};

INLINE int32_t int_at(const uint8_t* p) {
  int32_t value;
  memcpy(&value, p, 4);
  return value;
}
// Two numbers of each output for each of 8 blocks: sub-block scales or mins of both parts, or that of the only one
// twice.
template <int parts>
INLINE void load_pairs(const uint8_t* p, int64_t blocks, bool is_signed, I* pairs) {
  UNROLL for (int b = 0; b < 8; b++, p += kNr * parts) {
    pairs[b] = izero();
    if (b >= blocks) continue;
    const uint8_t* odd = p + kNr * (parts - 1);
    pairs[b] = ipair(is_signed ? load_int8(p) : load_uint8(p), is_signed ? load_int8(odd) : load_uint8(odd));
  }
}
INLINE I add_up_pairs(const I* pairs, const uint8_t* slot) {
  I sum = izero();
  UNROLL for (int b = 0; b < 8; b++) sum = add_pairs(pairs[b], int_at(slot + kSlotSums + 4 * b), sum);
  return sum;
}
// What becomes of the integers of 256 inputs.
template <int parts, bool has_mins>
struct Finish {
  V d, dmin;
  I pairs[8];
  MEMBER Finish(const Part& p, int64_t super_block, int column) {
    const int64_t at = super_block * kNr + column;
    d = load_halves(p.head + p.s.d + 2 * at);
    if constexpr (has_mins) {
      dmin = load_halves(p.head + p.s.dmin + 2 * at);
      load_pairs<parts>(
          p.head + p.s.offsets + super_block * 8 * parts * kNr + column, p.s.blocks - super_block * 8, false, pairs);
    }
  }
  MEMBER void add(I sum, const uint8_t* slot, float* to) const {
    V found = vmul(to_float(sum), d);
    if constexpr (has_mins) found = vfma(to_float(add_up_pairs(pairs, slot)), dmin, found);
    vstore(to, vfma(found, vset(load_single(slot + kSlotUnit)), vload(to)));
  }
};
#if defined(WITH_PAIRS)
#include "linear_pairs.h"
#else
// Products of quads, four codes of an output with four activations. The slices of a tile take turns over 256 inputs.
template <int bits, int parts, bool has_offset, bool k_quant, int M>
static void multiply_rows(const Part& p) {
  constexpr int lines = bits == kLookup ? 4 : bits;
  constexpr size_t slot = slot_bytes(k_quant, parts, has_offset);
  constexpr bool compensates = k_quant ? !has_offset : kCompensates<bits, has_offset>;
  V total[M];
  for (int64_t super_block = 0; super_block < p.s.super_blocks; super_block++) {
    const int64_t from = super_block * 8, blocks = p.s.blocks - from < 8 ? p.s.blocks - from : 8;
    const uint8_t* slots = p.slots + p.stride * size_t(super_block);
    for (int slice = 0; slice < kSlices; slice++) {
      const int column = slice * kLanes;
      I whole[M];
      UNROLL for (int m = 0; m < M; m++) {
        if (k_quant) whole[m] = izero();
        else if (kSlices > 1 || super_block == 0) total[m] = vload(p.sums + kNr * m + column);
      }
      for (int64_t b = 0; b < blocks; b++) {
        const uint8_t* line = p.codes + 64 * lines * (from + b);
        const int64_t at = (from + b) * parts * kNr + column;
        UNROLL for (int i = 0; i < (lines + kSlices - 1) / kSlices; i++)
            prefetch(line + kAhead + 64 * (slice + kSlices * i));
        U u[8];
        unpack<bits>(line + 4 * column, p.lut, u);
        UNROLL for (int m = 0; m < M; m++) {
          const uint8_t *row = slots + slot * m,
                        *start = row + (k_quant ? kSlotSums : kSlotCompensation) + 4 * parts * b;
          const int8_t* values = reinterpret_cast<const int8_t*>(row + 32 * b);
          I sums[2] = {dot<bits>(compensates ? iset(int_at(start)) : izero(), u, values)};
          if (parts == 2) sums[1] = dot<bits>(compensates ? iset(int_at(start + 4)) : izero(), u + 4, values + 16);
          else if (M < 3) sums[0] = iadd(sums[0], dot<bits>(izero(), u + 4, values + 16));  // chains of half the length
          else sums[0] = dot<bits>(sums[0], u + 4, values + 16);
          if constexpr (k_quant) {
            const I k = iset(int_at(row + kSlotFactors + 4 * b));
            UNROLL for (int i = parts - 1; i >= 0; i--) whole[m] =
                imadd(sums[i], iscaled(load_int8(p.head + at + i * kNr), k), whole[m]);
            if constexpr (kLanes == 8 && bits == 4 && (M == 4 || M > 6)) pin(whole[m]);  // 0.84, 0.97 (Zen 5)
          } else {
            const V scale = vset(load_single(row + kSlotScales + 4 * b));
            UNROLL for (int i = 0; i < parts; i++) total[m] =
                vfma(to_float(sums[i]), vmul(vload(p.scales + at + i * kNr), scale), total[m]);
            UNROLL for (int i = 0; has_offset && i < parts; i++) total[m] =
                vfma(vload(p.offsets + at + i * kNr), vset(load_single(start + 32 * parts + 4 * i)), total[m]);
          }
        }
      }
      if constexpr (k_quant) {
        const Finish<parts, has_offset> finish(p, super_block, column);
        UNROLL for (int m = 0; m < M; m++) finish.add(whole[m], slots + slot * m, p.sums + kNr * m + column);
      } else if (kSlices > 1 || super_block == p.s.super_blocks - 1) {
        UNROLL for (int m = 0; m < M; m++) vstore(p.sums + kNr * m + column, total[m]);
      }
    }
  }
}
#endif
using Rows = void (*)(const Part&);
template <int bits, int parts, bool has_offset, bool k_quant, int M>
static constexpr Rows rows_kernel() {
  if constexpr (M <= kMr) return multiply_rows<bits, parts, has_offset, k_quant, M>;
  return nullptr;
}
template <int b, int p, bool s, bool l = false>
static constexpr Rows kRows[10] = {
    rows_kernel<b, p, s, l, 1>(),
    rows_kernel<b, p, s, l, 2>(),
    rows_kernel<b, p, s, l, 3>(),
    rows_kernel<b, p, s, l, 4>(),
    rows_kernel<b, p, s, l, 5>(),
    rows_kernel<b, p, s, l, 6>(),
    rows_kernel<b, p, s, l, 7>(),
    rows_kernel<b, p, s, l, 8>(),
    rows_kernel<b, p, s, l, 9>(),
    rows_kernel<b, p, s, l, 10>(),
};
static const Rows* rows_of(const Format& format) {
  const bool has_offset = format.has_offset();
  if (format.is_k_quant()) switch (format.bits) {
      case 2: return kRows<2, 2, true, true>;
      case 3: return kRows<3, 2, false, true>;
      case 4: return format.lookup ? kRows<kLookup, 1, false, true> : kRows<4, 1, true, true>;
      case 5: return kRows<5, 1, true, true>;
      default: return kRows<6, 2, false, true>;
    }
  const int parts = format.parts();
  switch (format.bits) {
    case 4:
      if (format.lookup) return kRows<kLookup, 1, false>;
      if (parts == 2) return has_offset ? kRows<4, 2, true> : kRows<4, 2, false>;
      return has_offset ? kRows<4, 1, true> : kRows<4, 1, false>;
    case 5: return has_offset ? kRows<5, 1, true> : kRows<5, 1, false>;
    default:
      if (parts == 2) return has_offset ? kRows<8, 2, true> : kRows<8, 2, false>;
      return has_offset ? kRows<8, 1, true> : kRows<8, 1, false>;
  }
}

// float32 scales and offsets of each part of a panel's blocks.
template <Scale kind, OffsetKind offset_kind>
static void expand(const Format& format, const Panel& s, const uint8_t* at, float* scales, float* offsets) {
  const int64_t wanted = s.blocks * format.parts(),
                repeats = format.group <= kBlockInputs ? 1 : format.group / kBlockInputs;
  for (int64_t g = 0; g < s.groups; g++) {
    const int64_t first = g * repeats, end = first + repeats < wanted ? first + repeats : wanted;
    UNROLL for (int column = 0; column < kNr; column += kLanes) {
      const int64_t i = g * kNr + column;
      V scale, offset = vset(0.f);
      if constexpr (kind == Scale::half) scale = load_halves(at + 2 * i);
      if constexpr (kind == Scale::single) scale = vload(reinterpret_cast<const float*>(at) + i);
      if constexpr (kind == Scale::power) {
        float powers[kLanes];
        for (int n = 0; n < kLanes; n++) powers[n] = power_of(at[i + n]);
        scale = vload(powers);
      }
      const uint8_t* stored = at + s.offsets;
      if constexpr (offset_kind == OffsetKind::stored)
        offset = kind == Scale::half ? load_halves(stored + 2 * i) : vload(reinterpret_cast<const float*>(stored) + i);
      if constexpr (offset_kind == OffsetKind::zero_point)
        offset = vmul(vmul(vset(-1.f), scale), to_float(load_uint8(stored + i)));
      for (int64_t r = first; r < end; r++) {
        vstore(scales + r * kNr + column, scale);
        if constexpr (offset_kind != OffsetKind::none) vstore(offsets + r * kNr + column, offset);
      }
    }
  }
  for (int64_t i = s.groups * repeats * kNr; i < wanted * kNr; i++) scales[i] = offsets[i] = 0.f;
}
using Expand = void (*)(const Format&, const Panel&, const uint8_t*, float*, float*);
template <Scale kind>
static Expand expand_by(OffsetKind offset_kind) {
  return offset_kind == OffsetKind::none     ? expand<kind, OffsetKind::none>
         : offset_kind == OffsetKind::stored ? expand<kind, OffsetKind::stored>
                                             : expand<kind, OffsetKind::zero_point>;
}
static Expand expand_of(const Format& format) {
  switch (format.scale) {
    case Scale::power: return expand<Scale::power, OffsetKind::none>;
    case Scale::single: return expand_by<Scale::single>(format.offset_kind);
    default: return expand_by<Scale::half>(format.offset_kind);
  }
}

#if !defined(PLAIN)
INLINE V vmadd(V a, V b, V c) { return vfma(a, b, c); }
#endif
// Float weights: two chains of a row's sum, over even and odd inputs.
template <Scale kind>
INLINE V load_weights(const uint8_t* p) {
  if (kind == Scale::f32) return vload(reinterpret_cast<const float*>(p));
  return kind == Scale::f16 ? load_halves(p) : load_bf16(p);
}
template <Scale kind, int M>
static void multiply_floats(const uint8_t* weight, const float* x, int64_t capacity, int64_t inputs, float* sums) {
  constexpr int width = kind == Scale::f32 ? 4 : 2;
  for (int slice = 0; slice < kSlices; slice++) {
    const int column = slice * kLanes;
    V even[M], odd[M];
    UNROLL for (int m = 0; m < M; m++) {
      even[m] = vload(sums + kNr * 2 * m + column), odd[m] = vload(sums + kNr * (2 * m + 1) + column);
    }
    const uint8_t* p = weight + width * column;
    const float* row = x;
    int64_t k = 0;
    for (; k + 2 <= inputs; k += 2, p += 2 * width * kNr, row += 2 * capacity) {
      if (k / 2 % kSlices == slice) {
        UNROLL for (int i = 0; i < width / 2 * kSlices; i++) prefetch(p - width * column + kAhead + 64 * i);
      }
      const V first = load_weights<kind>(p), second = load_weights<kind>(p + width * kNr);
      UNROLL for (int m = 0; m < M; m++) {
        even[m] = vmadd(first, vset(row[m]), even[m]);
        odd[m] = vmadd(second, vset(row[capacity + m]), odd[m]);
      }
    }
    if (k < inputs) {
      const V first = load_weights<kind>(p);
      UNROLL for (int m = 0; m < M; m++) even[m] = vmadd(first, vset(row[m]), even[m]);
    }
    UNROLL for (int m = 0; m < M; m++) {
      vstore(sums + kNr * 2 * m + column, even[m]), vstore(sums + kNr * (2 * m + 1) + column, odd[m]);
    }
  }
}
using FloatRows = void (*)(const uint8_t*, const float*, int64_t, int64_t, float*);
template <Scale kind, int M>
static constexpr FloatRows float_kernel() {
  if constexpr (M <= kMrFloats) return multiply_floats<kind, M>;
  return nullptr;
}
template <Scale k>
static constexpr FloatRows kFloatRows[9] = {
    float_kernel<k, 1>(),
    float_kernel<k, 2>(),
    float_kernel<k, 3>(),
    float_kernel<k, 4>(),
    float_kernel<k, 5>(),
    float_kernel<k, 6>(),
    float_kernel<k, 7>(),
    float_kernel<k, 8>(),
    float_kernel<k, 9>(),
};

// What multiplies groups of more than kMr rows: a panel's codes are unpacked once for all of them.
struct UnitKernels {
  void (*unpack)(const uint8_t* codes, const uint8_t* lut, int64_t blocks, uint8_t* lines);
  void (*multiply)(const Part&, int64_t rows);  // with `lines` as codes
  uint8_t* lines;                               // [blocks, 8, 64]
};

static void multiply_all(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first, int64_t last,
    void* work, const UnitKernels* unit) {
  const Layout& layout = p.layout;
  const Format& format = layout.format;
  const int64_t first_row = first * p.capacity, last_row = last * p.capacity < p.rows ? last * p.capacity : p.rows;
  const size_t slots = size_t(p.capacity) * slot_bytes(format), group_bytes = p.group_bytes();
  const int chains = format.is_float() ? 2 : 1;
  float* scales = static_cast<float*>(work);
  float* offsets = scales + kNr * 2 * kPanelInputs / kBlockInputs;
  float* sums = offsets + kNr * 2 * kPanelInputs / kBlockInputs;
  const Rows* rows = format.is_float() ? nullptr : rows_of(format);
  const Expand expand = expand_of(format);
  const FloatRows* float_rows = format.scale == Scale::f32   ? kFloatRows<Scale::f32>
                                : format.scale == Scale::f16 ? kFloatRows<Scale::f16>
                                                             : kFloatRows<Scale::bf16>;
  for (int64_t t = first_tile; t < last_tile; t++) {
    const uint8_t* at = p.weight + size_t(t) * layout.tile_bytes;
    memset(sums, 0, sizeof(float) * size_t((last_row - first_row) * chains * kNr));
    // Floats: where a tile has several slices, each passes over the same weights, which must still be in the L1 cache.
    const int64_t step = !format.is_float() ? kPanelInputs : kSlices > 1 ? 64 : kPanelInputs / 2;
    for (int64_t k = 0; k < layout.K; k += step) {
      const int64_t inputs = layout.K - k < step ? layout.K - k : step;
      const Panel& s = inputs == kPanelInputs ? layout.whole : layout.last;
      // What lies kAhead after the head of a panel comes next. Fetched in part, or later: 1.2 times as long (Zen 5).
      for (size_t i = 0; !format.is_float() && i < s.codes; i += 64) prefetch(at + kAhead + i);
      if (!format.is_float() && !format.is_k_quant()) expand(format, s, at, scales, offsets);
      if (unit) unit->unpack(at + s.codes, format.lookup, s.blocks, unit->lines);
      for (int64_t g = first; g < last; g++) {
        const int64_t row = g * p.capacity, count = p.rows - row < p.capacity ? p.rows - row : p.capacity;
        const uint8_t* group = p.packed_rows + size_t(g) * group_bytes;
        float* to = sums + (row - first_row) * chains * kNr;
        if (format.is_float()) {
          const float* x = reinterpret_cast<const float*>(group) + k * p.capacity;
          float_rows[count - 1](at, x, p.capacity, inputs, to);
        } else {
          group += size_t(k / kSuperInputs) * slots;
          const uint8_t* codes = unit ? unit->lines : at + s.codes;
          const Part part = {at, codes, s, scales, offsets, group, slots, to, format.lookup};
          unit ? unit->multiply(part, count) : rows[count - 1](part);
        }
      }
      at += format.is_float() ? size_t(inputs) * kNr * (format.bits / 8) : s.end;
    }
    const int64_t column = t * kNr, width = layout.N - column < kNr ? layout.N - column : kNr;
    for (int64_t row = first_row; row < last_row; row++) {
      const float* sum = sums + (row - first_row) * chains * kNr;
      float total[kNr];
      for (int i = 0; i < kNr; i++) total[i] = chains == 2 ? sum[i] + sum[kNr + i] : sum[i];
      if (p.bias)
        for (int64_t i = 0; i < width; i++) total[i] += p.bias[column + i];
      memcpy(p.out + row * layout.N + column, total, sizeof(float) * size_t(width));
    }
  }
}

static void multiply(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first, int64_t last, void* work) {
  multiply_all(p, first_tile, last_tile, first, last, work, nullptr);
}

// Slots of 256 activations. A NaN or an infinity makes a scale or a unit NaN; magnitudes below 2^-116 count as zeros.
INLINE float inverse_of(int32_t bits, float most, float* unit) {
  const bool is_finite = bits < 0x7f800000, is_normal = is_finite && bits >= 0x05800000;
  const float largest = float_of_bits(uint32_t(bits));
  *unit = is_normal ? largest / most : is_finite ? 0.f : float_of_bits(0x7fc00000);
  return is_normal ? most / largest : 0.f;
}
INLINE void round_codes(const float* x, float inverse, uint8_t* to, int32_t* sums) {
  sums[0] = sums[1] = 0, memset(to, 0, kBlockInputs);
  if (inverse != 0) round_block(x, inverse, reinterpret_cast<int8_t*>(to), sums);
}
INLINE void put(uint8_t* to, int32_t value) { memcpy(to, &value, 4); }
INLINE void put(uint8_t* to, float value) { memcpy(to, &value, 4); }
// What the sums of a block's parts begin with, so that they are those of codes less their zeros, or, where there are
// offsets, of the codes as they are.
INLINE void put_compensation(const Format& format, int b, const int32_t* sums, uint8_t* to) {
  const int parts = format.parts();
  const bool centred = kSigned && (format.lookup || format.bits == 8);  // codes are less by 128 already
  const int32_t factor = (centred ? 128 : 0) - format.zero_point();
  for (int i = 0; i < parts; i++) put(to + 4 * (parts * b + i), factor * (parts == 2 ? sums[i] : sums[0] + sums[1]));
}
static void fill_k_quant(const Format& format, const float* x, uint8_t* slot) {
  int32_t most[8], largest = 0, sums[2];
  for (int b = 0; b < 8; b++) most[b] = largest_bits(x + 32 * b), largest = most[b] > largest ? most[b] : largest;
  float unit;
  const float inverse = inverse_of(largest, 127.f * 16, &unit);
  put(slot + kSlotUnit, unit);
  for (int b = 0; b < 8; b++) {
    const float wanted = inverse != 0 ? float_of_bits(uint32_t(most[b])) * inverse / 127.f : 0.f;
    int32_t k = int32_t(wanted);
    k += float(k) < wanted, k = k < 1 ? 1 : k > 16 ? 16 : k;
    round_codes(x + 32 * b, inverse / float(k), slot + 32 * b, sums);
    put(slot + kSlotFactors + 4 * b, kPairs ? k * 0x10001 : k);
    if (kPairs || format.has_offset())
      put(slot + kSlotSums + 4 * b, int32_t(uint32_t(k * sums[1]) << 16 | (uint32_t(k * sums[0]) & 0xffff)));
    else put_compensation(format, b, sums, slot + kSlotSums);
  }
}
static void fill_scales(const Format& format, const float* x, uint8_t* slot) {
  const int parts = format.parts();
  for (int b = 0; b < 8; b++) {
    float scale;
    int32_t sums[2];
    round_codes(x + 32 * b, inverse_of(largest_bits(x + 32 * b), 127.f, &scale), slot + 32 * b, sums);
    put(slot + kSlotScales + 4 * b, scale);
    put_compensation(format, b, sums, slot + kSlotCompensation);
    for (int i = 0; format.has_offset() && i < parts; i++)
      put(slot + kSlotCompensation + 32 * parts + 4 * (parts * b + i),
          float(parts == 2 ? sums[i] : sums[0] + sums[1]) * scale);
  }
}
static void pack(const Product& p, int64_t first, int64_t last) {
  const Layout& layout = p.layout;
  const size_t slot = slot_bytes(layout.format);
  for (int64_t g = first; g < last; g++) {
    uint8_t* group = p.packed_rows + size_t(g) * p.group_bytes();
    for (int64_t m = 0; m < p.capacity && g * p.capacity + m < p.rows; m++) {
      const float* x = p.x + (g * p.capacity + m) * layout.K;
      if (layout.format.is_float()) {
        float* to = reinterpret_cast<float*>(group) + m;
        for (int64_t k = 0; k < layout.K; k++) to[k * p.capacity] = x[k];
        continue;
      }
      for (int64_t super_block = 0; super_block < layout.super_blocks(); super_block++) {
        const int64_t left = layout.K - super_block * kSuperInputs;
        float filled[kSuperInputs] = {};
        if (left < kSuperInputs) memcpy(filled, x + super_block * kSuperInputs, sizeof(float) * size_t(left));
        const float* from = left < kSuperInputs ? filled : x + super_block * kSuperInputs;
        uint8_t* to = group + size_t(super_block * p.capacity + m) * slot;
        layout.format.is_k_quant() ? fill_k_quant(layout.format, from, to) : fill_scales(layout.format, from, to);
      }
    }
  }
}
