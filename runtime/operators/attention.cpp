// UnpaddedAttention, as specexport/ops/spec.py declares it: new keys and values go into the caches, then every token
// attends to what its row holds.
//
// A work item is some tokens of a row and one key/value head, whose cache entries are read once for all of them and
// for all heads that share it. Long rows are cut into parts at fixed entries, which are computed side by side where
// there are few items, and are put together in one order: a token's result knows nothing of what stands beside it.
//
// A row's new tokens may be a tree. Each of its chains is an item of its own, which reads the entries of its path as if
// they lay one after the other: positions, windows and bits are those of the same text in a step without branches.
#include "kernels.h"
#include "operator.h"

namespace specexport {
namespace {
enum Input {  // in order
  kQ,
  kK,
  kV,
  kKeys,
  kValues,
  kLens,
  kStarts,
  kSinks,
  kSlopes,
  kCos,
  kSin,
  kKeyScale,
  kValueScale,
  kAt,
  kEntryAt,
  kParents,
  kInputs
};
constexpr int64_t kBlockQueries = 96;        // queries of an item, about: scores of a tile are 24 KB
constexpr int64_t kEnoughItems = 32;         // items that keep all threads busy; of fewer, rows are cut into parts
constexpr int64_t kMaxStateBytes = 8 << 20;  // of states of parts that are computed side by side
enum Rotary { kNone, kHalf, kInterleaved };

struct Attention {
  int64_t heads, kv_heads, window, causal, packed;
  float scale, softcap;
  Rotary rotary;
};

Status* make(const KernelInfo* info, void** kernel) {
  auto* made = static_cast<Attention*>(calloc(1, sizeof(Attention)));
  REQUIRE(made, "out of memory");
  *kernel = made;
  char rotary[16];
  TRY(attribute(info, "num_heads", 1, kMaxHeads, made->heads));
  TRY(attribute(info, "kv_num_heads", 1, kMaxHeads, made->kv_heads));
  TRY(attribute(info, "window", -1, kMaxSize, made->window));
  TRY(attribute(info, "causal", 0, 1, made->causal));
  TRY(attribute(info, "packed", 0, 1, made->packed));
  TRY(attribute(info, "scale", made->scale));
  TRY(attribute(info, "softcap", made->softcap));
  TRY(attribute(info, "rotary", rotary, sizeof rotary));
  REQUIRE(made->heads % made->kv_heads == 0, "UnpaddedAttention: num_heads is no multiple of kv_num_heads");
  made->rotary = !strcmp(rotary, "half") ? kHalf : !strcmp(rotary, "interleaved") ? kInterleaved : kNone;
  REQUIRE(made->rotary != kNone || !*rotary, "UnpaddedAttention: rotary is \"\", \"half\" or \"interleaved\"");
  return nullptr;
}

// Some tokens of a row: [token, token + count), which stand at positions [at, at + count) and see [first, last).
struct Block {
  int64_t row, token, count, at, first, last, part;  // `part`: its first among the parts of all blocks, for one head
  int64_t slot;                                      // the entry of its first token
  const int32_t* path;  // of a branch, of each position after the past: which of the row's new tokens is there
};

struct Step {
  const Attention* kind;
  Tensor in[kInputs];
  int64_t tokens, rows, entries, k_dim, v_dim, v_pad, group, rotated, table_rows;
  bool appends, int8;
  const float *q, *k, *v;  // the first token's; they lie `*_stride` floats apart
  int64_t q_stride, k_stride, v_stride;
  char *keys, *values;  // the caches that are written and read
  float* output;
  Block* blocks;
  int64_t num_blocks, parts, longest;  // parts of all blocks for one head, and of the block that has most
  float* states;                       // of parts that are computed side by side
  int* parts_left;                     // of these, for each block and head

  int64_t count(int64_t row) const { return in[kStarts].as<int32_t>()[row + 1] - in[kStarts].as<int32_t>()[row]; }
  int64_t past(int64_t row) const {  // entries before a row's first new token
    const int64_t held = in[kLens].as<int32_t>()[row];
    return appends ? held : held > count(row) ? held - count(row) : 0;
  }
  char* entry(char* cache, int64_t row, int64_t head, int64_t at, int64_t dim) const {
    return cache + ((row * kind->kv_heads + head) * entries + at) * dim * (int8 ? 1 : 4);
  }
};

// `dim` floats with their first part rotated by the tables' row `at`.
void rotate(const Step& step, const float* from, int64_t at, int64_t dim, float* to) {
  const int64_t half = step.rotated / 2;
  const float* cos = step.in[kCos].as<float>() + at * half;
  const float* sin = step.in[kSin].as<float>() + at * half;
  memcpy(to, from, dim * sizeof(float));
  if (step.kind->rotary == kHalf)
    for (int64_t i = 0; i < half; i++) {
      to[i] = from[i] * cos[i] - from[i + half] * sin[i];
      to[i + half] = from[i + half] * cos[i] + from[i] * sin[i];
    }
  else
    for (int64_t i = 0; i < half; i++) {
      to[2 * i] = from[2 * i] * cos[i] - from[2 * i + 1] * sin[i];
      to[2 * i + 1] = from[2 * i + 1] * cos[i] + from[2 * i] * sin[i];
    }
}

void store_entry(const Step& step, const float* from, const float* scales, int64_t dim, char* to) {
  if (!step.int8) {
    memcpy(to, from, dim * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < dim; d++) {
    const float x = from[d] / scales[d], clamped = x > -128 ? x < 127 ? x : 127 : -128;  // NaN becomes -128
    to[d] = static_cast<char>(static_cast<int8_t>(static_cast<int>(clamped + 12582912.0f - 12582912.0f)));
  }
}

// New keys and values of one block of tokens into the caches, for all heads.
void append(const Step& step, const Block& block, float* space) {
  for (int64_t i = 0; i < block.count; i++)
    for (int64_t head = 0; head < step.kind->kv_heads; head++) {
      const float* key = step.k + (block.token + i) * step.k_stride + head * step.k_dim;
      const float* value = step.v + (block.token + i) * step.v_stride + head * step.v_dim;
      const float* scales[2] = {step.in[kKeyScale].as<float>(), step.in[kValueScale].as<float>()};
      if (step.kind->rotary) {
        rotate(step, key, block.at + i, step.k_dim, space);
        key = space;
      }
      store_entry(step, key, scales[0] + (step.int8 ? head * step.k_dim : 0), step.k_dim,
          step.entry(step.keys, block.row, head, block.slot + i, step.k_dim));
      store_entry(step, value, scales[1] + (step.int8 ? head * step.v_dim : 0), step.v_dim,
          step.entry(step.values, block.row, head, block.slot + i, step.v_dim));
    }
}

int64_t parts_of(const Block& block) {
  return block.last > block.first ? (block.last + kPartEntries - 1) / kPartEntries - block.first / kPartEntries : 1;
}

struct WorkItem {
  Queries queries;
  State total;
  float* states;  // of parts
  Workspace space;
};
int64_t state_size(int64_t queries, int64_t v_pad) { return (queries * (v_pad + 2) + 15) / 16 * 16; }  // floats
State state_at(float* from, int64_t queries, int64_t v_pad) {
  float* max = from + queries * v_pad;
  return {max, max + queries, from};
}

// An item in memory of this thread, with that for the states of some `parts`; false if there is none.
bool prepare(const Step& step, const Block& block, int64_t head, int64_t parts, WorkItem& item) {
  const int64_t queries = block.count * step.group, k_pad = (step.k_dim + 15) / 16 * 16;
  const int64_t size = state_size(queries, step.v_pad), gathered = block.path ? step.k_dim + step.v_dim : 0;
  float *q, *total;
  int64_t *first, *last, *at;
  Workspace& space = item.space;
  if (!allocate(Scratch::part, Array{space.masks, queries}, Array{first, block.count}, Array{last, block.count},
          Array{at, block.count}, Array{q, queries * k_pad}, Array{space.keys, k_pad * kTileEntries},
          Array{space.values, kTileEntries * step.v_pad}, Array{space.scores, queries * kTileEntries},
          Array{space.gathered, kTileEntries * gathered}, Array{total, size}, Array{item.states, parts * size}))
    return false;
  item.total = state_at(total, queries, step.v_pad);
  const Attention& kind = *step.kind;
  const bool has_positions = !step.in[kEntryAt].absent;
  const float* scales = step.int8 ? step.in[kKeyScale].as<float>() + head * step.k_dim : nullptr;
  for (int64_t i = 0; i < block.count; i++) {
    const int64_t entry = block.at + i;
    at[i] = has_positions ? step.in[kAt].as<int64_t>()[block.token + i] : entry;
    last[i] = kind.causal && !has_positions ? (entry < block.last ? entry + 1 : block.last) : block.last;
    first[i] = kind.window > 0 && !has_positions && entry >= kind.window ? entry - kind.window + 1 : 0;
    for (int64_t h = 0; h < step.group; h++) {
      float* to = q + (i * step.group + h) * step.k_dim;
      const float* from = step.q + (block.token + i) * step.q_stride + (head * step.group + h) * step.k_dim;
      if (kind.rotary) rotate(step, from, entry, step.k_dim, to);
      else memcpy(to, from, step.k_dim * sizeof(float));
      for (int64_t d = 0; d < step.k_dim; d++) to[d] *= scales ? kind.scale * scales[d] : kind.scale;
    }
  }
  const int64_t span = has_positions ? step.in[kEntryAt].dims[2] : 0;
  item.queries = {block.count, step.group, step.k_dim, step.v_dim, step.v_pad, q,
      step.entry(step.keys, block.row, head, 0, step.k_dim), step.entry(step.values, block.row, head, 0, step.v_dim),
      step.int8, first, last, has_positions ? step.in[kEntryAt].as<int64_t>() + block.row * span : nullptr, at,
      kind.window, step.in[kSlopes].absent ? nullptr : step.in[kSlopes].as<float>() + head * step.group, kind.softcap,
      block.path, step.past(block.row)};
  return true;
}

// Parts [index, index + count) of a block for one head; who is last puts all of them together. `states` and `left` are
// those of the block and head, null where one call does it all. False if there is no memory.
bool attend(
    const Step& step, const Block& block, int64_t head, int64_t index, int64_t count, float* states, int* left) {
  WorkItem item;
  const int64_t queries = block.count * step.group, size = state_size(queries, step.v_pad), parts = parts_of(block);
  const bool ready = prepare(step, block, head, states ? 0 : parts, item);
  if (ready && !states) states = item.states;
  for (int64_t i = index; ready && i < index + count; i++) {
    const int64_t from = (block.first / kPartEntries + i) * kPartEntries;
    const State part = state_at(states + i * size, queries, step.v_pad);
    kernels().attention.attend(item.queries, from, min(from + kPartEntries, block.last), part, item.space);
  }
  if ((left && __atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) > 0) || !ready) return ready;
  for (int64_t i = 0; i < queries; i++) item.total.max[i] = kNoScore, item.total.sum[i] = 0;
  memset(item.total.acc, 0, queries * step.v_pad * sizeof(float));
  for (int64_t i = 0; i < parts; i++)
    kernels().attention.merge(item.total, state_at(states + i * size, queries, step.v_pad), queries, step.v_pad);
  const float* sinks = step.in[kSinks].absent ? nullptr : step.in[kSinks].as<float>() + head * step.group;
  const float* scales = step.int8 ? step.in[kValueScale].as<float>() + head * step.v_dim : nullptr;
  for (int64_t i = 0; i < queries; i++) {
    const int64_t token = block.token + i / step.group, h = head * step.group + i % step.group;
    kernels().attention.finish(item.total, i, step.v_pad, step.v_dim, sinks ? sinks + i % step.group : nullptr, scales,
        step.output + (token * step.kind->heads + h) * step.v_dim);
  }
  return true;
}

bool is(const Tensor& tensor, ort::ElementType type, int64_t count) {
  return tensor.absent || (tensor.type == type && tensor.count() == count);
}

Status* check(Step& step) {
  const Attention& kind = *step.kind;
  Tensor* in = step.in;
  const Tensor &q = in[kQ], &keys = in[kKeys], &values = in[kValues];
  REQUIRE(keys.rank == 5 && values.rank == 5 && keys.type == values.type &&
              (keys.type == ort::kFloat || keys.type == ort::kInt8),
      "caches are [rows, 1, heads, entries, head size], of float or int8");
  step.rows = keys.dims[0], step.entries = keys.dims[3], step.k_dim = keys.dims[4], step.v_dim = values.dims[4];
  step.int8 = keys.type == ort::kInt8;
  REQUIRE(keys.dims[1] == 1 && keys.dims[2] == kind.kv_heads && step.k_dim > 0 && step.k_dim <= kMaxHeadSize &&
              step.v_dim > 0 && step.v_dim <= kMaxHeadSize && !memcmp(keys.dims, values.dims, 4 * sizeof(int64_t)),
      "the caches' shapes do not fit");
  step.v_pad = (step.v_dim + 15) / 16 * 16, step.group = kind.heads / kind.kv_heads;
  const int64_t k_width = kind.kv_heads * step.k_dim, v_width = kind.kv_heads * step.v_dim;
  step.q_stride = kind.heads * step.k_dim + (kind.packed ? k_width + v_width : 0);
  REQUIRE(q.rank >= 1 && q.dims[q.rank - 1] == step.q_stride, "queries are not as wide as the heads are");
  step.tokens = q.count() / step.q_stride;
  REQUIRE(step.tokens <= kMaxSize, "there are more tokens than a step can have");
  step.appends = kind.packed || !in[kK].absent;
  REQUIRE(step.appends ? kind.packed ? in[kK].absent && in[kV].absent : !in[kV].absent : in[kV].absent,
      "keys and values are given both, or packed with the queries, or neither is");
  REQUIRE(is(in[kK], ort::kFloat, step.tokens * k_width) && is(in[kV], ort::kFloat, step.tokens * v_width),
      "new keys or values do not fit the queries and caches");
  step.q = q.as<float>();
  step.k = kind.packed ? step.q + kind.heads * step.k_dim : in[kK].as<float>();
  step.v = kind.packed ? step.k + k_width : in[kV].as<float>();
  step.k_stride = kind.packed ? step.q_stride : k_width, step.v_stride = kind.packed ? step.q_stride : v_width;
  REQUIRE(in[kLens].count() == step.rows && in[kStarts].count() == step.rows + 1,
      "kv_lens and cu_new_tokens do not fit the caches' rows");
  REQUIRE(is(in[kSinks], ort::kFloat, kind.heads) && is(in[kSlopes], ort::kFloat, kind.heads),
      "sinks and slopes are one a head");
  REQUIRE(step.int8 ? !in[kKeyScale].absent && !in[kValueScale].absent && is(in[kKeyScale], ort::kFloat, k_width) &&
                          is(in[kValueScale], ort::kFloat, v_width)
                    : in[kKeyScale].absent && in[kValueScale].absent,
      "int8 caches, and no others, have a scale for each channel");
  if (kind.rotary) {
    const Tensor &cos = in[kCos], &sin = in[kSin];
    REQUIRE(!cos.absent && !sin.absent && cos.rank == 2 && sin.rank == 2 && cos.dims[0] == sin.dims[0] &&
                cos.dims[1] == sin.dims[1] && 2 * cos.dims[1] <= step.k_dim,
        "tables of cosines and sines are [rows, at most half a head]");
    step.rotated = 2 * cos.dims[1], step.table_rows = cos.dims[0];
  }
  const Tensor& entry_at = in[kEntryAt];
  REQUIRE(entry_at.absent == in[kAt].absent && is(in[kAt], ort::kInt64, step.tokens) &&
              (entry_at.absent ||
                  (entry_at.rank == 3 && kind.causal && is(entry_at, ort::kInt64, step.rows * entry_at.dims[2]))),
      "positions of tokens and of entries go together, and with causality");
  REQUIRE(in[kParents].absent ||
              (is(in[kParents], ort::kInt64, step.tokens) && entry_at.absent && kind.causal && step.appends),
      "a tree's tokens come with their keys, in causal attention to caches without padding");
  const int32_t *starts = in[kStarts].as<int32_t>(), *lens = in[kLens].as<int32_t>();
  REQUIRE(starts[0] == 0 && starts[step.rows] == step.tokens, "the rows' new tokens are not those of the step");
  for (int64_t row = 0; row < step.rows; row++) {
    REQUIRE(starts[row + 1] >= starts[row] && starts[row + 1] <= step.tokens, "a row has fewer than no new tokens");
    REQUIRE(lens[row] >= 0 && lens[row] <= step.entries, "a row's length is not that of a cache row");
    if (step.count(row) == 0) continue;
    const int64_t end = step.past(row) + step.count(row);
    REQUIRE(!step.appends || end <= step.entries, "a row's new tokens do not fit its cache");
    REQUIRE(!kind.rotary || end <= step.table_rows, "a token is beyond the rotary tables");
    REQUIRE(entry_at.absent || end <= entry_at.dims[2], "a row has entries without positions");
    for (int64_t i = 0; !in[kParents].absent && i < step.count(row); i++) {
      const int64_t parent = in[kParents].as<int64_t>()[starts[row] + i];
      REQUIRE(parent >= 1 && parent <= i + 1, "a token's parent is no token before it in its row");
    }
  }
  return nullptr;
}

// The cache that is written: the one given, where it is bound as the output, or a copy.
Status* own(KernelContext* context, size_t index, const Tensor& given, char*& cache) {
  void* data = nullptr;
  TRY(output(context, index, given.dims, given.rank, &data));
  REQUIRE(data || given.count() == 0, "a cache that is appended to is an output too");
  if (data != given.data && data) memcpy(data, given.data, given.count() * (given.type == ort::kInt8 ? 1 : 4));
  cache = static_cast<char*>(data);
  return nullptr;
}

// Tokens [from, from + count) of a row, which follow each other, as blocks of at most `most`; `at`: the first's
// position.
void add_blocks(Step& step, int64_t row, int64_t from, int64_t count, int64_t at, const int32_t* path, int64_t most) {
  const Attention& kind = *step.kind;
  const bool has_positions = !step.in[kEntryAt].absent;
  const int64_t past = step.past(row), end = min(past + step.count(row), step.entries), window = kind.window;
  for (int64_t i = (count - 1) / most * most; count && i >= 0; i -= most) {
    const int64_t tokens = min(most, count - i);
    Block block = {
        row, step.in[kStarts].as<int32_t>()[row] + from + i, tokens, at + i, 0, end, step.parts, past + from + i, path};
    if (kind.causal && !has_positions) block.last = min(block.at + tokens, end);
    if (window > 0 && !has_positions && block.at >= window) block.first = block.at - window + 1;
    step.parts += parts_of(block), step.longest = parts_of(block) > step.longest ? parts_of(block) : step.longest;
    step.blocks[step.num_blocks++] = block;
  }
}

// Tokens before one in its row, up to the row's past: its depth. They go to `path`, which ends with the token itself.
int64_t depth_of(const int64_t* parents, int64_t token, int32_t* path) {
  int64_t depth = 0;
  for (int64_t i = token - parents[token]; i >= 0; i -= parents[i]) depth++;
  if (path)
    for (int64_t i = token, at = depth; at >= 0; i -= parents[i]) path[at--] = static_cast<int32_t>(i);
  return depth;
}

// Tokens after one whose parent is the one before them.
int64_t run_of(const int64_t* parents, int64_t token, int64_t count) {
  int64_t end = token + 1;
  while (end < count && parents[end] == 1) end++;
  return end - token;
}

// The blocks of a row; `paths` is memory for those of its branches, and null where none has any.
void add_row(Step& step, int64_t row, int64_t most, int32_t*& paths) {
  const int64_t past = step.past(row), count = step.count(row);
  if (!paths || !count) return add_blocks(step, row, 0, count, past, nullptr, most);
  const int64_t* parents = step.in[kParents].as<int64_t>() + step.in[kStarts].as<int32_t>()[row];
  for (int64_t from = 0, run; from < count; from += run) {
    run = run_of(parents, from, count);
    int32_t* path = from ? paths : nullptr;
    const int64_t depth = depth_of(parents, from, path);
    if (path) {
      for (int64_t i = 1; i < run; i++) path[depth + i] = static_cast<int32_t>(from + i);
      paths += depth + run;
    }
    add_blocks(step, row, from, run, past + depth, path, most);
  }
}

// Entries of the paths of all branches, and how many there are.
int64_t path_entries(const Step& step, int64_t& branches) {
  int64_t entries = 0;
  branches = 0;
  for (int64_t row = 0; row < step.rows && !step.in[kParents].absent; row++) {
    const int64_t* parents = step.in[kParents].as<int64_t>() + step.in[kStarts].as<int32_t>()[row];
    for (int64_t i = 1; i < step.count(row); i++)
      if (parents[i] != 1) entries += depth_of(parents, i, nullptr) + run_of(parents, i, step.count(row)), branches++;
  }
  return entries;
}

Status* run(const void* kernel, KernelContext* context) {
  Step step = {};
  step.kind = static_cast<const Attention*>(kernel);
  for (size_t i = 0; i < kInputs; i++) TRY(input(context, i, step.in[i]));
  TRY(check(step));
  const int64_t dims[] = {step.tokens, step.kind->heads * step.v_dim};
  void* out;
  TRY(output(context, 0, dims, 2, &out));
  step.output = static_cast<float*>(out);
  step.keys = step.in[kKeys].as<char>(), step.values = step.in[kValues].as<char>();
  if (step.appends) {
    TRY(own(context, 1, step.in[kKeys], step.keys));
    TRY(own(context, 2, step.in[kValues], step.values));
  }
  if (step.tokens == 0) return nullptr;

  const int64_t tokens = kBlockQueries / step.group > 1 ? kBlockQueries / step.group : 1,
                kv_heads = step.kind->kv_heads;
  int64_t most_blocks = 0, branches = 0;
  const int64_t entries = path_entries(step, branches);
  for (int64_t row = 0; row < step.rows; row++) most_blocks += (step.count(row) + tokens - 1) / tokens;
  int32_t* paths;
  REQUIRE(allocate(Scratch::step, Array{step.blocks, most_blocks + branches}, Array{paths, entries}), "out of memory");
  if (!entries) paths = nullptr;
  for (int64_t row = step.rows - 1; row >= 0; row--) add_row(step, row, tokens, paths);  // the longest first
  if (step.appends) {
    const auto append_one = [&step](size_t i) {
      float* space;
      const bool is_ready = allocate(Scratch::part, Array{space, step.k_dim});
      if (is_ready) append(step, step.blocks[i], space);
      return is_ready;
    };
    if (step.tokens * kv_heads * (step.k_dim + step.v_dim) < 65536)  // less than it costs to wake a thread
      for (int64_t i = 0; i < step.num_blocks; i++) REQUIRE(append_one(i), "out of memory");
    else TRY(parallel_with_memory(context, step.num_blocks, append_one));
  }

  const int64_t items = step.num_blocks * kv_heads;
  const int64_t size = state_size(min(tokens, step.tokens) * step.group, step.v_pad);
  const bool by_block =
      items >= kEnoughItems || step.longest == 1 || step.parts * kv_heads > kMaxStateBytes / (size * 4);
  if (!by_block) {
    REQUIRE(allocate(Scratch::states, Array{step.states, step.parts * kv_heads * size}, Array{step.parts_left, items}),
        "out of memory");
    for (int64_t i = 0; i < items; i++) step.parts_left[i] = int(parts_of(step.blocks[i / kv_heads]));
  }
  return parallel_with_memory(context, by_block ? items : step.parts * kv_heads, [&](size_t i) {
    const int64_t head = int64_t(i) % kv_heads, number = int64_t(i) / kv_heads;
    int64_t at = by_block ? number : 0;
    while (!by_block && at + 1 < step.num_blocks && step.blocks[at + 1].part <= number) at++;
    const Block& block = step.blocks[at];
    float* states = by_block ? nullptr : step.states + (block.part * kv_heads + head * parts_of(block)) * size;
    return attend(step, block, head, by_block ? 0 : number - block.part, by_block ? parts_of(block) : 1, states,
        by_block ? nullptr : step.parts_left + at * kv_heads + head);
  });
}
}  // namespace

void define_attention(Operator& op) {
  for (size_t i = 0; i < kInputs; i++) op.inputs[i] = {ort::kFloat, i != kQ && i != kLens && i != kStarts};
  op.inputs[kKeys] = op.inputs[kValues] = {ort::kUndefined, false};  // float or int8
  op.inputs[kLens].type = op.inputs[kStarts].type = ort::kInt32;
  op.inputs[kAt].type = op.inputs[kEntryAt].type = op.inputs[kParents].type = ort::kInt64;
  op.name = "UnpaddedAttention";
  op.num_inputs = kInputs;
  op.outputs[0] = {ort::kFloat, false};
  op.outputs[1] = op.outputs[2] = {ort::kUndefined, true};
  op.num_outputs = 3;
  op.make = make;
  op.run = run;
}
}  // namespace specexport
