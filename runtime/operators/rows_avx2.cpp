// Rows of logits with AVX2 and FMA.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "rows.h"

#define TARGET __attribute__((target("avx2,fma")))
#define LANES 4
#define KERNELS rows_avx2
#define FMA(a, b, c) ((V)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#include "rows_tile.h"
#endif
