// Rows of logits in vectors of 16 bytes, which every processor has.
#include "rows.h"

#define TARGET
#define LANES 2
#define KERNELS rows_portable
#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA(a, b, c) ((V)vfmaq_f64((float64x2_t)(c), (float64x2_t)(a), (float64x2_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#include "rows_tile.h"
