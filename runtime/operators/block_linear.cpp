// x [..., K] times a packed weight [N, K], and a bias [N] if there is one: [..., N].
#include "block_weight.h"
#include "cpu.h"
#include "linear.h"

namespace specexport {
const Kernels& kernels() {
  switch (isa()) {
#if defined(__x86_64__) || defined(_M_X64)
    case Isa::amx:
    case Isa::avx512vnni: return avx512_kernels;
    case Isa::avxvnni: return avxvnni_kernels;
    case Isa::avx2: return avx2_kernels;
#elif defined(__aarch64__)
    case Isa::neon_dot:
    case Isa::neon_i8mm:
#endif
    default: return portable_kernels;
  }
}

namespace {
constexpr size_t kPartBytes = 64 << 10, kMostParts = 32;
constexpr int64_t kRowBytes = 512 << 10;  // of activations that are kept at hand while tiles pass

Status* run(const void* kernel, KernelContext* context) {
  const Weight& weight = *static_cast<const Weight*>(kernel);
  const Layout& layout = weight.layout;
  Tensor x, packed, bias;
  TRY(input(context, 0, x));
  TRY(input(context, 1, packed));
  TRY(input(context, 2, bias));
  TRY(check(weight, packed));
  if (x.rank < 1 || x.dims[x.rank - 1] != layout.K) return bad_shape("x", x, "[..., %lld]", (long long)layout.K);
  if (!bias.absent && (bias.rank != 1 || bias.dims[0] != layout.N))
    return bad_shape("bias", bias, "[%lld]", (long long)layout.N);
  int64_t dims[kMaxRank], rows = 1;
  for (size_t i = 0; i + 1 < x.rank; i++) rows *= dims[i] = x.dims[i];
  dims[x.rank - 1] = layout.N;
  void* out;
  TRY(output(context, 0, dims, x.rank, &out));
  if (!rows || !layout.N) return nullptr;

  Product p = {};
  p.layout = layout;
  p.weight = packed.as<uint8_t>(), p.x = x.as<float>(), p.out = static_cast<float*>(out);
  p.bias = bias.absent ? nullptr : bias.as<float>();
  const Kernels& set = kernels();
  if (!layout.format.is_float()) {
    const size_t blocks = size_t(rows * layout.blocks);
    char* room = static_cast<char*>(scratch(blocks * (kBlock + 4 + 4 * layout.format.parts()), 0));
    REQUIRE(room || !blocks, "out of memory");
    p.values = reinterpret_cast<int8_t*>(room);
    p.scales = reinterpret_cast<float*>(room + blocks * kBlock);
    p.shares = reinterpret_cast<int32_t*>(p.scales + blocks);
    const size_t parts = blocks < 2048 || rows < 2 ? 1 : size_t(rows < 8 ? rows : 8);
    TRY(parallel(context, parts, [&](size_t part) {
      set.quantize(p, rows * int64_t(part) / int64_t(parts), rows * int64_t(part + 1) / int64_t(parts));
    }));
  }
  // Parts have whole tiles. Rows that pass a part's tiles together are few enough to stay in the cache.
  const int64_t row_bytes = layout.K * (layout.format.is_float() ? 4 : 1) + 1;
  int64_t step = kRowBytes / row_bytes / 8 * 8;
  step = step < 16 ? 16 : step > 256 ? 256 : step;
  if (step > rows) step = rows;
  const size_t work = size_t(layout.tiles) * layout.tile_bytes * size_t(1 + rows / 8);
  size_t parts = work / kPartBytes;
  if (parts > kMostParts) parts = kMostParts;
  if (parts > size_t(layout.tiles)) parts = size_t(layout.tiles);
  if (parts < 1) parts = 1;
  bool failed = false;
  TRY(parallel(context, parts, [&](size_t part) {
    const int64_t first = layout.tiles * int64_t(part) / int64_t(parts), last = layout.tiles * int64_t(part + 1) / int64_t(parts);
    void* room = scratch(work_bytes(step), 1);
    if (!room) {
      failed = true;
      return;
    }
    for (int64_t row = 0; row < rows; row += step)
      set.multiply(p, first, last, row, row + step < rows ? row + step : rows, room);
  }));
  REQUIRE(!failed, "out of memory");
  return nullptr;
}
}  // namespace

void define_block_linear(Operator& op) {
  op.name = "BlockLinear";
  op.inputs[0] = {ort::kFloat, false};
  op.inputs[1] = {ort::kUint8, false};
  op.inputs[2] = {ort::kFloat, true};
  op.num_inputs = 3;
  op.outputs[0] = {ort::kFloat, false};
  op.num_outputs = 1;
  op.make = make_weight;
  op.run = run;
}
}  // namespace specexport
