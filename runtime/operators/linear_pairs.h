// Products of pairs, for AVX2 without VNNI: included by linear_tile.h, in the place of its products of quads.
//
// `vpmaddubsw` adds up two products in 16 bits, where all 8 quads of a block fit if codes have 4 bits, 4 if 5, 2 if 6.
// For those of 8 bits and values of codebooks there is no room: |code| is multiplied with the activation in the code's
// sign. A sub-block scale times k, or ones, is what `vpmaddwd` then multiplies with.
//
// Both slices of a tile at once, so that a broadcast serves 16 outputs. A half of a block, or a quarter where there are
// signs, is unpacked and multiplied for all rows, then the next. What rows have so far waits in the L1 cache.
constexpr bool has_signs(int bits) { return bits == kLookup || bits == 8; }
constexpr int quads_in_16_bits(int bits) { return has_signs(bits) ? 1 : bits <= 4 ? 8 : bits == 5 ? 4 : 2; }

INLINE I add16(I a, I b) { return _mm256_add_epi16(a, b); }
template <int bits, int q, int count>
INLINE void unpack_quads(const uint8_t* line, const uint8_t* lut, U* u) {
  u[0] = unpack_quad<bits, q>(line, lut), u[1] = unpack_quad<bits, q>(line + 32, lut);
  if constexpr (count > 1) unpack_quads<bits, q + 1, count - 1>(line, lut, u + 2);
}
INLINE I signed_quad(U u, U size, I q, I factor) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(q, u)), factor);
}
INLINE I two_quads(const U* u, const I* q) {
  return add16(_mm256_maddubs_epi16(u[0], q[0]), _mm256_maddubs_epi16(u[2], q[1]));
}
INLINE I four_quads(const U* u, const I* q) { return add16(two_quads(u, q), two_quads(u + 4, q + 2)); }

template <bool k_quant, int M>
struct Sums {  // of M rows: int32 over 256 inputs, or floats; and what a block has so far
  I whole[M][2], block[M][2];
  V total[M][2];
};
// The quads of a block from `first` on, for all rows.
template <int bits, int parts, bool has_offset, bool k_quant, int M, int first>
INLINE void add_quads(
    const Part& p, const uint8_t* line, const uint8_t* slots, int64_t b, int64_t block, Sums<k_quant, M>& s) {
  constexpr int step = has_signs(bits) ? 2 : 4, whole = 8 / parts, part = first / whole;
  constexpr bool is_first = first % whole == 0, is_last = (first + step) % whole == 0;
  constexpr bool waits = quads_in_16_bits(bits) == 8 && parts == 1;  // in 16 bits, for the block's other half
  constexpr size_t slot = slot_bytes(k_quant, parts, has_offset);
  const size_t at = size_t((block * parts + part) * kNr);
  U u[8];
  unpack_quads<bits, first, step>(line, p.lut, u);
  if constexpr (has_signs(bits)) {
    UNROLL for (int i = 0; i < 4; i++) u[4 + i] = _mm256_abs_epi8(u[i]);
  }
  I factors[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
  if constexpr (k_quant && (is_last || !waits)) {
    UNROLL for (int slice = 0; slice < 2; slice++) {
      const I each = load_int8(p.head + at + 8 * slice);
      factors[slice] = ipair(each, each);
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    const uint8_t *row = slots + slot * m, *start = row + kSlotCompensation + 4 * (parts * b + part);
    I q[step];
    UNROLL for (int i = 0; i < step; i++) q[i] = quad(reinterpret_cast<const int8_t*>(row + 32 * b + 4 * (first + i)));
    UNROLL for (int slice = 0; slice < 2; slice++) {
      const U* of = u + slice;
      I found, &block_sum = s.block[m][slice];
      if constexpr (waits && is_first) {
        block_sum = four_quads(of, q);
        pin(block_sum);
        continue;
      }
      I factor = factors[slice];
      if (k_quant) factor = _mm256_mullo_epi16(factor, iset(int_at(row + kSlotFactors + 4 * b)));
      if constexpr (waits) found = _mm256_madd_epi16(add16(four_quads(of, q), block_sum), factor);
      else if constexpr (has_signs(bits))
        found = iadd(signed_quad(of[0], of[4], q[0], factor), signed_quad(of[2], of[6], q[1], factor));
      else if constexpr (quads_in_16_bits(bits) == 2)
        found = iadd(_mm256_madd_epi16(two_quads(of, q), factor), _mm256_madd_epi16(two_quads(of + 4, q + 2), factor));
      else found = _mm256_madd_epi16(four_quads(of, q), factor);
      if constexpr (k_quant) {
        s.whole[m][slice] = iadd(s.whole[m][slice], found);
        pin(s.whole[m][slice]);
        continue;
      }
      if constexpr (!is_first && !waits) found = iadd(found, block_sum);
      else if constexpr (kCompensates<bits, has_offset>) found = iadd(found, iset(int_at(start)));
      if constexpr (!is_last) {
        pin(found);
        block_sum = found;
        continue;
      }
      const V scale = vmul(vload(p.scales + at + 8 * slice), vset(load_single(row + kSlotScales + 4 * b)));
      V total = vfma(to_float(found), scale, s.total[m][slice]);
      if constexpr (has_offset && part == parts - 1) {
        UNROLL for (int n = 0; n < parts; n++) total = vfma(vload(p.offsets + at + (n - part) * kNr + 8 * slice),
            vset(load_single(start + 32 * parts + 4 * (n - part))), total);
      }
      pin(total);
      s.total[m][slice] = total;
    }
  }
  __asm__ volatile("" ::: "memory");
  if constexpr (first + step < 8)
    add_quads<bits, parts, has_offset, k_quant, M, first + step>(p, line, slots, b, block, s);
}
template <int bits, int parts, bool has_offset, bool k_quant, int M>
static void multiply_rows(const Part& p) {
  constexpr int lines = bits == kLookup ? 4 : bits;
  constexpr size_t slot = slot_bytes(k_quant, parts, has_offset);
  for (int64_t super_block = 0; super_block < p.s.super_blocks; super_block++) {
    const int64_t from = super_block * 8, blocks = p.s.blocks - from < 8 ? p.s.blocks - from : 8;
    const uint8_t* slots = p.slots + p.stride * size_t(super_block);
    Sums<k_quant, M> s;
    UNROLL for (int m = 0; m < M; m++) {
      UNROLL for (int slice = 0; slice < 2; slice++) {
        if (k_quant) s.whole[m][slice] = izero();
        else s.total[m][slice] = vload(p.sums + kNr * m + 8 * slice);
      }
    }
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* line = p.codes + 64 * lines * (from + b);
      UNROLL for (int i = 0; i < lines; i++) prefetch(line + kAhead + 64 * i);
      add_quads<bits, parts, has_offset, k_quant, M, 0>(p, line, slots, b, from + b, s);
    }
    for (int slice = 0; slice < 2; slice++) {
      if constexpr (k_quant) {
        const Finish<parts, has_offset> finish(p, super_block, 8 * slice);
        I pairs[8];
        constexpr bool above = !has_offset && !has_signs(bits);  // codes lie above their values by half of their range
        if constexpr (above) load_pairs<parts>(p.head + from * parts * kNr + 8 * slice, blocks, true, pairs);
        UNROLL for (int m = 0; m < M; m++) {
          I sum = s.whole[m][slice];
          if constexpr (above)
            sum = _mm256_sub_epi32(sum, _mm256_slli_epi32(add_up_pairs(pairs, slots + slot * m), bits - 1));
          finish.add(sum, slots + slot * m, p.sums + kNr * m + 8 * slice);
        }
      } else {
        UNROLL for (int m = 0; m < M; m++) vstore(p.sums + kNr * m + 8 * slice, s.total[m][slice]);
      }
    }
  }
}
