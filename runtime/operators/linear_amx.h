// Groups of up to 16 rows with a unit that multiplies tiles of bytes, as AMX has it: included after linear_tile.h.
//
// A Unit has
//   begin(rows, quads)         product() may be called then, up to end()
//   product<n>(a, stride, b, out)
//                              out [rows, 16] int32 = a [rows, 4 * quads] int8, rows `stride` bytes apart, times b
//                              [quads, 16, 4] uint8, with the n-th of kAtOnce sets of registers
//   end()                      leaves nothing behind in this thread
//
// Sums of integers are exact, and all else is done in the order of multiply_codes: rows have the bits they have there.
static_assert(!kSigned, "the unit's weights are unsigned");
constexpr int64_t kManyRows = 16;
constexpr int kAtOnce = 4;
constexpr size_t kUnpacked = kBlock * kTile;  // bytes of a block

template <int bits>
static void unpack_all(const uint8_t* codes, const uint8_t* book, int64_t blocks, uint8_t* lines) {
  constexpr int count = bits == kLookup ? 4 : bits;
  for (int64_t b = 0; b < blocks; b++, codes += 64 * count, lines += kUnpacked) {
    UNROLL for (int i = 0; i < count; i++) prefetch(codes + kAhead + 64 * i);
    for (int slice = 0; slice < kSlices; slice++) {
      U u[8];
      unpack<bits>(codes + 4 * slice * kLanes, book, u);
      UNROLL for (int q = 0; q < 8; q++) memcpy(lines + 64 * q + 4 * slice * kLanes, u + q, sizeof u[q]);
    }
  }
}

// Products of the parts of some blocks from `b` on, kAtOnce if there are as many.
template <class Unit, int parts, int n = 0>
INLINE void make_products(const Part& p, int64_t b, int32_t* out) {
  if constexpr (n < kAtOnce) {
    constexpr size_t part = n % parts;
    const size_t block = size_t(b) + n / parts;
    if (int64_t(block) >= p.blocks) return;
    Unit::template product<n>(p.slots + block * p.stride + part * kBlock / parts, kBlock + 4 + 4 * parts,
                              p.codes + block * kUnpacked + part * kUnpacked / parts, out + n * kManyRows * kTile);
    make_products<Unit, parts, n + 1>(p, b, out);
  }
}

template <class Unit, int parts, bool shifted>
static void multiply_group(const Part& p, int64_t rows) {
  constexpr int at_once = kAtOnce / parts, slot = kBlock + 4 + 4 * parts;
  alignas(64) int32_t products[kAtOnce * kManyRows * kTile];
  for (int64_t b = 0; b < p.blocks; b += at_once) {
    make_products<Unit, parts>(p, b, products);
    for (int column = 0; column < kTile; column += kLanes) {
      V scale[kAtOnce], offset[kAtOnce];
      UNROLL for (int n = 0; n < kAtOnce; n++) {
        scale[n] = vload(p.scales + (b * parts + n) * kTile + column);
        if (shifted) offset[n] = vload(p.offsets + (b * parts + n) * kTile + column);
      }
      for (int64_t m = 0; m < rows; m++) {
        V sum = vload(p.sums + kTile * m + column);
        UNROLL for (int i = 0; i < at_once; i++) {
          if (b + i >= p.blocks) break;
          const uint8_t* share = p.slots + size_t(b + i) * p.stride + slot * m + kBlock + 4;
          const V row_scale = vset(load_single(share - 4));
          UNROLL for (int n = i * parts; n < (i + 1) * parts; n++) {
            I whole;
            memcpy(&whole, products + (n * kManyRows + m) * kTile + column, sizeof whole);
            if (!shifted) whole = iadd(whole, iset(int_at(share + 4 * (n % parts))));
            sum = vfma(to_float(whole), vmul(scale[n], row_scale), sum);
          }
          if (shifted) {
            UNROLL for (int n = i * parts; n < (i + 1) * parts; n++)
              sum = vfma(offset[n], vset(load_single(share + 4 * (n % parts))), sum);
          }
        }
        vstore(p.sums + kTile * m + column, sum);
      }
    }
  }
}

template <class Unit>
static void multiply_with(const Product& p, int64_t first_tile, int64_t last_tile, int64_t first, int64_t last,
                          void* work) {
  if (p.capacity <= kMost) return multiply(p, first_tile, last_tile, first, last, work);  // all of floats too
  const Format& format = p.layout.format;
  alignas(64) uint8_t lines[kStretch / kBlock * kUnpacked];
  Many many = {unpack_all<8>, nullptr, lines};
  switch (format.bits) {
    case 2: many.unpack = unpack_all<2>; break;
    case 3: many.unpack = unpack_all<3>; break;
    case 4: many.unpack = format.lookup ? unpack_all<kLookup> : unpack_all<4>; break;
    case 5: many.unpack = unpack_all<5>; break;
    case 6: many.unpack = unpack_all<6>; break;
  }
  if (format.parts() == 2)
    many.multiply = format.shifted() ? multiply_group<Unit, 2, true> : multiply_group<Unit, 2, false>;
  else
    many.multiply = format.shifted() ? multiply_group<Unit, 1, true> : multiply_group<Unit, 1, false>;
  Unit::begin(int(p.capacity), 8 / format.parts());
  multiply_all(p, first_tile, last_tile, first, last, work, &many);
  Unit::end();
}

// Whether a unit computes what it is to compute.
template <class Unit>
static bool multiplies_right() {
  constexpr int slot = kBlock + 8;
  uint8_t slots[kAtOnce][kManyRows][slot], lines[kAtOnce][8][kTile][4];
  int32_t out[kAtOnce][kManyRows][kTile];
  for (size_t i = 0; i < sizeof slots; i++) (&slots[0][0][0])[i] = uint8_t(i * 157 >> 3);
  for (size_t i = 0; i < sizeof lines; i++) (&lines[0][0][0][0])[i] = uint8_t(i * 211 >> 2);
  memset(out, 0xff, sizeof out);
  Unit::begin(kManyRows, 8);
  make_products<Unit, 1>({&lines[0][0][0][0], nullptr, nullptr, kAtOnce, &slots[0][0][0], sizeof slots[0], nullptr,
                          nullptr},
                         0,
                         &out[0][0][0]);
  Unit::end();
  for (int n = 0; n < kAtOnce; n++)
    for (int m = 0; m < kManyRows; m++)
      for (int i = 0; i < kTile; i++) {
        int32_t sum = 0;
        for (int k = 0; k < kBlock; k++) sum += int8_t(slots[n][m][k]) * lines[n][k / 4][i][k % 4];
        if (out[n][m][i] != sum) return false;
      }
  return true;
}
