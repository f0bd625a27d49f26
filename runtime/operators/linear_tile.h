// The products, in terms of an instruction set's own vectors: included by each file of one, inside its namespace.
//
// V are floats, I are int32 of kLanes outputs; U are the bytes of a line for these outputs. A row's sum is taken in one
// order, whatever rows stand beside it: over blocks, and in a block over its parts.

constexpr int kSlices = kTile / kLanes;
constexpr int kLookup = 0;  // stands for the codebook where bits are asked for

// Codes of one block, from unsigned planes of lines; signed ones where the products want them (8 bits, codebook).
template <int from, int to>
INLINE U field(U line, int mask) {
  if constexpr (from > to) return uand(ushr<from - to>(line), mask);
  if constexpr (from < to) return uand(ushl<to - from>(line), mask);
  return uand(line, mask);
}
template <int bits, int q>
INLINE U unpack_quad(const uint8_t* p, const uint8_t* book) {
  if constexpr (bits == 8) return kSigned ? uxor(uload(p + 64 * q), 0x80) : uload(p + 64 * q);
  U code = uload(p);
  if constexpr (bits == kLookup || bits >= 4) {
    const U line = uload(p + 64 * (q % 4));
    code = uand(q < 4 ? line : ushr<4>(line), 15);
    p += 256;
  }
  if constexpr (bits == kLookup) return ulookup(book, code);
  if constexpr (bits == 6) code = uor(code, field<q / 2 * 2, 4>(uload(p + 64 * (q % 2)), 0x30));
  if constexpr (bits == 2 || bits == 3) {
    code = field<q / 2 * 2, 0>(uload(p + 64 * (q % 2)), 3);
    p += 128;
  }
  if constexpr (bits == 3 || bits == 5) code = uor(code, field<q, bits - 1>(uload(p), 1 << (bits - 1)));
  return code;
}
template <int bits, int q = 0>
INLINE void unpack(const uint8_t* p, const uint8_t* book, U* u) {
  u[q] = unpack_quad<bits, q>(p, book);
  if constexpr (q < 7) unpack<bits, q + 1>(p, book, u);
}

// What a call of a kernel gets: a stretch of a tile, and some rows from its first block on.
struct Part {
  const uint8_t* codes;
  const float *scales, *offsets;  // [blocks, parts, 16]
  int64_t blocks;
  const uint8_t* slots;
  size_t stride;  // bytes of a block's slots
  float* sums;    // [rows, 16], added to
  const uint8_t* book;
};

INLINE int32_t int_at(const uint8_t* p) {
  int32_t value;
  memcpy(&value, p, 4);
  return value;
}
template <int bits, int parts, bool shifted, int M>
static void multiply_codes(const Part& p) {
  constexpr int lines = bits == kLookup ? 4 : bits, slot = kBlock + 4 + 4 * parts;
  // Slices take turns, so that what is ahead arrives while all of them multiply.
  for (int64_t from = 0; from < p.blocks; from += kTurn) {
    const int64_t end = from + kTurn < p.blocks ? from + kTurn : p.blocks;
    for (int slice = 0; slice < kSlices; slice++) {
      const int column = slice * kLanes;
      const size_t first = size_t(kTile * parts * from + column);
      V sums[M];
      UNROLL for (int m = 0; m < M; m++) sums[m] = vload(p.sums + kTile * m + column);
      const uint8_t *line = p.codes + 64 * lines * from, *row = p.slots + p.stride * size_t(from);
      const float *scales = p.scales + first, *offsets = p.offsets + first;
      for (int64_t b = from; b < end; b++) {
        UNROLL for (int i = 0; i < (lines + kSlices - 1) / kSlices; i++)
          prefetch(line + kAhead + 64 * (slice + kSlices * i));
        U u[8];
        unpack<bits>(line + 4 * column, p.book, u);
        V scale[parts], offset[parts];
        UNROLL for (int i = 0; i < parts; i++) {
          scale[i] = vload(scales + i * kTile);
          if (shifted) offset[i] = vload(offsets + i * kTile);
        }
        UNROLL for (int m = 0; m < M; m++) {
          const int8_t* values = reinterpret_cast<const int8_t*>(row + slot * m);
          const uint8_t* share = row + slot * m + kBlock + 4;
          const V row_scale = vset(load_single(row + slot * m + kBlock));
          I low = dot<bits>(shifted ? izero() : iset(int_at(share)), u, values);
          if (parts == 2) {
            const I high = dot<bits>(shifted ? izero() : iset(int_at(share + 4)), u + 4, values + 16);
            sums[m] = vfma(to_float(low), vmul(scale[0], row_scale), sums[m]);
            sums[m] = vfma(to_float(high), vmul(scale[parts - 1], row_scale), sums[m]);
          } else {
            low = M < 3 ? iadd(low, dot<bits>(izero(), u + 4, values + 16)) : dot<bits>(low, u + 4, values + 16);
            sums[m] = vfma(to_float(low), vmul(scale[0], row_scale), sums[m]);
          }
          if (shifted) {
            UNROLL for (int i = 0; i < parts; i++) sums[m] = vfma(offset[i], vset(load_single(share + 4 * i)), sums[m]);
          }
        }
        line += 64 * lines, row += p.stride, scales += kTile * parts, offsets += kTile * parts;
      }
      UNROLL for (int m = 0; m < M; m++) vstore(p.sums + kTile * m + column, sums[m]);
    }
  }
}
using Rows = void (*)(const Part&);
template <int bits, int parts, bool shifted>
static constexpr Rows kRows[9] = {
    multiply_codes<bits, parts, shifted, 1>,
    multiply_codes<bits, parts, shifted, 2>,
    multiply_codes<bits, parts, shifted, kMost < 3 ? 1 : 3>,
    multiply_codes<bits, parts, shifted, kMost < 4 ? 1 : 4>,
    multiply_codes<bits, parts, shifted, kMost < 5 ? 1 : 5>,
    multiply_codes<bits, parts, shifted, kMost < 6 ? 1 : 6>,
    multiply_codes<bits, parts, shifted, kMost < 7 ? 1 : 7>,
    multiply_codes<bits, parts, shifted, kMost < 8 ? 1 : 8>,
    multiply_codes<bits, parts, shifted, kMost < 9 ? 1 : 9>,
};
static const Rows* rows_of(const Format& format) {
  const bool shifted = format.shifted();
  const int parts = format.parts();
  switch (format.bits) {
    case 2: return kRows<2, 2, true>;
    case 3: return kRows<3, 2, false>;
    case 4: if (format.lookup) return kRows<kLookup, 1, false>;
            if (parts == 2) return shifted ? kRows<4, 2, true> : kRows<4, 2, false>;
            return shifted ? kRows<4, 1, true> : kRows<4, 1, false>;
    case 5: return shifted ? kRows<5, 1, true> : kRows<5, 1, false>;
    case 6: return kRows<6, 2, false>;
    default: if (parts == 2) return shifted ? kRows<8, 2, true> : kRows<8, 2, false>;
             return shifted ? kRows<8, 1, true> : kRows<8, 1, false>;
  }
}

// float32 scales and offsets of each part of a stretch's blocks.
template <Scale kind, Shift shift>
static void expand(const Format& format, const Stretch& s, const uint8_t* at, float* scales, float* offsets) {
  const int64_t wanted = s.blocks * format.parts(), repeats = format.group <= kBlock ? 1 : format.group / kBlock;
  const int64_t ahead = int64_t(s.codes) / s.groups;
  const bool centred = kSigned && (format.lookup || format.bits == 8);
  int supers = 0;  // groups of a base: a power of two
  while (format.group << supers < kSuper) supers++;
  for (int64_t g = 0; g < s.groups; g++) {
    if (g % 2 == 0) prefetch(at + kAhead + g * ahead);
    const int64_t first = g * repeats, end = first + repeats < wanted ? first + repeats : wanted;
    UNROLL for (int column = 0; column < kTile; column += kLanes) {
      const int64_t i = g * kTile + column, base = 2 * ((g >> supers) * kTile + column);
      V scale, offset = vset(0.f);
      if constexpr (kind == Scale::half) scale = load_halves(at + 2 * i);
      if constexpr (kind == Scale::single) scale = vload(reinterpret_cast<const float*>(at) + i);
      if constexpr (kind == Scale::level) scale = vmul(load_halves(at + s.bases + base), load_levels(at + i));
      if constexpr (kind == Scale::power) {
        float powers[kLanes];
        for (int n = 0; n < kLanes; n++) powers[n] = power_of(at[i + n]);
        scale = vload(powers);
      }
      const uint8_t* shifts = at + s.shifts;
      if constexpr (shift == Shift::offset)
        offset = kind == Scale::half ? load_halves(shifts + 2 * i) : vload(reinterpret_cast<const float*>(shifts) + i);
      if constexpr (shift == Shift::zero) offset = vmul(vmul(vset(-1.f), scale), load_bytes(shifts + i));
      if constexpr (shift == Shift::minima) offset = vmul(load_halves(at + s.leasts + base), load_bytes(shifts + i));
      if (centred && shift != Shift::none) offset = vfma(vset(128.f), scale, offset);
      for (int64_t r = first; r < end; r++) {
        vstore(scales + r * kTile + column, scale);
        if constexpr (shift != Shift::none) vstore(offsets + r * kTile + column, offset);
      }
    }
  }
  for (int64_t i = s.groups * repeats * kTile; i < wanted * kTile; i++) scales[i] = offsets[i] = 0.f;
}
using Expand = void (*)(const Format&, const Stretch&, const uint8_t*, float*, float*);
template <Scale kind>
static Expand expand_by(Shift shift) {
  return shift == Shift::none ? expand<kind, Shift::none>
         : shift == Shift::offset ? expand<kind, Shift::offset> : expand<kind, Shift::zero>;
}
static Expand expand_of(const Format& format) {
  switch (format.scale) {
    case Scale::level:
      return format.shifted() ? expand<Scale::level, Shift::minima> : expand<Scale::level, Shift::none>;
    case Scale::power: return expand<Scale::power, Shift::none>;
    case Scale::single: return expand_by<Scale::single>(format.shift);
    default: return expand_by<Scale::half>(format.shift);
  }
}

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
      even[m] = vload(sums + kTile * 2 * m + column), odd[m] = vload(sums + kTile * (2 * m + 1) + column);
    }
    const uint8_t* p = weight + width * column;
    const float* row = x;
    int64_t k = 0;
    for (; k + 2 <= inputs; k += 2, p += 2 * width * kTile, row += 2 * capacity) {
      if (k / 2 % kSlices == slice) {
        UNROLL for (int i = 0; i < width / 2 * kSlices; i++) prefetch(p - width * column + kAhead + 64 * i);
      }
      const V first = load_weights<kind>(p), second = load_weights<kind>(p + width * kTile);
      UNROLL for (int m = 0; m < M; m++) {
        even[m] = vfma(first, vset(row[m]), even[m]);
        odd[m] = vfma(second, vset(row[capacity + m]), odd[m]);
      }
    }
    if (k < inputs) {
      const V first = load_weights<kind>(p);
      UNROLL for (int m = 0; m < M; m++) even[m] = vfma(first, vset(row[m]), even[m]);
    }
    UNROLL for (int m = 0; m < M; m++) {
      vstore(sums + kTile * 2 * m + column, even[m]), vstore(sums + kTile * (2 * m + 1) + column, odd[m]);
    }
  }
}
using FloatRows = void (*)(const uint8_t*, const float*, int64_t, int64_t, float*);
template <Scale kind>
static constexpr FloatRows kFloatRows[9] = {
    multiply_floats<kind, 1>,
    multiply_floats<kind, 2>,
    multiply_floats<kind, kMost < 3 ? 1 : 3>,
    multiply_floats<kind, kMost < 4 ? 1 : 4>,
    multiply_floats<kind, kMost < 5 ? 1 : 5>,
    multiply_floats<kind, kMost < 6 ? 1 : 6>,
    multiply_floats<kind, kMost < 7 ? 1 : 7>,
    multiply_floats<kind, kMost < 8 ? 1 : 8>,
    multiply_floats<kind, kMost < 9 ? 1 : 9>,
};

// What multiplies groups of more than kMost rows: a stretch's codes are unpacked once for all of them.
struct Many {
  void (*unpack)(const uint8_t* codes, const uint8_t* book, int64_t blocks, uint8_t* lines);
  void (*multiply)(const Part&, int64_t rows);  // with `lines` as codes
  uint8_t* lines;  // [blocks, 8, 64]
};

static void multiply_all(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first, int64_t last,
                         void* work, const Many* many) {
  const Layout& layout = p.layout;
  const Format& format = layout.format;
  const int64_t first_row = first * p.capacity, last_row = last * p.capacity < p.rows ? last * p.capacity : p.rows;
  const size_t slots = size_t(p.capacity) * p.slot_bytes(), group_bytes = p.group_bytes();
  const int chains = format.is_float() ? 2 : 1;
  float* scales = static_cast<float*>(work);
  float* offsets = scales + kTile * 2 * kStretch / kBlock;
  float* sums = offsets + kTile * 2 * kStretch / kBlock;
  const Rows* rows = format.is_float() ? nullptr : rows_of(format);
  const Expand expand = expand_of(format);
  const FloatRows* float_rows = format.scale == Scale::f32   ? kFloatRows<Scale::f32>
                                : format.scale == Scale::f16 ? kFloatRows<Scale::f16>
                                                             : kFloatRows<Scale::bf16>;
  for (int64_t t = first_tile; t < last_tile; t++) {
    const uint8_t* at = p.weight + size_t(t) * layout.tile_bytes;
    memset(sums, 0, sizeof(float) * size_t((last_row - first_row) * chains * kTile));
    // Floats: where a tile has several slices, each passes over the same weights, which must still be in the L1 cache.
    const int64_t step = !format.is_float() ? kStretch : kSlices > 1 ? 64 : kStretch / 2;
    for (int64_t k = 0; k < layout.K; k += step) {
      const int64_t inputs = layout.K - k < step ? layout.K - k : step;
      const Stretch& s = inputs == kStretch ? layout.whole : layout.last;
      if (!format.is_float()) expand(format, s, at, scales, offsets);
      if (many) many->unpack(at + s.codes, format.lookup, s.blocks, many->lines);
      for (int64_t g = first; g < last; g++) {
        const int64_t row = g * p.capacity, count = p.rows - row < p.capacity ? p.rows - row : p.capacity;
        const uint8_t* group = p.arranged + size_t(g) * group_bytes;
        float* to = sums + (row - first_row) * chains * kTile;
        if (format.is_float()) {
          const float* x = reinterpret_cast<const float*>(group) + k * p.capacity;
          float_rows[count - 1](at, x, p.capacity, inputs, to);
        } else {
          group += size_t(k / kBlock) * slots;
          const uint8_t* codes = many ? many->lines : at + s.codes;
          const Part part = {codes, scales, offsets, s.blocks, group, slots, to, format.lookup};
          many ? many->multiply(part, count) : rows[count - 1](part);
        }
      }
      at += format.is_float() ? size_t(inputs) * kTile * (format.bits / 8) : s.end;
    }
    const int64_t column = t * kTile, width = layout.N - column < kTile ? layout.N - column : kTile;
    for (int64_t row = first_row; row < last_row; row++) {
      const float* sum = sums + (row - first_row) * chains * kTile;
      float total[kTile];
      for (int i = 0; i < kTile; i++) total[i] = chains == 2 ? sum[i] + sum[kTile + i] : sum[i];
      if (p.bias)
        for (int64_t i = 0; i < width; i++) total[i] += p.bias[column + i];
      memcpy(p.out + row * layout.N + column, total, sizeof(float) * size_t(width));
    }
  }
}

static void multiply(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first, int64_t last, void* work) {
  multiply_all(p, first_tile, last_tile, first, last, work, nullptr);
}

// A slot of 32 activations: their largest magnitude becomes 127. A NaN or an infinity makes the slot's scale NaN.
static void fill_slot(const Layout& layout, const float* x, uint8_t* slot) {
  const int parts = layout.format.parts(), zero = kSigned && layout.format.zero() == 128 ? 0 : layout.format.zero();
  const int32_t bits = largest_bits(x);
  const float largest = float_of_bits(uint32_t(bits));
  const bool finite = bits < 0x7f800000, some = finite && bits >= 0x03800000;  // 2^-120: 127 / x is finite
  const float scale = some ? largest / 127.f : finite ? 0.f : float_of_bits(0x7fc00000);
  int32_t sums[2] = {};
  memset(slot, 0, kBlock);
  if (some) round_block(x, 127.f / largest, reinterpret_cast<int8_t*>(slot), sums);
  memcpy(slot + kBlock, &scale, 4);
  if (parts == 1) sums[0] += sums[1];
  for (int i = 0; i < parts; i++) {
    const float share = float(sums[i]) * scale;
    const int32_t correction = -zero * sums[i];
    memcpy(slot + kBlock + 4 + 4 * i, layout.format.shifted() ? static_cast<const void*>(&share) : &correction, 4);
  }
}
static void arrange(const Product& p, int64_t first, int64_t last) {
  const Layout& layout = p.layout;
  const size_t slot = p.slot_bytes();
  for (int64_t g = first; g < last; g++) {
    uint8_t* group = p.arranged + size_t(g) * p.group_bytes();
    for (int64_t m = 0; m < p.capacity && g * p.capacity + m < p.rows; m++) {
      const float* x = p.x + (g * p.capacity + m) * layout.K;
      if (layout.format.is_float()) {
        float* to = reinterpret_cast<float*>(group) + m;
        for (int64_t k = 0; k < layout.K; k++) to[k * p.capacity] = x[k];
        continue;
      }
      for (int64_t b = 0; b < layout.blocks; b++) {
        const int64_t left = layout.K - b * kBlock;
        float filled[kBlock] = {};
        if (left < kBlock) memcpy(filled, x + b * kBlock, sizeof(float) * size_t(left));
        fill_slot(layout, left < kBlock ? filled : x + b * kBlock, group + size_t(b * p.capacity + m) * slot);
      }
    }
  }
}
