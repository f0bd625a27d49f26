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

bool multiply_tiles(const Product& p, int64_t first, int64_t last) {
  constexpr size_t kRowBytes = 512 << 10;  // of activations that are kept at hand while tiles pass
  int64_t step = int64_t(kRowBytes / (p.group_bytes() + 1));
  step = step < 2 ? 2 : step > 32 ? 32 : step;
  if (step > p.groups) step = p.groups;
  void* room = scratch(work_bytes(step * p.capacity), 1);
  for (int64_t group = 0; room && group < p.groups; group += step)
    kernels().multiply(p, first, last, group, group + step < p.groups ? group + step : p.groups, room);
  return room;
}

namespace {
constexpr size_t kPartBytes = 64 << 10, kMostParts = 32;

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
  p.rows = rows;
  p.cut(set.most);
  p.arranged = static_cast<uint8_t*>(scratch(size_t(p.groups) * p.group_bytes() + 1, 0));
  REQUIRE(p.arranged, "out of memory");
  const size_t shares = rows * layout.K < 1 << 16 ? 1 : size_t(p.groups < 8 ? p.groups : 8);
  TRY(parallel(context, shares, [&](size_t i) {
    set.arrange(p, p.groups * int64_t(i) / int64_t(shares), p.groups * int64_t(i + 1) / int64_t(shares));
  }));
  size_t parts = size_t(layout.tiles) * layout.tile_bytes * size_t(p.groups) / kPartBytes;
  if (parts > kMostParts) parts = kMostParts;
  if (parts > size_t(layout.tiles)) parts = size_t(layout.tiles);
  if (parts < 1) parts = 1;
  bool failed = false;
  TRY(parallel(context, parts, [&](size_t part) {
    const int64_t first = layout.tiles * int64_t(part) / int64_t(parts), last = layout.tiles * int64_t(part + 1) / int64_t(parts);
    if (!multiply_tiles(p, first, last)) failed = true;
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
