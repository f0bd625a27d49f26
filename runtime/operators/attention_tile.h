// Attention over tiles of cache entries, in vectors of LANES floats. Included once an instruction set, with TARGET (the
// attribute of its functions), FMA(a, b, c) and QUERIES (of a block in registers) defined; KERNELS is what it defines.
//
// Scores have entries in their lanes (keys are transposed once a tile), weighted values have channels: nothing is
// ever summed across lanes but a tile's weights, and each query adds up in one order whatever stands beside it.
#define INLINE TARGET static inline __attribute__((always_inline))
#include "exp.h"

namespace specexport {
namespace {
typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));
typedef uint32_t U __attribute__((vector_size(LANES * 4)));  // where what is not used may wrap
typedef int8_t B __attribute__((vector_size(LANES)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // anywhere in memory
typedef int8_t LooseB __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE V load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
INLINE V load(const int8_t* p) { return __builtin_convertvector(B(*reinterpret_cast<const LooseB*>(p)), V); }
INLINE void store(float* p, V v) { *reinterpret_cast<Loose*>(p) = v; }
INLINE V all(float x) { return x - V{}; }
INLINE V larger(V a, V b) { return a > b ? a : b; }

#if LANES == 16
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define FOLDS(v, OP)                                                                              \
  v = OP(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  v = OP(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  v = OP(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  v = OP(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
INLINE V zip_low(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE V zip_high(V a, V b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif LANES == 8
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#define FOLDS(v, OP)                                                \
  v = OP(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3)); \
  v = OP(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5)); \
  v = OP(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
INLINE V zip_low(V a, V b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE V zip_high(V a, V b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
#define LANE_NUMBERS 0, 1, 2, 3
#define FOLDS(v, OP)                                    \
  v = OP(v, __builtin_shufflevector(v, v, 2, 3, 0, 1)); \
  v = OP(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
INLINE V zip_low(V a, V b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
INLINE V zip_high(V a, V b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif
INLINE V plus(V a, V b) { return a + b; }
INLINE float sum_of(V v) {
  FOLDS(v, plus)
  return v[0];
}
INLINE float largest_of(V v) {
  FOLDS(v, larger)
  return v[0];
}

INLINE V exp_of(V x) { return exp_of<ExpFloat, U>(x); }
INLINE float exp_of(float x) { return exp_of(all(x))[0]; }

// cap * tanh(x / cap), by its series near 0, where the quotient would lose digits.
INLINE V capped(V x, float cap) {
  const V y = x / all(cap), size = y < V{} ? -y : y, square = y * y;
  V near = FMA(all(62.0f / 2835), square, all(-17.0f / 315));
  near = FMA(near, square, all(2.0f / 15));
  near = FMA(near, square, all(-1.0f / 3));
  near = FMA(near * square, y, y);
  const V e = exp_of(all(-2.0f) * size), far = (all(1.0f) - e) / (all(1.0f) + e);
  return all(cap) * (size < all(0.25f) ? near : y < V{} ? -far : far);
}

// LANES floats of a row from `at` on, with zeros after its end.
template <class T>
INLINE V load_tail(const T* row, int64_t at, int64_t size) {
  if (at + LANES <= size) return load(row + at);
  float part[LANES] = {};
  for (int64_t i = at; i < size; i++) part[i - at] = float(row[i]);
  return load(part);
}

// Packs keys: entries [first, last) of a tile into [tile / 16][k_dim][16]; the others there become zeros.
template <class T>
TARGET void transpose_keys(const T* keys, int64_t dim, int64_t first, int64_t last, float* out) {
  const int64_t padded = (dim + 15) / 16 * 16;
  for (int64_t entry = first / 16 * 16; entry < (last + 15) / 16 * 16; entry += LANES)
    for (int64_t d = 0; d < dim; d += LANES) {
      V rows[LANES], zipped[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) {
        const int64_t e = entry + i;
        rows[i] = e >= first && e < last ? load_tail(keys + e * dim, d, dim) : V{};
      }
#pragma GCC unroll 4
      for (int width = 1; width < LANES; width *= 2) {  // perfect shuffles, as many as transpose all
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
          zipped[2 * i] = zip_low(rows[i], rows[i + LANES / 2]);
          zipped[2 * i + 1] = zip_high(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = zipped[i];
      }
      float* at = out + entry / 16 * 16 * padded + entry % 16 + d * 16;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(at + i * 16, rows[i]);
    }
}

// Scores of N queries against 16 * GROUPS entries.
template <int N, int GROUPS>
INLINE void score_block(const float* q, const float* keys, int64_t dim, float* scores) {
  constexpr int kVectors = GROUPS * 16 / LANES, kOfGroup = 16 / LANES;
  const int64_t padded = (dim + 15) / 16 * 16;
  V sums[N][kVectors] = {};
  for (int64_t d = 0; d < dim; d++) {
    V k[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) k[i] = load(keys + i / kOfGroup * 16 * padded + d * 16 + i % kOfGroup * LANES);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const V x = all(q[n * dim + d]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) sums[n][i] = FMA(x, k[i], sums[n][i]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) store(scores + n * kTileEntries + i * LANES, sums[n][i]);
}

// Adds N queries' weighted values of entries [first, last) to 16 * GROUPS channels of what they have, times `rescale`.
template <int N, int GROUPS, bool ALL>
INLINE void accumulate_block(const float* weights, const float* values, int64_t stride, int64_t first, int64_t last,
    const uint64_t* masks, const float* rescale, float* acc, int64_t v_pad) {
  constexpr int kVectors = GROUPS * 16 / LANES;
  V sums[N][kVectors];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) sums[n][i] = load(acc + n * v_pad + i * LANES) * all(rescale[n]);
  for (int64_t e = first; e < last; e++) {
    V v[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) v[i] = load(values + e * stride + i * LANES);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      if (!ALL && !(masks[n] >> e & 1)) continue;  // 0 * NaN would be NaN
      const V w = all(weights[n * kTileEntries + e]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) sums[n][i] = FMA(w, v[i], sums[n][i]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) store(acc + n * v_pad + i * LANES, sums[n][i]);
}

struct Tile {
  int64_t start, first, last;  // entry of its first lane; lanes that some query sees
  const float* values;
  int64_t stride;
};

// Online softmax: scores of one query become weights; returns what its sums so far are to be rescaled by.
INLINE float online_softmax(
    const Queries& given, const Tile& tile, int64_t query, float* scores, uint64_t mask, State state) {
  constexpr int kVectors = kTileEntries / LANES;
  const I numbers = {LANE_NUMBERS};
  const I bit = (I{} + 1) << numbers;
  const int64_t token = query / given.group, used = (tile.last + LANES - 1) / LANES;
  V x[kVectors], max = all(kNoScore);
  for (int i = 0; i < used; i++) {
    x[i] = load(scores + i * LANES);
    if (given.softcap > 0) x[i] = capped(x[i], given.softcap);
    if (given.slopes) {
      I gap = numbers + (given.entry_at ? 0 : int32_t(tile.start + i * LANES - given.at[token]));
      if (given.entry_at)
        for (int lane = 0; lane < LANES; lane++)
          if (mask >> (i * LANES + lane) & 1)
            gap[lane] = int32_t(given.entry_at[tile.start + i * LANES + lane] - given.at[token]);
      x[i] = x[i] + all(given.slopes[query % given.group]) * __builtin_convertvector(gap, V);
    }
    const I shown = (I{} + int32_t(mask >> (i * LANES) & 0xffff)) & bit;
    x[i] = shown != 0 ? x[i] : all(-__builtin_inff());
    max = larger(x[i], max);
  }
  const float before = state.max[query], now = largest_of(larger(max, all(before)));
  V sum[4] = {};
  for (int i = 0; i < kVectors; i++) {
    const V weight = i < used ? exp_of(x[i] - all(now)) : V{};
    store(scores + i * LANES, weight);
    sum[i % 4] = sum[i % 4] + weight;
  }
  const float rescale = exp_of(before - now);
  state.max[query] = now;
  state.sum[query] = state.sum[query] * rescale + sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
  return rescale;
}

// Weighted values of lanes [first, last), which all N queries see, or each its own.
template <int N, bool ALL>
INLINE void accumulate(const Queries& given, const Tile& tile, int64_t query, int64_t first, int64_t last,
    const float* rescale, const State& state, const Workspace& space) {
  constexpr int kWide = LANES == 16 ? 4 : 1;
  const float* weights = space.scores + query * kTileEntries;
  const uint64_t* masks = space.masks + query;
  const int64_t dim = given.v_pad;
  float* to = state.acc + query * dim;
  int64_t at = 0;
  for (; at + kWide * 16 <= dim; at += kWide * 16)
    accumulate_block<N, kWide, ALL>(weights, tile.values + at, tile.stride, first, last, masks, rescale, to + at, dim);
  for (; at < dim; at += 16)
    accumulate_block<N, 1, ALL>(weights, tile.values + at, tile.stride, first, last, masks, rescale, to + at, dim);
}

template <int N>
TARGET void attend_block(const Queries& given, const Tile& whole, int64_t query, State state, const Workspace& space) {
  uint64_t any = 0, common = ~uint64_t(0);
  for (int n = 0; n < N; n++) any |= space.masks[query + n], common &= space.masks[query + n];
  if (!any) return;
  Tile tile = whole;
  tile.first = __builtin_ctzll(any), tile.last = kTileEntries - __builtin_clzll(any);
  const float* q = given.q + query * given.k_dim;
  float* scores = space.scores + query * kTileEntries;
  const int64_t padded = (given.k_dim + 15) / 16 * 16;
  int64_t group = tile.first / 16;
  if (LANES == 16 && tile.last > 48 && group == 0)
    score_block<N, LANES == 16 ? 4 : 1>(q, space.keys, given.k_dim, scores), group = 4;
  for (; group * 16 < tile.last; group++)
    score_block<N, 1>(q, space.keys + group * 16 * padded, given.k_dim, scores + group * 16);
  float rescale[N];
  for (int n = 0; n < N; n++)
    rescale[n] = online_softmax(given, tile, query + n, scores + n * kTileEntries, space.masks[query + n], state);
  if (any == common && any == ~uint64_t(0) >> (kTileEntries - tile.last) >> tile.first << tile.first)
    accumulate<N, true>(given, tile, query, tile.first, tile.last, rescale, state, space);
  else accumulate<N, false>(given, tile, query, tile.first, tile.last, rescale, state, space);
}

template <int N>
TARGET void attend_tail(
    const Queries& given, const Tile& tile, int64_t query, int64_t rest, State state, const Workspace& space) {
  if constexpr (N > 0) {
    if (rest == N) return attend_block<N>(given, tile, query, state, space);
    attend_tail<N - 1>(given, tile, query, rest, state, space);
  }
}

// Which entries of a tile each query sees; finds the lanes that some do, false if there are none.
INLINE bool build_masks(const Queries& given, Tile& tile, int64_t from, int64_t to, uint64_t* masks) {
  uint64_t any = 0;
  for (int64_t token = 0; token < given.tokens; token++) {
    const int64_t first = given.first[token] > from ? given.first[token] : from;
    const int64_t last = given.last[token] < to ? given.last[token] : to;
    const int64_t low = first > tile.start ? first - tile.start : 0, high = last - tile.start;
    uint64_t bits = 0;
    if (high > low && low < kTileEntries)
      bits = (high >= kTileEntries ? ~uint64_t(0) : (uint64_t(1) << high) - 1) >> low << low;
    if (given.entry_at)
      for (int64_t lane = 0; lane < kTileEntries; lane++) {
        if (!(bits >> lane & 1)) continue;
        const int64_t entry = given.entry_at[tile.start + lane], at = given.at[token];
        if (entry < 0 || entry > at || (given.window > 0 && entry <= at - given.window)) bits &= ~(uint64_t(1) << lane);
      }
    for (int64_t i = 0; i < given.group; i++) masks[token * given.group + i] = bits;
    any |= bits;
  }
  if (any) tile.first = __builtin_ctzll(any), tile.last = kTileEntries - __builtin_clzll(any);
  return any;
}

template <class T>
TARGET void attend_as(const Queries& given, int64_t from, int64_t to, State state, const Workspace& space) {
  const int64_t queries = given.tokens * given.group;
  for (int64_t i = 0; i < queries; i++) state.max[i] = kNoScore, state.sum[i] = 0;
  for (int64_t i = 0; i < queries * given.v_pad; i++) state.acc[i] = 0;
  for (int64_t start = from / kTileEntries * kTileEntries; start < to; start += kTileEntries) {
    Tile tile = {start, 0, 0, nullptr, given.v_dim};
    if (!build_masks(given, tile, from, to, space.masks)) continue;
    const T* keys = static_cast<const T*>(given.keys) + start * given.k_dim;
    const T* values = static_cast<const T*>(given.values) + start * given.v_dim;
    if (given.path && start + tile.last > given.past) {
      T *path_keys = reinterpret_cast<T*>(space.gathered), *path_values = path_keys + kTileEntries * given.k_dim;
      for (int64_t e = tile.first; e < tile.last; e++) {
        const int64_t behind = start + e - given.past, from = behind < 0 ? e : e - behind + given.path[behind];
        memcpy(path_keys + e * given.k_dim, keys + from * given.k_dim, given.k_dim * sizeof(T));
        memcpy(path_values + e * given.v_dim, values + from * given.v_dim, given.v_dim * sizeof(T));
      }
      keys = path_keys, values = path_values;
    }
    transpose_keys(keys, given.k_dim, tile.first, tile.last, space.keys);
    tile.values = reinterpret_cast<const float*>(values);
    if (given.int8 || given.v_dim != given.v_pad) {
      for (int64_t e = tile.first; e < tile.last; e++)
        for (int64_t d = 0; d < given.v_pad; d += LANES)
          store(space.values + e * given.v_pad + d, load_tail(values + e * given.v_dim, d, given.v_dim));
      tile.values = space.values, tile.stride = given.v_pad;
    }
    int64_t query = 0;
    for (; query + QUERIES <= queries; query += QUERIES) attend_block<QUERIES>(given, tile, query, state, space);
    attend_tail<QUERIES - 1>(given, tile, query, queries - query, state, space);
  }
}

TARGET void attend(const Queries& given, int64_t from, int64_t to, State state, Workspace space) {
  if (given.int8) attend_as<int8_t>(given, from, to, state, space);
  else attend_as<float>(given, from, to, state, space);
}

TARGET void merge(State total, State part, int64_t queries, int64_t v_pad) {
  for (int64_t i = 0; i < queries; i++) {
    if (part.max[i] == kNoScore && part.sum[i] == 0) continue;  // it sees nothing there
    const bool alone = total.max[i] == kNoScore && total.sum[i] == 0;
    const float max = total.max[i] > part.max[i] ? total.max[i] : part.max[i];
    const float old = alone ? 0.0f : exp_of(total.max[i] - max), added = exp_of(part.max[i] - max);
    total.sum[i] = total.sum[i] * old + part.sum[i] * added;
    total.max[i] = max;
    for (int64_t d = 0; d < v_pad; d += LANES) {
      float* acc = total.acc + i * v_pad + d;
      store(acc, FMA(load(acc), all(old), load(part.acc + i * v_pad + d) * all(added)));
    }
  }
}

TARGET void finish(
    State state, int64_t query, int64_t v_pad, int64_t v_dim, const float* sink, const float* scales, float* out) {
  float sum = state.sum[query], factor = 1;
  if (sink) {
    const float max = state.max[query] > *sink ? state.max[query] : *sink;
    factor = exp_of(state.max[query] - max);
    sum = sum * factor + exp_of(*sink - max);
  }
  factor = sum == 0 ? 0 : factor / sum;
  const float* acc = state.acc + query * v_pad;
  for (int64_t d = 0; d < v_dim; d++) out[d] = scales ? acc[d] * factor * scales[d] : acc[d] * factor;
}
}  // namespace
extern const AttentionKernels KERNELS = {attend, merge, finish};
}  // namespace specexport
