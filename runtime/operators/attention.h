// One part of attention, for each instruction set: what attention.cpp prepares and attention_tile.h computes.
#pragma once
#include <stdint.h>
#include <string.h>

namespace specexport {
constexpr int64_t kTileEntries = 64;   // cache entries whose scores are made together: bits of a mask
constexpr int64_t kPartEntries = 512;  // entries that share one running maximum; parts may be computed side by side
constexpr float kNoScore = -3.4028234663852886e38f;  // the maximum of no scores

// The queries of some tokens of a row: those of all heads that read one key/value head, token by token.
struct Queries {
  int64_t tokens, group, k_dim, v_dim, v_pad;  // v_pad: v_dim rounded up to 16
  const float* q;                              // [tokens * group, k_dim], times the scale
  const void* keys;                            // [entries, k_dim], of int8 or float
  const void* values;                          // [entries, v_dim]
  bool int8;
  const int64_t* first;  // [tokens] the entries [first, last) that each token sees,
  const int64_t* last;
  const int64_t* entry_at;  // unless the position in each entry is known, -1 for none: then those up to its own
  const int64_t* at;        // [tokens] its position
  int64_t window;           // with entry_at; -1: all
  const float* slopes;      // [group] or null
  float softcap;
  const int32_t* path;  // of a branch: new tokens of the row at positions from `past` on, in entries from there on
  int64_t past;
};

// Softmax so far: largest score, sum of weights and weighted values of each query.
struct State {
  float* max;  // [queries]
  float* sum;  // [queries]
  float* acc;  // [queries, v_pad]
};

// What a tile is computed in, of the calling thread.
struct Workspace {
  float* keys;      // [k_dim rounded up to 16, kTileEntries]: transposed
  float* values;    // [kTileEntries, v_pad]
  float* scores;    // [queries, kTileEntries]
  uint64_t* masks;  // [queries] a bit an entry
  float* gathered;  // [kTileEntries, k_dim] and [kTileEntries, v_dim]: of a path
};

// Kernels of one instruction set. All of them compute each query alone, in an order that knows nothing of the others.
struct AttentionKernels {
  void (*attend)(const Queries&, int64_t from, int64_t to, State, Workspace);  // over entries [from, to) of one part
  void (*merge)(State total, State part, int64_t queries, int64_t v_pad);      // what comes after it
  // Weighted means of one query [v_dim], times `scales` unless null; `sink` is one more score, without a value.
  void (*finish)(State, int64_t query, int64_t v_pad, int64_t v_dim, const float* sink, const float* scales, float*);
};
extern const AttentionKernels attention_portable, attention_avx2, attention_avx512;
}  // namespace specexport
