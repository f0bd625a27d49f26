// Runs the operators over drawn tensors of exactly their size, with the kernels that SPECEXPORT_CPU_KERNELS names:
// what they give is compared with plain sums in float64, and tokens in company with the same tokens alone.
#include "driver.h"

#include <math.h>

#include "../../runtime/operators/formats.h"
#include "fake_ort.h"

using namespace specexport;
using namespace fake;

namespace {
Value* drawn(int64_t rows, int64_t columns) {
  Value* value = tensor(kFloat, rows, columns);
  for (int64_t i = 0; i < rows * columns; i++) value->floats()[i] = draw_float();
  return value;
}
Value* drawn_weight(const char* format, int64_t count, int64_t n, int64_t k, Layout& layout) {
  Format found;
  if (!find_format(format, found)) fail(0, format);
  layout.make(found, n, k);
  Value* value = tensor(kUint8, count * layout.tiles, layout.tile_bytes);
  draw_weight(static_cast<uint8_t*>(value->data), size_t(value->dims[0] * value->dims[1]));
  return value;
}
Value part(const Value* whole, int64_t first, int64_t rows) {  // of a matrix of floats, or of bytes
  Value value = *whole;
  const size_t size = whole->type == kInt64 ? 8 : whole->type == kFloat ? 4 : 1;
  value.data = static_cast<char*>(whole->data) + size_t(first * whole->dims[1]) * size;
  return value.dims[0] = rows, value;
}
bool same_bits(const float* a, const float* b, int64_t count) { return !memcmp(a, b, sizeof(float) * size_t(count)); }

Value* linear(const char* format, int64_t n, int64_t k, Value* x, Value* weight) {
  const Attribute attributes[] = {{"format", 0, 0, format}, {"N", n, 0, nullptr}, {"K", k, 0, nullptr}, {}};
  Value* inputs[] = {x, weight, nullptr};
  return run("BlockLinear", attributes, inputs);
}

bool check_layer(const char* format) {
  constexpr int64_t n = 33, k = 100, rows = 19;
  Layout layout;
  Value *weight = drawn_weight(format, 1, n, k, layout), *x = drawn(rows, k), *ids = tensor(kInt64, n);
  for (int64_t i = 0; i < rows * k; i++) x->floats()[i] = i % k % 32 ? roundf(x->floats()[i] * 60) : 127;
  for (int64_t i = 0; i < n; i++) static_cast<int64_t*>(ids->data)[i] = i;
  const Attribute attributes[] = {{"format", 0, 0, format}, {"N", n, 0, nullptr}, {"K", k, 0, nullptr}, {}};
  Value *inputs[] = {ids, weight}, *table = run("BlockEmbedding", attributes, inputs);
  const float* y = linear(format, n, k, x, weight)->floats();
  double worst = 0, largest = 1e-30;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < n; i++) {
      double sum = 0;
      for (int64_t d = 0; d < k; d++) sum += double(x->floats()[row * k + d]) * table->floats()[i * k + d];
      worst = fmax(worst, fabs(sum - y[row * n + i])), largest = fmax(largest, fabs(sum));
    }
  Value one = part(x, rows - 1, 1);
  const bool same = same_bits(linear(format, n, k, &one, weight)->floats(), y + (rows - 1) * n, n);
  return worst < 1e-5 * largest && same;
}

bool check_experts(const char* first, const char* last, int64_t order) {
  constexpr int64_t count = 3, H = 40, I = 24, per_token = 2, rows = 37;
  const int64_t outputs = order == 2 ? I : 2 * I;
  Layout gate_up, down;
  Value *x = drawn(rows, H), *ids = tensor(kInt64, rows, per_token), *weights = drawn(rows, per_token);
  auto* id = static_cast<int64_t*>(ids->data);
  for (int64_t i = 0; i < rows * per_token; i++) id[i] = draw() % 4 % count;
  Value *up = drawn_weight(first, count, outputs, H, gate_up), *back = drawn_weight(last, count, H, I, down);
  const Attribute attributes[] = {{"E", count, 0, nullptr}, {"H", H, 0, nullptr}, {"I", I, 0, nullptr},
      {"gate_up_format", 0, 0, first}, {"alpha", 0, 1.5f, nullptr}, {"beta", 0, 1, nullptr},
      {"down_format", 0, 0, last}, {"limit", 0, 3, nullptr}, {"interleaved", order, 0, nullptr}, {}};
  Value *inputs[] = {x, ids, weights, up, nullptr, back, nullptr}, *y = run("BlockExperts", attributes, inputs);
  auto* sums = static_cast<double*>(calloc(size_t(rows * H), sizeof(double)));
  for (int64_t expert = 0; expert < count; expert++) {
    Value weight = part(up, expert * gate_up.tiles, gate_up.tiles);
    Value *both = linear(first, outputs, H, x, &weight), *gated = tensor(kFloat, rows, I);
    for (int64_t i = 0; i < rows * I; i++) {
      const float* of = both->floats() + i / I * outputs;
      const int64_t at = order == 1 ? 2 * (i % I) : i % I;
      const double gate = fmin(of[at], 3), other = fmin(fmax(of[order == 2 ? at : order ? at + 1 : at + I], -3), 3);
      gated->floats()[i] = float(gate / (1 + exp(-1.5 * gate)) * (other + 1));
    }
    weight = part(back, expert * down.tiles, down.tiles);
    const float* given = linear(last, H, I, gated, &weight)->floats();
    for (int64_t pair = 0; pair < rows * per_token; pair++)
      for (int64_t i = 0; id[pair] == expert && i < H; i++)
        sums[pair / per_token * H + i] += double(weights->floats()[pair]) * given[pair / per_token * H + i];
  }
  double worst = 0, largest = 1e-30;
  for (int64_t i = 0; i < rows * H; i++)
    worst = fmax(worst, fabs(sums[i] - y->floats()[i])), largest = fmax(largest, fabs(sums[i]));
  free(sums);
  bool same = true;
  for (int64_t row = 0; row < rows; row += 6) {
    Value alone[] = {part(x, row, 1), part(ids, row, 1), part(weights, row, 1)};
    Value* given[] = {alone, alone + 1, alone + 2, up, nullptr, back, nullptr};
    same = same && same_bits(run("BlockExperts", attributes, given)->floats(), y->floats() + row * H, H);
  }
  return worst < 2e-3 * largest && same;  // a gate in float32 may round to another int8
}

// A row of 20 entries before and one of 530, which is more than a part, as one step, as two, and as a tree whose branch
// begins after its 8 first tokens.
bool check_attention(bool int8, int64_t window, float softcap) {
  constexpr int64_t heads = 4, kv = 2, K = 20, V = 24, entries = 560, rows = 2, tokens = 12, held[] = {20, 530};
  const Attribute attributes[] = {{"num_heads", heads, 0, nullptr}, {"kv_num_heads", kv, 0, nullptr},
      {"window", window, 0, nullptr}, {"causal", 1, 0, nullptr}, {"packed", 0, 0, nullptr},
      {"scale", 0, 0.25f, nullptr}, {"softcap", 0, softcap, nullptr}, {"rotary", 0, 0, ""}, {}};
  const ElementType type = int8 ? kInt8 : kFloat;
  Value *keys = tensor(type, rows, 1, kv, entries, K), *values = tensor(type, rows, 1, kv, entries, V);
  Value *key_scale = tensor(kFloat, kv, K), *value_scale = tensor(kFloat, kv, V);
  for (int64_t i = 0; i < kv * K; i++) key_scale->floats()[i] = 0.02f + 0.001f * float(i % 7);
  for (int64_t i = 0; i < kv * V; i++) value_scale->floats()[i] = 0.02f + 0.001f * float(i % 5);
  Value* caches[] = {keys, values};
  for (Value* cache : caches)
    for (int64_t i = 0; i < rows * kv * entries * cache->dims[4]; i++)
      if (int8) static_cast<int8_t*>(cache->data)[i] = int8_t(draw() % 255 - 127);
      else cache->floats()[i] = draw_float();
  Value *q = drawn(rows * tokens, heads * K), *k = drawn(rows * tokens, kv * K), *v = drawn(rows * tokens, kv * V);
  Value* out[4] = {};
  for (int step = 0; step < 4; step++) {  // all tokens of each row, then its first 5, then the rest; the tree
    const int64_t from = step == 2 ? 5 : 0, to = step == 1 ? 5 : tokens, n = to - from;
    Value *lens = tensor(kInt32, rows), *starts = tensor(kInt32, rows + 1), *part_of[3];
    for (int row = 0; row <= rows; row++) static_cast<int32_t*>(starts->data)[row] = int32_t(row * n);
    for (int row = 0; row < rows; row++) static_cast<int32_t*>(lens->data)[row] = int32_t(held[row] + from);
    for (int i = 0; i < 3; i++) {
      const Value* whole = i == 0 ? q : i == 1 ? k : v;
      const int64_t width = whole->dims[1];
      part_of[i] = tensor(kFloat, rows * n, width);
      for (int64_t row = 0; row < rows; row++)
        memcpy(part_of[i]->floats() + row * n * width, whole->floats() + (row * tokens + from) * width,
            sizeof(float) * size_t(n * width));
    }
    Value* inputs[16] = {part_of[0], part_of[1], part_of[2], keys, values, lens, starts};
    if (int8) inputs[11] = key_scale, inputs[12] = value_scale;
    if (step == 3) {
      inputs[15] = tensor(kInt64, rows * n);
      for (int64_t i = 0; i < rows * n; i++) static_cast<int64_t*>(inputs[15]->data)[i] = i % n == 8 ? 5 : 1;
    }
    out[step] = run("UnpaddedAttention", attributes, inputs, keys, values);
  }
  bool same = true;
  double worst = 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t t = 0; t < tokens; t++) {
      const float* got = out[0]->floats() + (row * tokens + t) * heads * V;
      const float* again = t < 5 ? out[1]->floats() + (row * 5 + t) * heads * V
                                 : out[2]->floats() + (row * (tokens - 5) + t - 5) * heads * V;
      same = same && same_bits(got, again, heads * V);
      same = same && (t >= 8 || same_bits(got, out[3]->floats() + (row * tokens + t) * heads * V, heads * V));
      for (int64_t head = 0; head < heads; head++) {
        const int64_t of = head / (heads / kv), last = held[row] + t, first = window > 0 ? last - window + 1 : 0;
        double sums[V + 1] = {};
        for (int64_t e = first > 0 ? first : 0; e <= last; e++) {
          const auto at = [&](const Value* cache, const Value* scale, int64_t d) {
            const int64_t width = cache->dims[4], i = ((row * kv + of) * entries + e) * width + d;
            return int8 ? static_cast<int8_t*>(cache->data)[i] * double(scale->floats()[of * width + d])
                        : double(cache->floats()[i]);
          };
          double score = 0;
          for (int64_t d = 0; d < K; d++)
            score += 0.25 * q->floats()[((row * tokens + t) * heads + head) * K + d] * at(keys, key_scale, d);
          const double weight = exp(softcap > 0 ? softcap * tanh(score / softcap) : score);
          for (int64_t d = 0; d < V; d++) sums[d] += weight * at(values, value_scale, d);
          sums[V] += weight;
        }
        for (int64_t d = 0; d < V; d++) worst = fmax(worst, fabs(sums[d] / sums[V] - got[head * V + d]));
      }
    }
  return worst < 1e-4 && same;
}

int report(bool right, const char* what, const char* more) {
  free_tensors();
  if (!right) printf("%s %s: wrong\n", what, more);
  return !right;
}
}  // namespace

int check_operators() {
  fake::table(0);
#ifdef __SANITIZE_THREAD__  // sessions register together, and while others run
  bool is_done = false;
  std::thread other([&] {
    do enroll();
    while (!__atomic_load_n(&is_done, __ATOMIC_RELAXED));
  });
#endif
  enroll();
  int failed = num_known != 4;
  for (const Format& format : kFormats) failed += report(check_layer(format.name), "layer", format.name);
  for (const char* name : kGroupFormats) failed += report(check_layer(name), "layer", name);
  const char* pairs[][2] = {{"int4", "q6_k"}, {"bf16", "int8"}, {"q4_k", "f16"}};
  for (int64_t order = 0; order < 3; order++)
    failed += report(check_experts(pairs[order][0], pairs[order][1], order), "experts", pairs[order][0]);
  for (int int8 = 0; int8 < 2; int8++) {
    failed += report(check_attention(int8, -1, 0), "attention", int8 ? "int8" : "float");
    failed += report(check_attention(int8, 100, 5), "attention with a window", int8 ? "int8" : "float");
  }
#ifdef __SANITIZE_THREAD__
  __atomic_store_n(&is_done, true, __ATOMIC_RELAXED);
  other.join();
#endif
  return failed;
}
