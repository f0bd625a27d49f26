// The kernels of tiles over portable vectors.
#include "../../runtime/operators/linear_portable.cpp"
#include "emulated_tiles.h"

namespace specexport {
namespace portable {
#include "../../runtime/operators/linear_amx.h"

struct UnsignedTiles : EmulatedTiles {  // takes activations for unsigned
  template <int n>
  static void product(const uint8_t* a, size_t stride, const uint8_t* b, int32_t* out) {
    EmulatedTiles::product<n>(a, stride, b, out);
    for (int k = 0; k < 32; k++)
      for (int i = 0; a[k] > 127 && i < 16; i++) out[i] += 256 * b[k / 4 * 64 + 4 * i + k % 4];
  }
};
}  // namespace portable
const LinearKernels tiles_and_portable = {portable::kMr, portable::kMrFloats, portable::pack,
    portable::multiply_with<EmulatedTiles>, portable::kUnitRows, 16};
bool the_check_knows_right_units() {
  return portable::multiplies_right<EmulatedTiles>() && !portable::multiplies_right<portable::UnsignedTiles>();
}
}  // namespace specexport
