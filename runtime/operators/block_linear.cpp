// x [..., K] times a packed weight [N, K], and a bias [N] if there is one: [..., N].
#include "block_weight.h"
#include "kernels.h"

namespace specexport {
bool multiply_tiles(const Product& p, int64_t first, int64_t last, int64_t group, int64_t last_group) {
  constexpr size_t kNearBytes = 512 << 10;  // of activations that stay while tiles pass: half of an L2 cache of 1 MB
  int64_t step = int64_t(kNearBytes / (p.group_bytes() + 1));
  step = step < 2 ? 2 : step > 32 ? 32 : step;
  if (step > last_group - group) step = last_group - group;
  void* work = scratch(Scratch::part, work_bytes(step * p.capacity));
  for (; work && group < last_group; group += step)
    kernels().linear.multiply(p, first, last, group, group + step < last_group ? group + step : last_group, work);
  return work;
}

namespace {
constexpr size_t kPackedBytes = 8 << 20;  // of rows that are packed together

// Some rows. Parts have whole tiles, and whole groups of rows where tiles are too few.
Status* multiply(KernelContext* context, Product& p) {
  p.split(kernels().linear.group_rows(p.layout, p.rows));
  const size_t groups = size_t(p.groups), tiles = size_t(p.layout.tiles);
  REQUIRE(allocate(Scratch::step, Array{p.packed_rows, int64_t(groups * p.group_bytes())}), "out of memory");
  const size_t parts = p.rows * p.layout.K < 1 << 16 ? 1 : min(groups, size_t(8));
  TRY(parallel(context, parts,
      [&](size_t i) { kernels().linear.pack(p, int64_t(groups * i / parts), int64_t(groups * (i + 1) / parts)); }));
  size_t wanted = min(tiles * p.layout.tile_bytes * groups / kPartBytes, kMaxParts);
  if (wanted < 1) wanted = 1;
  const size_t columns = min(wanted, tiles), rows = min(wanted / columns, groups);
  return parallel_with_memory(context, columns * rows, [&](size_t part) {
    const size_t column = part % columns, row = part / columns;
    return multiply_tiles(p, int64_t(tiles * column / columns), int64_t(tiles * (column + 1) / columns),
        int64_t(groups * row / rows), int64_t(groups * (row + 1) / rows));
  });
}

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
  p.weight = packed.as<uint8_t>();
  p.bias = bias.absent ? nullptr : bias.as<float>();
  const int64_t step = int64_t(kPackedBytes / (row_bytes(layout) + 1) / 64 * 64 + 64);
  for (int64_t row = 0; row < rows; row += step) {
    p.rows = rows - row < step ? rows - row : step;
    p.x = x.as<float>() + row * layout.K;
    p.out = static_cast<float*>(out) + row * layout.N;
    TRY(multiply(context, p));
  }
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
