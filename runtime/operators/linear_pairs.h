// Products of pairs, for AVX2 without VNNI: included by linear_tile.h, in the place of its products of quads.
//
// `vpmaddubsw` adds up two products in 16 bits, where all 8 quads of a block fit if codes have 4 bits, 4 if 5, 2 if 6.
// Codes of 8 bits, and values of codebooks, are nibbles: two sums of products, of which one counts 16 times. A level
// times k, or ones, is what `vpmaddwd` then multiplies with.
//
// Both slices of a tile at once, so that a broadcast serves 16 outputs, but for nibbles, which take as many registers. A
// half of a block is unpacked and multiplied for all rows, then the other. What a row's sums are so far waits in the L1
// cache.
constexpr bool in_nibbles(int bits) { return bits == kLookup || bits == 8; }
constexpr int room_of(int bits) { return bits <= 4 || bits == 8 ? 8 : bits == 5 ? 4 : 2; }  // quads

// Computes a value here. Else the compiler mixes the halves of a block, and spills: 0.75 of the speed (Zen 5, int4).
template <class T>
INLINE void pin(T& value) { __asm__ volatile("" : "+x"(value)); }
INLINE I add16(I a, I b) { return _mm256_add_epi16(a, b); }
// Four quads of both slices, or the low and high nibbles of one.
template <int bits, int q, int slice, int count = 4>
INLINE void unpack_some(const uint8_t* line, const uint8_t* book, U* u) {
  u[0] = unpack_quad<bits, q>(line + 32 * slice, book);
  if constexpr (in_nibbles(bits)) u[1] = uand(ushr<4>(u[0]), 15), u[0] = uand(u[0], 15);
  else u[1] = unpack_quad<bits, q>(line + 32, book);
  if constexpr (count > 1) unpack_some<bits, q + 1, slice, count - 1>(line, book, u + 2);
}
INLINE I two_quads(const U* u, const I* q) {
  return add16(_mm256_maddubs_epi16(u[0], q[0]), _mm256_maddubs_epi16(u[2], q[1]));
}
INLINE I four_quads(const U* u, const I* q) { return add16(two_quads(u, q), two_quads(u + 4, q + 2)); }

template <bool level, int M>
struct Sums {  // of M rows: int32 over 256 inputs, or floats; and what the first half of a block gives
  I whole[M][2], half[M][2][2];
  V total[M][2];
};
// The quads of a block from `first` on, of some slices, for all rows.
template <int bits, int parts, bool shifted, bool level, int M, int first, int slice0>
INLINE void add_quads(const Part& p, const uint8_t* line, const uint8_t* slots, int64_t b, int64_t block, Sums<level, M>& s) {
  constexpr bool nibbles = in_nibbles(bits), opens = parts == 2 || first == 0, closes = parts == 2 || first == 4;
  constexpr bool waits = room_of(bits) == 8 && parts == 1;  // in 16 bits, for the block's other half
  constexpr int part = parts == 2 ? first / 4 : 0, slices = nibbles ? 1 : 2, chains = nibbles ? 2 : 1;
  constexpr size_t slot = slot_bytes(level, parts, shifted);
  const size_t at = size_t((block * parts + part) * kTile);
  U u[8];
  unpack_some<bits, first, slice0>(line, p.book, u);
  I factors[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
  if constexpr (level && (closes || !waits)) {
    UNROLL for (int i = 0; i < slices; i++) {
      const I each = ilevels(p.head + at + 8 * (slice0 + i));
      factors[i] = ipair(each, each);
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    const uint8_t *row = slots + slot * m, *start = row + kStarts + 4 * (parts * b + part);
    I q[4];
    UNROLL for (int i = 0; i < 4; i++) q[i] = quad(reinterpret_cast<const int8_t*>(row + 32 * b + 4 * (first + i)));
    UNROLL for (int i = 0; i < slices; i++) {
      const int slice = slice0 + i;
      I words[chains];
      UNROLL for (int c = 0; c < chains; c++) {
        if constexpr (room_of(bits) > 2) words[c] = four_quads(u + i + c, q);
        if constexpr (waits && opens) { pin(words[c]), s.half[m][slice][c] = words[c]; }
        if constexpr (waits && closes) words[c] = add16(words[c], s.half[m][slice][c]);
      }
      if constexpr (waits && opens) continue;
      const I factor = level ? _mm256_mullo_epi16(factors[i], iset(int_at(row + kFactors + 4 * b))) : factors[i];
      I found;
      if constexpr (room_of(bits) > 2) found = _mm256_madd_epi16(words[0], factor);
      else found = iadd(_mm256_madd_epi16(two_quads(u + i, q), factor), _mm256_madd_epi16(two_quads(u + i + 4, q + 2), factor));
      if constexpr (nibbles) found = iadd(found, _mm256_madd_epi16(words[1], _mm256_slli_epi16(factor, 4)));
      if constexpr (level) {
        s.whole[m][slice] = iadd(s.whole[m][slice], found);
        pin(s.whole[m][slice]);
        continue;
      }
      found = iadd(found, opens || waits ? iset(int_at(start)) : s.half[m][slice][0]);
      if constexpr (!closes) {
        pin(found);
        s.half[m][slice][0] = found;
        continue;
      }
      const V scale = vmul(vload(p.scales + at + 8 * slice), vset(load_single(row + kScales + 4 * b)));
      V total = vfma(to_float(found), scale, s.total[m][slice]);
      if constexpr (shifted && part == parts - 1) {
        UNROLL for (int n = 0; n < parts; n++)
          total = vfma(vload(p.offsets + at + (n - part) * kTile + 8 * slice),
                       vset(load_single(start + 32 * parts + 4 * (n - part))), total);
      }
      pin(total);
      s.total[m][slice] = total;
    }
  }
  __asm__ volatile("" ::: "memory");
  if constexpr (first == 0) add_quads<bits, parts, shifted, level, M, 4, slice0>(p, line, slots, b, block, s);
  else if constexpr (nibbles && slice0 == 0) add_quads<bits, parts, shifted, level, M, 0, 1>(p, line, slots, b, block, s);
}
template <int bits, int parts, bool shifted, bool level, int M>
INLINE void multiply_pairs(const Part& p) {
  constexpr int lines = bits == kLookup ? 4 : bits;
  constexpr size_t slot = slot_bytes(level, parts, shifted);
  for (int64_t super = 0; super < p.s.supers; super++) {
    const int64_t from = super * 8, blocks = p.s.blocks - from < 8 ? p.s.blocks - from : 8;
    const uint8_t* slots = p.slots + p.stride * size_t(super);
    Sums<level, M> s;
    if (level) prefetch_head(p, super);
    UNROLL for (int m = 0; m < M; m++) {
      UNROLL for (int slice = 0; slice < 2; slice++) {
        if (level) s.whole[m][slice] = izero();
        else s.total[m][slice] = vload(p.sums + kTile * m + 8 * slice);
      }
    }
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* line = p.codes + 64 * lines * (from + b);
      UNROLL for (int i = 0; i < lines; i++) prefetch(line + kAhead + 64 * i);
      add_quads<bits, parts, shifted, level, M, 0, 0>(p, line, slots, b, from + b, s);
    }
    for (int slice = 0; slice < 2; slice++) {
      if constexpr (level) {
        const Finish<parts, shifted> finish(p, super, 8 * slice);
        I pairs[8];
        if constexpr (!shifted)  // codes lie above their values
          load_pairs<parts>(p.head + from * parts * kTile + 8 * slice, blocks, true, pairs);
        UNROLL for (int m = 0; m < M; m++) {
          I sum = s.whole[m][slice];
          if constexpr (!shifted) {
            constexpr int log = bits == kLookup ? 7 : bits - 1;
            sum = _mm256_sub_epi32(sum, _mm256_slli_epi32(add_up_pairs(pairs, slots + slot * m), log));
          }
          finish.add(sum, slots + slot * m, p.sums + kTile * m + 8 * slice);
        }
      } else {
        UNROLL for (int m = 0; m < M; m++) vstore(p.sums + kTile * m + 8 * slice, s.total[m][slice]);
      }
    }
  }
}
template <int bits, int parts, bool minima, int M>
static void multiply_levels(const Part& p) { multiply_pairs<bits, parts, minima, true, M>(p); }
template <int bits, int parts, bool shifted, int M>
static void multiply_codes(const Part& p) { multiply_pairs<bits, parts, shifted, false, M>(p); }
