// What the experts of each token give of it, weighted and summed up: x [T, H] -> [T, H].
//
// Pairs of a token and an expert are sorted by expert, so that an expert's weights are read once for all of its tokens.
// A pair is a row of the products, whose bits know no other row; a token's pairs are added up in the order of its list.
#include "block_weight.h"
#include "gating.h"
#include "linear.h"

namespace specexport {
namespace {
constexpr size_t kPartBytes = 64 << 10, kMostParts = 32;
constexpr size_t kMostBytes = 64 << 20;  // of activations at a time: long prompts are worked on in pieces
constexpr int64_t kMostExperts = 1 << 20;

struct Experts {
  int64_t count, H;
  Gating gating;
  Layout gate_up, down;  // of one expert
};

// A matrix of every expert, and the rows that these are multiplied with.
struct Side {
  const Layout& layout;
  const uint8_t* weight = nullptr;
  const float* bias = nullptr;
  float *x = nullptr, *out = nullptr;
  uint8_t* packed_rows = nullptr;
};

// An expert that some tokens have chosen: its rows, and how many groups, and rows in these, others have before it.
struct Chosen {
  int64_t expert, first, rows, groups, groups_before, room_before;
};

struct Step {
  const Experts& experts;
  const float *x, *shares;
  const int64_t* ids;
  int64_t tokens, per_token, num_chosen = 0, groups = 0;
  Chosen* chosen = nullptr;
  int64_t *token_of = nullptr, *row_of = nullptr;  // of a row, its token; of a pair, its row
};

Product product(const Side& side, const Chosen& c) {
  Product p = {};
  p.layout = side.layout;
  p.weight = side.weight + size_t(c.expert * side.layout.tiles) * side.layout.tile_bytes;
  p.bias = side.bias ? side.bias + c.expert * side.layout.N : nullptr;
  p.x = side.x + c.first * side.layout.K, p.out = side.out + c.first * side.layout.N;
  p.rows = c.rows, p.groups = c.groups, p.capacity = (c.rows + c.groups - 1) / c.groups;
  p.packed_rows = side.packed_rows + size_t(c.room_before) * row_bytes(p.layout);
  return p;
}

// A part of the groups of all experts, or of their tiles, each of which counts as often as its expert has groups.
template <class F>
void share(const Step& step, int64_t tiles, size_t part, size_t parts, const F& work) {
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

// Rows of some groups are made by `fill`, and packed for the products.
template <class F>
Status* pack(KernelContext* context, const Step& step, const Side& side, const F& fill) {
  const bool small = step.tokens * step.per_token * side.layout.K < 1 << 15;
  const size_t parts = small ? 1 : size_t(step.groups < 16 ? step.groups : 16);
  return parallel(context, parts, [&](size_t part) {
    share(step, 0, part, parts, [&](const Chosen& c, int64_t first, int64_t last) {
      const Product p = product(side, c);
      for (int64_t row = first * p.capacity; row < last * p.capacity && row < c.rows; row++) fill(c.first + row);
      kernels().pack(p, first, last);
    });
  });
}

Status* multiply(KernelContext* context, const Step& step, const Side& side) {
  const Layout& layout = side.layout;
  size_t parts = size_t(step.groups * layout.tiles) * layout.tile_bytes / kPartBytes;
  parts = parts < 1 ? 1 : parts > kMostParts ? kMostParts : parts;
  return parallel_with_memory(context, parts, [&](size_t part) {
    bool done = true;
    share(step, layout.tiles, part, parts, [&](const Chosen& c, int64_t first, int64_t last) {
      const Product p = product(side, c);
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
        const float weight = step.shares[pair], *values = given + step.row_of[pair] * H;
        for (int64_t i = 0; i < H; i++) sums[i] += weight * values[i];
      }
    }
  });
}

// Sorts the pairs by expert. `starts` has room for a number an expert.
void sort(Step& step, int64_t* starts) {
  const int64_t pairs = step.tokens * step.per_token;
  memset(starts, 0, sizeof(int64_t) * size_t(step.experts.count));
  for (int64_t pair = 0; pair < pairs; pair++) starts[step.ids[pair]]++;
  int64_t row = 0, room = 0;
  for (int64_t expert = 0; expert < step.experts.count; expert++) {
    Product p = {};
    p.rows = starts[expert];
    starts[expert] = row;
    if (!p.rows) continue;
    const int64_t most = kernels().most_of(step.experts.gate_up, p.rows);
    const int64_t other = kernels().most_of(step.experts.down, p.rows);
    p.cut(most < other ? most : other);
    step.chosen[step.num_chosen++] = {expert, row, p.rows, p.groups, step.groups, room};
    step.groups += p.groups, row += p.rows, room += p.groups * p.capacity;
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t at = starts[step.ids[pair]]++;
    step.token_of[at] = pair / step.per_token, step.row_of[pair] = at;
  }
}

struct Room {  // that is handed out piece by piece; of a null pointer only sizes are told
  char* start;
  size_t used;
  template <class T>
  void take(T*& piece, size_t count) {
    piece = reinterpret_cast<T*>(start + used);
    used += (count * sizeof(T) + 63) / 64 * 64;
  }
};

Status* some_tokens(KernelContext* context, Step& step, Side& first, Side& last, float* out) {
  const Experts& experts = step.experts;
  const size_t pairs = size_t(step.tokens * step.per_token), count = size_t(experts.count);
  int64_t* starts;
  size_t bytes = row_bytes(first.layout);
  if (row_bytes(last.layout) > bytes) bytes = row_bytes(last.layout);
  Room room = {nullptr, 0};
  for (int i = 0; i < 2; i++) {
    if (i) room = {static_cast<char*>(scratch(room.used, 0)), 0};
    REQUIRE(!i || room.start, "out of memory");
    room.take(starts, count);
    room.take(step.chosen, count < pairs ? count : pairs);
    room.take(step.token_of, pairs), room.take(step.row_of, pairs);
    room.take(first.x, pairs * size_t(experts.H));
    room.take(first.out, pairs * size_t(first.layout.N)), room.take(last.x, pairs * size_t(last.layout.K));
    room.take(first.packed_rows, 2 * pairs * bytes);  // groups of an expert have room for fewer than twice its rows
  }
  last.out = first.x, last.packed_rows = first.packed_rows;  // nobody needs them any more by then
  sort(step, starts);
  const size_t H = size_t(experts.H);
  TRY(pack(context, step, first, [&](int64_t row) {
    memcpy(first.x + size_t(row) * H, step.x + size_t(step.token_of[row]) * H, sizeof(float) * H);
  }));
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

Status* read(KernelContext* context, size_t at, const char* name, const char* bias_name, int64_t count, Side& side) {
  Tensor weight, bias;
  TRY(input(context, at, weight));
  TRY(input(context, at + 1, bias));
  TRY(check(name, weight, count * side.layout.tiles, int64_t(side.layout.tile_bytes)));
  if (!bias.absent) TRY(check(bias_name, bias, count, side.layout.N));
  side.weight = weight.as<uint8_t>(), side.bias = bias.absent ? nullptr : bias.as<float>();
  return nullptr;
}

Status* run(const void* kernel, KernelContext* context) {
  const Experts& experts = *static_cast<const Experts*>(kernel);
  Tensor x, ids, shares;
  Side first = {experts.gate_up}, last = {experts.down};
  TRY(input(context, 0, x));
  TRY(input(context, 1, ids));
  TRY(input(context, 2, shares));
  TRY(read(context, 3, "gate_up", "gate_up_bias", experts.count, first));
  TRY(read(context, 5, "down", "down_bias", experts.count, last));
  if (x.rank != 2 || x.dims[1] != experts.H) return bad_shape("x", x, "[..., %lld]", (long long)experts.H);
  const int64_t tokens = x.dims[0], per_token = ids.rank == 2 ? ids.dims[1] : 0;
  REQUIRE(per_token <= kMostExperts, "a token has too many experts");
  TRY(check("expert_ids", ids, tokens, per_token));
  TRY(check("expert_weights", shares, tokens, per_token));
  for (int64_t pair = 0; pair < tokens * per_token; pair++) {
    const long long id = ids.as<int64_t>()[pair];
    if (id >= 0 && id < experts.count) continue;
    return refuse("token %lld has the expert %lld, and there are %lld", (long long)(pair / per_token), id,
                  (long long)experts.count);
  }
  void* out;
  TRY(output(context, 0, x.dims, 2, &out));
  const size_t bytes = sizeof(float) * size_t(3 * experts.H + experts.gate_up.N + 3 * experts.gating.width + 1);
  const int64_t fitting = int64_t(kMostBytes / bytes) / (per_token ? per_token : 1), most = fitting < 1 ? 1 : fitting;
  for (int64_t t = 0; t < tokens; t += most) {
    const int64_t pair = t * per_token;
    Step step = {experts, x.as<float>() + t * experts.H, shares.as<float>() + pair, ids.as<int64_t>() + pair,
                 tokens - t < most ? tokens - t : most, per_token};
    TRY(some_tokens(context, step, first, last, static_cast<float*>(out) + t * experts.H));
  }
  return nullptr;
}

Status* make(const KernelInfo* info, void** kernel) {
  auto* experts = static_cast<Experts*>(calloc(1, sizeof(Experts)));
  REQUIRE(experts, "out of memory");
  *kernel = experts;
  char formats[2][48];
  TRY(attribute(info, "E", 1, kMostExperts, experts->count));
  TRY(attribute(info, "H", 1, kMostSize, experts->H));
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
                                 {ort::kFloat, true},  {ort::kUint8, false}, {ort::kFloat, true}};
  memcpy(op.inputs, inputs, sizeof inputs);
  op.outputs[0] = {ort::kFloat, false};
  op.num_inputs = 7, op.num_outputs = 1;
  op.make = make, op.run = run;
}
}  // namespace specexport
