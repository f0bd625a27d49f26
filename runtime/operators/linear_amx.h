// Groups of up to 16 rows with a unit that multiplies tiles of bytes, as AMX has it: included after linear_tile.h.
// For blocks with one scale: with two, products by vectors took 0.83 to 0.97 of its time (q6_k, near, a Xeon).
//
// A Unit has
//   begin(rows)                product() may be called then, up to end()
//   product<n>(a, stride, b, out)
//                              out [rows, 16] int32 = a [rows, 32] int8, rows `stride` bytes apart, times b
//                              [8, 16, 4] uint8, with the n-th of kAtOnce sets of registers
//   end()                      leaves nothing behind in this thread
//
// Sums of integers are exact, and all else is done in the order of other kernels: rows have the bits they have there.
static_assert(!kSigned, "the unit's weights are unsigned");
constexpr int64_t kUnitRows = 16;
constexpr int kAtOnce = 4;
constexpr size_t kUnpacked = kBlockInputs * kNr;  // bytes of a block

template <int bits>
static void unpack_all(const uint8_t* codes, const uint8_t* lut, int64_t blocks, uint8_t* lines) {
  constexpr int count = bits == kLookup ? 4 : bits;
  for (int64_t b = 0; b < blocks; b++, codes += 64 * count, lines += kUnpacked) {
    UNROLL for (int i = 0; i < count; i++) prefetch(codes + kAhead + 64 * i);
    for (int slice = 0; slice < kSlices; slice++) {
      U u[8];
      unpack<bits>(codes + 4 * slice * kLanes, lut, u);
      UNROLL for (int q = 0; q < 8; q++) memcpy(lines + 64 * q + 4 * slice * kLanes, u + q, sizeof u[q]);
    }
  }
}

// Products of some blocks, kAtOnce if there are as many. Their slots begin at `slots`.
template <class Unit, int n = 0>
INLINE void make_products(const uint8_t* slots, size_t slot, const uint8_t* lines, int64_t blocks, int32_t* out) {
  if constexpr (n < kAtOnce) {
    if (n >= blocks) return;
    Unit::template product<n>(slots + n * kBlockInputs, slot, lines + n * kUnpacked, out + n * kUnitRows * kNr);
    make_products<Unit, n + 1>(slots, slot, lines, blocks, out);
  }
}

template <class Unit, bool has_offset, bool k_quant>
static void multiply_group(const Part& p, int64_t rows) {
  constexpr size_t slot = slot_bytes(k_quant, 1, has_offset);
  alignas(64) int32_t products[kAtOnce * kUnitRows * kNr], whole[kUnitRows * kNr];
  for (int64_t b = 0; b < p.s.blocks; b += kAtOnce) {
    const uint8_t* slots = p.slots + size_t(b / 8) * p.stride;
    const int64_t in_slot = b % 8, blocks = p.s.blocks - b < kAtOnce ? p.s.blocks - b : kAtOnce;
    make_products<Unit>(slots + kBlockInputs * in_slot, slot, p.codes + size_t(b) * kUnpacked, blocks, products);
    if (k_quant && !in_slot) memset(whole, 0, sizeof whole);
    for (int column = 0; column < kNr; column += kLanes) {
      I sub_scales[kAtOnce];
      if constexpr (k_quant) {
        UNROLL for (int n = 0; n < kAtOnce; n++) if (n < blocks) sub_scales[n] =
            load_int8(p.head + (b + n) * kNr + column);
      }
      for (int64_t m = 0; m < rows; m++) {
        const uint8_t* row = slots + slot * size_t(m);
        V sum = vload(p.sums + kNr * m + column);
        I total;
        memcpy(&total, whole + kNr * m + column, sizeof total);
        UNROLL for (int n = 0; n < kAtOnce; n++) {
          const int64_t at = 4 * (in_slot + n);
          if (n >= blocks) break;
          I found;
          memcpy(&found, products + (n * kUnitRows + m) * kNr + column, sizeof found);
          if constexpr (k_quant) {
            if (!has_offset) found = iadd(found, iset(int_at(row + kSlotSums + at)));
            total = imadd(found, iscaled(sub_scales[n], iset(int_at(row + kSlotFactors + at))), total);
          } else {
            found = iadd(found, iset(int_at(row + kSlotCompensation + at)));
            const V scale = vload(p.scales + (b + n) * kNr + column);
            sum = vfma(to_float(found), vmul(scale, vset(load_single(row + kSlotScales + at))), sum);
            if (has_offset)
              sum = vfma(
                  vload(p.offsets + (b + n) * kNr + column), vset(load_single(row + kSlotCompensation + 32 + at)), sum);
          }
        }
        if constexpr (k_quant) memcpy(whole + kNr * m + column, &total, sizeof total);
        else vstore(p.sums + kNr * m + column, sum);
      }
    }
    if constexpr (k_quant) {
      if (in_slot + kAtOnce < 8 && b + kAtOnce < p.s.blocks) continue;
      for (int column = 0; column < kNr; column += kLanes) {
        const Finish<1, has_offset> finish(p, b / 8, column);
        for (int64_t m = 0; m < rows; m++) {
          I total;
          memcpy(&total, whole + kNr * m + column, sizeof total);
          finish.add(total, slots + slot * size_t(m), p.sums + kNr * m + column);
        }
      }
    }
  }
}

template <class Unit>
static void multiply_with(
    const Product& p, int64_t first_tile, int64_t last_tile, int64_t first, int64_t last, void* work) {
  if (p.capacity <= kMr || p.layout.format.is_float()) return multiply(p, first_tile, last_tile, first, last, work);
  const Format& format = p.layout.format;
  alignas(64) uint8_t lines[kPanelInputs / kBlockInputs * kUnpacked];
  UnitKernels unit = {unpack_all<8>, nullptr, lines};
  switch (format.bits) {
    case 4: unit.unpack = format.lookup ? unpack_all<kLookup> : unpack_all<4>; break;
    case 5: unit.unpack = unpack_all<5>; break;
  }
  const bool has_offset = format.has_offset();
  if (format.is_k_quant())
    unit.multiply = has_offset ? multiply_group<Unit, true, true> : multiply_group<Unit, false, true>;
  else unit.multiply = has_offset ? multiply_group<Unit, true, false> : multiply_group<Unit, false, false>;
  Unit::begin(int(p.capacity));
  multiply_all(p, first_tile, last_tile, first, last, work, &unit);
  Unit::end();
}

// Whether a unit computes what it is to compute.
template <class Unit>
static bool multiplies_right() {
  uint8_t slots[kUnitRows][kAtOnce][kBlockInputs], lines[kAtOnce][8][kNr][4];
  int32_t out[kAtOnce][kUnitRows][kNr];
  for (size_t i = 0; i < sizeof slots; i++) (&slots[0][0][0])[i] = uint8_t(i * 157 >> 3);
  for (size_t i = 0; i < sizeof lines; i++) (&lines[0][0][0][0])[i] = uint8_t(i * 211 >> 2);
  memset(out, 0xff, sizeof out);
  Unit::begin(kUnitRows);
  make_products<Unit>(&slots[0][0][0], sizeof slots[0], &lines[0][0][0][0], kAtOnce, &out[0][0][0]);
  Unit::end();
  for (int n = 0; n < kAtOnce; n++)
    for (int m = 0; m < kUnitRows; m++)
      for (int i = 0; i < kNr; i++) {
        int32_t sum = 0;
        for (int k = 0; k < kBlockInputs; k++) sum += int8_t(slots[m][n][k]) * lines[n][k / 4][i][k % 4];
        if (out[n][m][i] != sum) return false;
      }
  return true;
}
