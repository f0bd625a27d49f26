// Attention in vectors of 16 bytes, which every processor has.
#include <string.h>

#include "attention.h"

#define TARGET
#define LANES 4
#define QUERIES 3  // against 16 entries 12 sums + 4 keys = 16 registers, as SSE has
#define KERNELS attention_portable
#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA(a, b, c) ((V)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#include "attention_tile.h"
