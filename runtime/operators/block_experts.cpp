// What the experts of each token give of it, weighted and summed up: x [T, H] -> [T, H].
//
// Pairs of a token and an expert are sorted by expert, so that an expert's weights are read once for all of its tokens.
// A pair is a row of the products, whose bits know no other row; a token's pairs are added up in the order of its list.
#include "block_weight.h"
#include "gating.h"
#include "kernels.h"

namespace specexport {
namespace {
constexpr size_t kMaxActivationBytes = 64 << 20;  // of activations at a time: long prompts are worked on in pieces
constexpr int64_t kMaxExperts = 1 << 20;

struct Experts {
  int64_t count, H;
  Gating gating;
  Layout gate_up, down;  // of one expert
};

// A matrix of every expert, and the rows that these are multiplied with.
struct Matrices {
  const Layout& layout;
  const uint8_t* weight = nullptr;
  const float* bias = nullptr;
  float *x = nullptr, *out = nullptr;
  uint8_t* packed_rows = nullptr;
};

// An expert that some tokens have chosen: its rows, and how many groups, and rows in these, others have before it.
struct Chosen {
  int64_t expert, first, rows, groups, groups_before, packed_before;
};

struct Step {
  const Experts& experts;
  const float *x, *expert_weights;
  const int64_t* ids;
  int64_t tokens, per_token, num_chosen = 0, groups = 0;
  Chosen* chosen = nullptr;
  int64_t *token_of = nullptr, *row_of = nullptr;  // of a row, its token; of a pair, its row
};

Product product(const Matrices& matrices, const Chosen& c) {
  Product p = {};
  p.layout = matrices.layout;
  p.weight = matrices.weight + size_t(c.expert * matrices.layout.tiles) * matrices.layout.tile_bytes;
  p.bias = matrices.bias ? matrices.bias + c.expert * matrices.layout.N : nullptr;
  p.x = matrices.x + c.first * matrices.layout.K, p.out = matrices.out + c.first * matrices.layout.N;
  p.rows = c.rows, p.groups = c.groups, p.capacity = (c.rows + c.groups - 1) / c.groups;
  p.packed_rows = matrices.packed_rows + size_t(c.packed_before) * row_bytes(p.layout);
  return p;
}

// A part of the groups of all experts, or of their tiles, each of which counts as often as its expert has groups.
template <class F>
void split(const Step& step, int64_t tiles, size_t part, size_t parts, const F& work) {
  const int64_t each = tiles ? tiles : 1, all = step.groups * each;
  const int64_t from = all * int64_t(part) / int64_t(parts), to = all * int64_t(part + 1) / int64_t(parts);
  for (int64_t i = 0; i < step.num_chosen; i++) {
    const Chosen& c = step.chosen[i];
    const int64_t size = tiles ? c.groups : 1, number = tiles ? tiles : c.groups, start = c.groups_before * each;
    const auto place = [&](int64_t unit) {
      const int64_t at = unit <= start ? 0 : (unit - start + size - 1) / size;
      return at < number ? at : number;
    };
    if (place(from) < place(to)) work(c, place(from), place(to));
  }
}

// Rows of groups are made by `fill`, and packed for the products.
template <class F>
Status* pack(KernelContext* context, const Step& step, const Matrices& matrices, const F& fill) {
  const bool small = step.tokens * step.per_token * matrices.layout.K < 1 << 15;
  const size_t parts = small ? 1 : size_t(step.groups < 16 ? step.groups : 16);
  return parallel(context, parts, [&](size_t part) {
    split(step, 0, part, parts, [&](const Chosen& c, int64_t first, int64_t last) {
      const Product p = product(matrices, c);
      for (int64_t row = first * p.capacity; row < last * p.capacity && row < c.rows; row++) fill(c.first + row);
      kernels().linear.pack(p, first, last);
    });
  });
}

Status* multiply(KernelContext* context, const Step& step, const Matrices& matrices) {
  const Layout& layout = matrices.layout;
  size_t parts = size_t(step.groups * layout.tiles) * layout.tile_bytes / kPartBytes;
  parts = parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : parts;
  return parallel_with_memory(context, parts, [&](size_t part) {
    bool done = true;
    split(step, layout.tiles, part, parts, [&](const Chosen& c, int64_t first, int64_t last) {
      const Product p = product(matrices, c);
      done = multiply_tiles(p, first, last, 0, p.groups) && done;
    });
    return done;
  });
}

Status* sum_up(KernelContext* context, const Step& step, const float* given, float* out) {
  const int64_t H = step.experts.H, tokens = step.tokens;
  const size_t parts = tokens * step.per_token * H < 1 << 16 ? 1 : size_t(tokens < 16 ? tokens : 16);
  return parallel(context, parts, [&](size_t part) {
    for (int64_t t = tokens * int64_t(part) / int64_t(parts); t < tokens * int64_t(part + 1) / int64_t(parts); t++) {
      float* sums = out + t * H;
      memset(sums, 0, sizeof(float) * size_t(H));
      for (int64_t pair = t * step.per_token; pair < (t + 1) * step.per_token; pair++) {
        const float weight = step.expert_weights[pair], *values = given + step.row_of[pair] * H;
        for (int64_t i = 0; i < H; i++) sums[i] += weight * values[i];
      }
    }
  });
}

// Sorts the pairs by expert. `starts` has a number for each expert.
void sort(Step& step, int64_t* starts) {
  const int64_t pairs = step.tokens * step.per_token;
  memset(starts, 0, sizeof(int64_t) * size_t(step.experts.count));
  for (int64_t pair = 0; pair < pairs; pair++) starts[step.ids[pair]]++;
  int64_t row = 0, packed = 0;
  for (int64_t expert = 0; expert < step.experts.count; expert++) {
    Product p = {};
    p.rows = starts[expert];
    starts[expert] = row;
    if (!p.rows) continue;
    const int64_t most = kernels().linear.group_rows(step.experts.gate_up, p.rows);
    const int64_t other = kernels().linear.group_rows(step.experts.down, p.rows);
    p.split(min(most, other));
    step.chosen[step.num_chosen++] = {expert, row, p.rows, p.groups, step.groups, packed};
    step.groups += p.groups, row += p.rows, packed += p.groups * p.capacity;
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t at = starts[step.ids[pair]]++;
    step.token_of[at] = pair / step.per_token, step.row_of[pair] = at;
  }
}

Status* run_tokens(KernelContext* context, Step& step, Matrices& first, Matrices& last, float* out) {
  const Experts& experts = step.experts;
  const int64_t pairs = step.tokens * step.per_token, count = experts.count, H = experts.H;
  const int64_t bytes = int64_t(max(row_bytes(first.layout), row_bytes(last.layout)));
  int64_t* starts;
  REQUIRE(allocate(Scratch::step, Array{starts, count}, Array{step.chosen, min(count, pairs)},
              Array{step.token_of, pairs}, Array{step.row_of, pairs}, Array{first.x, pairs * H},
              Array{first.out, pairs * first.layout.N}, Array{last.x, pairs * last.layout.K},
              Array{first.packed_rows, 2 * pairs * bytes}),  // an expert's groups hold fewer than twice its rows
      "out of memory");
  last.out = first.x, last.packed_rows = first.packed_rows;  // nobody needs them any more by then
  sort(step, starts);
  TRY(pack(context, step, first,
      [&](int64_t row) { memcpy(first.x + row * H, step.x + step.token_of[row] * H, sizeof(float) * size_t(H)); }));
  TRY(multiply(context, step, first));
  TRY(pack(context, step, last, [&](int64_t row) {
    gate(experts.gating, first.out + row * first.layout.N, last.x + row * experts.gating.width);
  }));
  TRY(multiply(context, step, last));
  return sum_up(context, step, last.out, out);
}

Status* check(const char* what, const Tensor& tensor, int64_t rows, int64_t columns) {
  if (tensor.rank == 2 && tensor.dims[0] == rows && tensor.dims[1] == columns) return nullptr;
  return bad_shape(what, tensor, "[%lld, %lld]", (long long)rows, (long long)columns);
}

Status* read(
    KernelContext* context, size_t at, const char* name, const char* bias_name, int64_t count, Matrices& matrices) {
  Tensor weight, bias;
  TRY(input(context, at, weight));
  TRY(input(context, at + 1, bias));
  TRY(check(name, weight, count * matrices.layout.tiles, int64_t(matrices.layout.tile_bytes)));
  if (!bias.absent) TRY(check(bias_name, bias, count, matrices.layout.N));
  matrices.weight = weight.as<uint8_t>(), matrices.bias = bias.absent ? nullptr : bias.as<float>();
  return nullptr;
}

Status* run(const void* kernel, KernelContext* context) {
  const Experts& experts = *static_cast<const Experts*>(kernel);
  Tensor x, ids, weights;
  Matrices first = {experts.gate_up}, last = {experts.down};
  TRY(input(context, 0, x));
  TRY(input(context, 1, ids));
  TRY(input(context, 2, weights));
  TRY(read(context, 3, "gate_up", "gate_up_bias", experts.count, first));
  TRY(read(context, 5, "down", "down_bias", experts.count, last));
  if (x.rank != 2 || x.dims[1] != experts.H) return bad_shape("x", x, "[..., %lld]", (long long)experts.H);
  const int64_t tokens = x.dims[0], per_token = ids.rank == 2 ? ids.dims[1] : 0;
  REQUIRE(per_token <= kMaxExperts, "a token has too many experts");
  TRY(check("expert_ids", ids, tokens, per_token));
  TRY(check("expert_weights", weights, tokens, per_token));
  for (int64_t pair = 0; pair < tokens * per_token; pair++) {
    const long long id = ids.as<int64_t>()[pair];
    if (id >= 0 && id < experts.count) continue;
    return refuse("token %lld has the expert %lld, and there are %lld", (long long)(pair / per_token), id,
        (long long)experts.count);
  }
  void* out;
  TRY(output(context, 0, x.dims, 2, &out));
  const size_t bytes = sizeof(float) * size_t(3 * experts.H + experts.gate_up.N + 3 * experts.gating.width + 1);
  const int64_t fitting = int64_t(kMaxActivationBytes / bytes) / (per_token ? per_token : 1),
                most = fitting < 1 ? 1 : fitting;
  for (int64_t t = 0; t < tokens; t += most) {
    const int64_t pair = t * per_token;
    Step step = {experts, x.as<float>() + t * experts.H, weights.as<float>() + pair, ids.as<int64_t>() + pair,
        tokens - t < most ? tokens - t : most, per_token};
    TRY(run_tokens(context, step, first, last, static_cast<float*>(out) + t * experts.H));
  }
  return nullptr;
}

Status* make(const KernelInfo* info, void** kernel) {
  auto* experts = static_cast<Experts*>(calloc(1, sizeof(Experts)));
  REQUIRE(experts, "out of memory");
  *kernel = experts;
  char formats[2][48];
  TRY(attribute(info, "E", 1, kMaxExperts, experts->count));
  TRY(attribute(info, "H", 1, kMaxSize, experts->H));
  TRY(attribute(info, "gate_up_format", formats[0], sizeof formats[0]));
  TRY(attribute(info, "down_format", formats[1], sizeof formats[1]));
  TRY(make_gating(info, experts->gating));
  TRY(make_layout(formats[0], experts->gating.inputs(), experts->H, experts->gate_up));
  return make_layout(formats[1], experts->H, experts->gating.width, experts->down);
}
}  // namespace

void define_block_experts(Operator& op) {
  op.name = "BlockExperts";
  constexpr Argument inputs[] = {{ort::kFloat, false}, {ort::kInt64, false}, {ort::kFloat, false}, {ort::kUint8, false},
      {ort::kFloat, true}, {ort::kUint8, false}, {ort::kFloat, true}};
  memcpy(op.inputs, inputs, sizeof inputs);
  op.outputs[0] = {ort::kFloat, false};
  op.num_inputs = 7, op.num_outputs = 1;
  op.make = make, op.run = run;
}
}  // namespace specexport
