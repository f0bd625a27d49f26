// Attention with AVX-512.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "attention.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define LANES 16
#define QUERIES 6  // against 64 entries 24 sums + 4 keys + 1 = 29 of 32 zmm
#define KERNELS attention_avx512
#define FMA(a, b, c) ((V)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#include "attention_tile.h"
#endif
