// The kernels of tiles over AVX-512's vectors, without AMX.
#include "../../runtime/operators/linear_avx512.cpp"
#include "emulated_tiles.h"

#if defined(__x86_64__)
namespace specexport {
const LinearKernels tiles_and_avx512 = {
    avx512::kMr, avx512::kMrFloats, avx512::pack, avx512::multiply_with<EmulatedTiles>, avx512::kUnitRows, 16};
}
#endif
