// Rows of logits with AVX-512.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "rows.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define LANES 8
#define KERNELS rows_avx512
#define FMA(a, b, c) ((V)_mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c)))
#include "rows_tile.h"
#endif
