// Runs the operators over drawn attributes, shapes and values: nodes that make sense, a good part of which is then
// changed at one to three places to what stands at a border. All memory has exactly its size, so that the sanitizers
// see every slip.
#include "driver.h"

#include <math.h>

#include "../../runtime/operators/formats.h"
#include "../../runtime/operators/rows.h"
#include "fake_ort.h"

using namespace specexport;
using namespace fake;

namespace {
constexpr int64_t kOdd[] = {0, 1, -1, 2, 3, 15, 17, 64, 255, 65535, 65536, 65537, 1ll << 20, INT32_MAX, 1ll << 31,
    (1ll << 31) + 1, 1ll << 32, (1ll << 32) + 1, 1ll << 47, 1ll << 48, 1ll << 61, (1ll << 61) + 1, 1ll << 62,
    (1ll << 62) + 1, INT64_MAX, INT64_MIN, INT64_MIN + 1, INT32_MIN, -2, -(1ll << 32), 7, 31};
constexpr double kReals[] = {
    0, 1, -1, 0.5, 1e-300, 1e300, 1e38, -1e38, 1e-45, 2e9, -1e19, 1e19, INFINITY, -INFINITY, NAN};
constexpr const char* kTexts[] = {"", "half", "interleaved", "int4", "q6_k", "bf16", "group4_", "group4_15_f16",
    "group8_2048_f32", "group4_99999999999999999999_f16", "group4_64_f16_", "x",
    "group4_32_f32_zero_and_what_follows_is_too_long_"};
template <class T, size_t N>
T any(const T (&all)[N]) {
  return all[draw() % N];
}
int64_t below(int64_t most) { return draw() % uint32_t(most); }
double real() { return draw() % 3 ? draw_float() : any(kReals); }
const char* format() {
  const size_t kinds = sizeof kFormats / sizeof *kFormats, at = draw() % (kinds + 7);
  return at < kinds ? kFormats[at].name : kGroupFormats[at - kinds];
}

struct Node {
  const char* name;
  Attribute attributes[12];
  int num_attributes = 0;
  Value* inputs[16] = {};
  bool optional[16] = {};
  int num_inputs = 0;

  void attribute(const char* what, int64_t number) { attributes[num_attributes++] = {what, number, 0, nullptr}; }
  void attribute(const char* what, double number) { attributes[num_attributes++] = {what, 0, float(number), nullptr}; }
  void attribute(const char* what, const char* text) { attributes[num_attributes++] = {what, 0, 0, text}; }
  void input(Value* value, bool is_optional = false) {
    optional[num_inputs] = is_optional, inputs[num_inputs++] = value;
  }
  void none() { input(nullptr, true); }
};

template <class... Dims>
Value* filled(ElementType type, Dims... dims) {
  Value* value = tensor(type, dims...);
  int64_t count = 1;
  for (size_t i = 0; i < value->rank; i++) count *= value->dims[i];
  for (int64_t i = 0; i < count; i++)
    if (type == kFloat) value->floats()[i] = draw() % 64 ? draw_float() : float(any(kReals));
    else if (type == kInt8 || type == kUint8) static_cast<uint8_t*>(value->data)[i] = uint8_t(draw());
  return value;
}
Value* weight(const char* name, int64_t count, int64_t n, int64_t k) {
  Format found;
  find_format(name, found);
  Layout layout;
  layout.make(found, n, k);
  return filled(kUint8, count * layout.tiles, layout.tile_bytes);
}
Value* numbers(int64_t rows, int64_t columns, int64_t limit) {
  Value* value = tensor(kInt64, rows, columns);
  for (int64_t i = 0; i < rows * columns; i++) static_cast<int64_t*>(value->data)[i] = below(limit ? limit : 1);
  return value;
}

void layer(Node& node, bool is_table) {
  const int64_t n = below(3) ? below(40) : 16 * below(3), k = below(8) ? 32 * below(3) + below(40) : 1000 + below(60);
  const char* kind = format();
  node.name = is_table ? "BlockEmbedding" : "BlockLinear";
  node.attribute("format", kind), node.attribute("N", n), node.attribute("K", k);
  const int64_t rows = n || !is_table ? below(6) : 0;
  node.input(is_table ? numbers(rows, 1 + below(3), n) : filled(kFloat, rows, k));
  node.input(weight(kind, 1, n, k));
  if (!is_table) node.input(draw() % 2 ? filled(kFloat, n) : nullptr, true);
}

void experts(Node& node) {
  const int64_t count = 1 + below(4), H = 1 + below(70), I = 1 + below(50), order = below(3), rows = below(12),
                each = below(5);
  const char *first = format(), *last = format();
  node.name = "BlockExperts";
  node.attribute("E", count), node.attribute("H", H), node.attribute("I", I), node.attribute("interleaved", order);
  node.attribute("gate_up_format", first), node.attribute("down_format", last);
  node.attribute("alpha", 1.5), node.attribute("beta", 1.0), node.attribute("limit", below(2) * 3.0);
  const int64_t outputs = order == 2 ? I : 2 * I;
  node.input(filled(kFloat, rows, H)), node.input(numbers(rows, each, count)), node.input(filled(kFloat, rows, each));
  node.input(weight(first, count, outputs, H)), node.input(draw() % 2 ? filled(kFloat, count, outputs) : nullptr, true);
  node.input(weight(last, count, H, I)), node.input(draw() % 2 ? filled(kFloat, count, H) : nullptr, true);
}

void attention(Node& node) {
  const int64_t kv = 1 + below(3), heads = kv * (1 + below(3)), K = 1 + below(20), V = 1 + below(20), rows = below(4);
  const int64_t entries = below(8) ? 1 + below(70) : 500 + below(600), how = below(3);  // appends, packed, reads only
  const bool told = below(4) == 0, tree = !told && how < 2 && below(3) == 0, causal = told || tree || below(4);
  const ElementType type = below(2) ? kFloat : kInt8;
  Value *lens = tensor(kInt32, rows), *starts = tensor(kInt32, rows + 1);
  int32_t *held = static_cast<int32_t*>(lens->data), *start = static_cast<int32_t*>(starts->data);
  start[0] = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t count = below(4) ? below(entries < 7 ? entries + 1 : 7) : below(entries < 120 ? entries + 1 : 120);
    start[row + 1] = int32_t(start[row] + count);
    held[row] = int32_t(how == 2 ? below(entries + 1) : below(entries - count + 1));
  }
  const int64_t tokens = start[rows], rotated = K < 2 ? 0 : below(K / 2 + 1);
  const char* rotary = below(2) ? "" : below(2) ? "half" : "interleaved";
  node.name = "UnpaddedAttention";
  node.attribute("num_heads", heads), node.attribute("kv_num_heads", kv);
  node.attribute("window", below(2) ? -1 : 1 + below(80)), node.attribute("causal", int64_t(causal));
  node.attribute("packed", int64_t(how == 1)), node.attribute("scale", 0.25), node.attribute("softcap", below(2) * 5.0);
  node.attribute("rotary", rotary);
  node.input(filled(kFloat, tokens, heads * K + (how == 1 ? kv * (K + V) : 0)));
  node.input(how ? nullptr : filled(kFloat, tokens, kv * K), true),
      node.input(how ? nullptr : filled(kFloat, tokens, kv * V), true);
  node.input(filled(type, rows, 1, kv, entries, K)), node.input(filled(type, rows, 1, kv, entries, V));
  node.input(lens), node.input(starts);
  node.input(below(2) ? filled(kFloat, heads) : nullptr, true),
      node.input(below(2) ? filled(kFloat, heads) : nullptr, true);
  for (int i = 0; i < 2; i++) node.input(*rotary ? filled(kFloat, entries, rotated) : nullptr, true);
  node.input(type == kInt8 ? filled(kFloat, kv, K) : nullptr, true),
      node.input(type == kInt8 ? filled(kFloat, kv, V) : nullptr, true);
  node.input(told ? numbers(1, tokens, 80) : nullptr, true);
  node.input(nullptr, true), node.input(nullptr, true);
  if (told) {
    Value* at = node.inputs[14] = tensor(kInt64, rows, 1, entries);
    for (int64_t i = 0; i < rows * entries; i++) static_cast<int64_t*>(at->data)[i] = below(90) - 5;
  }
  if (tree) {
    Value* parents = node.inputs[15] = tensor(kInt64, tokens);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = start[row]; i < start[row + 1]; i++)
        static_cast<int64_t*>(parents->data)[i] = below(3) ? 1 : 1 + below(i - start[row] + 1);
  }
}

// An input with other sizes: as many bytes as these say, or none where that would be too much.
Value* resized(const Value* given) {
  int64_t dims[8];
  size_t rank = given->rank;
  memcpy(dims, given->dims, sizeof dims);
  const size_t at = rank ? draw() % rank : 0, other = rank ? draw() % rank : 0;
  switch (draw() % 6) {
    case 0: dims[at] += dims[at] < INT64_MAX; break;
    case 1: dims[at] = dims[at] ? dims[at] - 1 : 1; break;
    case 2: dims[at] = any(kOdd) & INT64_MAX; break;
    case 3: dims[at] = any(kOdd) & INT64_MAX, dims[other] = any(kOdd) & INT64_MAX; break;
    case 4: rank = rank < 7 ? rank + 1 : rank, dims[rank - 1] = below(3); break;
    default: rank = rank ? rank - 1 : 0;
  }
  Value* made = tensor_of(given->type, rank, dims);
  if (!made) dims[draw() % rank] = 0, made = tensor_of(given->type, rank, dims);
  return made;
}

void spoil(Node& node) {
  Attribute& attribute = node.attributes[draw() % node.num_attributes];
  Value*& input = node.inputs[draw() % node.num_inputs];
  switch (draw() % 4) {
    case 0:
      if (attribute.text) attribute.text = any(kTexts);
      else attribute.number = any(kOdd), attribute.real = float(any(kReals));
      return;
    case 1:
      if (input) input = resized(input);
      else if (&input - node.inputs > 12) input = numbers(1, below(9), 9);
      else input = filled(kFloat, below(9));
      return;
    case 2:
      if (node.optional[&input - node.inputs]) input = nullptr;
      return;
    default:
      if (!input || !input->rank) return;
      int64_t count = 1;
      for (size_t i = 0; i < input->rank; i++)
        count = input->dims[i] && count ? input->dims[i] < 1 << 20 ? count * input->dims[i] : 0 : 0;
      for (int i = 0; i < 3 && count > 0 && count < 1 << 20; i++) {
        const int64_t at = below(count), value = draw() % 2 ? any(kOdd) : below(12);
        if (input->type == kInt64) static_cast<int64_t*>(input->data)[at] = value;
        if (input->type == kInt32) static_cast<int32_t*>(input->data)[at] = int32_t(value);
      }
  }
}

// Draws from rows of any values with any numbers: a token that is drawn is one of the row, and has mass where numbers
// are fair.
bool row_is_safe() {
  const int64_t width = below(2) ? 1 + below(40) : 500 + below(1100);
  const int64_t blocks = (width + kBlockLogits - 1) / kBlockLogits, most = 1 + below(kMaxCandidates);
  const bool is_fair = below(2);
  float *x = filled(kFloat, width)->floats(), *y = filled(kFloat, width)->floats();
  float *peaks = tensor(kFloat, blocks)->floats(), *sorted = tensor(kFloat, blocks)->floats();
  float* values = tensor(kFloat, kMaxCandidates)->floats();
  for (int64_t i = 0; is_fair && i < width; i++) x[i] = i % kBlockLogits ? draw_float() : -1e4f, y[i] = draw_float();
  auto* sums = static_cast<double*>(tensor(kInt64, blocks)->data);
  auto* ids = static_cast<int32_t*>(tensor(kInt32, kMaxCandidates)->data);
  RowQuery query = {real(), real(), real(), real(), real(), real(), real(), real()};
  if (is_fair) {
    query.temperature = 0.1 + double(below(10));
    query.width = query.cuts = 0;
    query.uniform = double(below(1000)) / 1000;
  }
  RowResult found, of_y;
  specexport_query_row(x, width, &query, &found, ids, values, peaks, sorted, sums);
  bool right = found.likeliest < double(width) && found.drawn >= 0 && found.drawn < double(width) &&
               (!is_fair || width == 1 || found.drawn_probability > 0);
  specexport_query_row(y, width, &query, &of_y, ids, values, peaks, sorted, sums);
  const double of_both = double(below(width + 1));
  const ResidualQuery asked = {query.temperature, double(width), found.peak, found.total, query.temperature, of_both,
      of_y.peak, of_y.total, is_fair ? 1 : real(), double(below(width + 1)) - 1, is_fair ? query.uniform : real(), x,
      y};
  ResidualResult left;
  specexport_row_residual(&asked, sums, &left);
  right = right && left.token < double(width) &&
          (!is_fair || width == 1 || left.token < 0 || x[int64_t(left.token)] > -1e4f);
  auto* candidates = static_cast<int32_t*>(tensor(kInt32, most)->data);
  auto* kept = static_cast<int64_t*>(tensor(kInt64, most)->data);
  auto* probs = static_cast<double*>(tensor(kInt64, most)->data);
  for (int64_t i = 0; i < most; i++) candidates[i] = int32_t(draw()), kept[i] = 0;
  found.candidates = below(2) ? double(below(most + 3)) : real();
  const double mass = real();
  CutResult cut;
  specexport_cut_rows(1, most, &query, &found, &mass, candidates, filled(kFloat, most)->floats(), &cut, kept, probs);
  const int64_t count = cut.count >= 0 && cut.count <= double(most) ? int64_t(cut.count) : -1;
  if (count > 0) specexport_cut_residual(count, kept, probs, below(count), kept, probs, real(), real(), &left);
  if (!right || count < 0)
    printf("row of %lld: token %g of mass %g, %g of the residual, %g stay\n", (long long)width, found.drawn,
        found.drawn_probability, left.token, cut.count);
  return right && count >= 0;
}
}  // namespace

int check_draws(int number) {
  fake::table(0), enroll();
  may_refuse = true;
  int failed = 0, ran = 0;
  for (int i = 0; i < number; i++) {
    if (i % 8 == 7) failed += !row_is_safe();
    else {
      Node node = {};
      if (i % 8 < 4) attention(node);
      else if (i % 8 == 6) experts(node);
      else layer(node, i % 8 == 5);
      for (int64_t times = draw() % 5; times > 1; times--) spoil(node);
      const bool is_bound = draw() % 4, appends = i % 8 < 4 && is_bound;
      ran += run(node.name, node.attributes, node.inputs, appends ? node.inputs[3] : nullptr,
                 appends ? node.inputs[4] : nullptr) != nullptr;
    }
    free_tensors();
  }
  printf("ran %d of %d\n", ran, number);
  return failed + (ran < number / 4);
}
