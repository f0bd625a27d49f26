// NEON with dot products (ARMv8.2). A tile is four slices; codes are signed, as these products want them.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "linear.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace specexport {
namespace neon {
// Registers: 8 sums + 8 unpacked + 3 = 19 of 32; of floats 16 sums (two chains) + 2 weights + 1 = 19. Not timed on Arm.
constexpr int kLanes = 4, kMr = 8, kMrFloats = 8, kAhead = 4096;
constexpr bool kSigned = true, kPairs = false;
using V = float32x4_t;
using I = int32x4_t;
using U = uint8x16_t;

INLINE V vload(const float* p) { return vld1q_f32(p); }
INLINE void vstore(float* p, V v) { vst1q_f32(p, v); }
INLINE V vset(float x) { return vdupq_n_f32(x); }
INLINE V vmul(V a, V b) { return vmulq_f32(a, b); }
INLINE V vfma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
INLINE I izero() { return vdupq_n_s32(0); }
INLINE I iset(int32_t x) { return vdupq_n_s32(x); }
INLINE I iadd(I a, I b) { return vaddq_s32(a, b); }
INLINE V to_float(I a) { return vcvtq_f32_s32(a); }
INLINE U uload(const uint8_t* p) { return vld1q_u8(p); }
INLINE U uand(U a, int mask) { return vandq_u8(a, vdupq_n_u8(uint8_t(mask))); }
INLINE U uxor(U a, int mask) { return veorq_u8(a, vdupq_n_u8(uint8_t(mask))); }
INLINE U uor(U a, U b) { return vorrq_u8(a, b); }
template <int n>
INLINE U ushl(U a) {
  return vshlq_n_u8(a, n);
}
template <int n>
INLINE U ushr(U a) {
  return vshrq_n_u8(a, n);
}
INLINE U ulookup(const uint8_t* lut, U a) { return uxor(vqtbl1q_u8(vld1q_u8(lut), a), 0x80); }
INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

template <int bits>
INLINE I dot(I sum, const U* u, const int8_t* values) {
  const int8x16_t quads = vld1q_s8(values);
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_u8(u[0]), quads, 0);
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_u8(u[1]), quads, 1);
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_u8(u[2]), quads, 2);
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(u[3]), quads, 3);
}
INLINE V load_halves(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE V load_bf16(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); }
INLINE I load_uint8(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
INLINE I load_int8(const uint8_t* p) { return I{int8_t(p[0]), int8_t(p[1]), int8_t(p[2]), int8_t(p[3])}; }
INLINE I imadd(I a, I b, I sum) { return vmlaq_s32(sum, a, b); }
INLINE I iscaled(I scale, I k) { return vmulq_s32(scale, k); }
INLINE I ipair(I even, I odd) { return vsliq_n_s32(even, odd, 16); }
INLINE I add_pairs(I pairs, int32_t two, I sum) {
  const I even = vshrq_n_s32(vshlq_n_s32(pairs, 16), 16), odd = vshrq_n_s32(pairs, 16);
  return imadd(odd, iset(two >> 16), imadd(even, iset(int16_t(two)), sum));
}

INLINE int32_t largest_bits(const float* x) {
  I largest = izero();
  for (int i = 0; i < kBlockInputs; i += 4)
    largest = vmaxq_s32(largest, vandq_s32(vreinterpretq_s32_f32(vload(x + i)), iset(0x7fffffff)));
  return vmaxvq_s32(largest);
}
INLINE void round_block(const float* x, float inverse, int8_t* values, int32_t* sums) {
  for (int part = 0; part < 2; part++) {
    I rounded[4];
    for (int i = 0; i < 4; i++) rounded[i] = vcvtnq_s32_f32(vmul(vload(x + 16 * part + 4 * i), vset(inverse)));
    const int16x8_t low = vcombine_s16(vmovn_s32(rounded[0]), vmovn_s32(rounded[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(rounded[2]), vmovn_s32(rounded[3]));
    vst1q_s8(values + 16 * part, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    sums[part] = vaddvq_s32(iadd(iadd(rounded[0], rounded[1]), iadd(rounded[2], rounded[3])));
  }
}
template <class T>
INLINE void pin(T&) {}
#include "linear_tile.h"
}  // namespace neon
const LinearKernels linear_neon = {neon::kMr, neon::kMrFloats, neon::pack, neon::multiply};
}  // namespace specexport
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
