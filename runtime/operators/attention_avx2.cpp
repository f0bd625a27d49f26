// Attention with AVX2 and FMA.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "attention.h"

#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define QUERIES 6  // against 16 entries 12 sums + 2 keys + 1 = 15 of 16 ymm
#define KERNELS attention_avx2
#define FMA(a, b, c) ((V)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#include "attention_tile.h"
#endif
