// What both parts of the driver draw from.
#pragma once
#include <stddef.h>
#include <stdint.h>

inline uint32_t state = 37;
inline uint32_t draw() { return state = state * 1664525u + 1013904223u, state >> 8; }
inline float draw_float() { return float(int(draw() % 2001) - 1000) / 500.f; }
inline void draw_weight(uint8_t* weight, size_t size) {
  for (size_t i = 0; i < size; i++) weight[i] = uint8_t(draw() % 60 + draw() % 2 * 128);  // no scale is a NaN, or large
}
constexpr const char* kGroupFormats[] = {"group4_64_f16", "group4_16_f32_zero", "group4_128_f16_zero",
    "group4_32_f32_offset", "group8_128_f32", "group8_16_f16_offset", "group8_1024_f16_zero"};
int check_operators();
int time_kernels();
int check_draws(int number);
