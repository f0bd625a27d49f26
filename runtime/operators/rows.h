// Rows of logits: what Python asks of them, and passes over one for each instruction set, which rows.cpp draws from.
//
// The structures are ctypes.Structure in executors/row_kernels.py. A GPU's kernels read and write the first three too,
// as arrays of float64: hence ids and counts of that type.
#pragma once
#include <stdint.h>
#include <string.h>

#include "ort_abi.h"

namespace specexport {
struct RowQuery {
  double temperature;  // 0: only the likeliest token is wanted
  double width;        // ids that count; 0 for all
  double uniform;      // of the token that is drawn
  double token;        // whose probability is wanted too; -1 for none
  double least;        // candidates lie no further below the peak, 0 or less; -inf where no cut says so
  double top_k;        // candidates hold as many of the largest logits; 0 for no such cut
  double top_p;        // candidates hold this much of the whole row's mass; 0 for no such cut
  double cuts;         // 1: candidates are wanted, and no draw
};
struct RowResult {
  double peak;   // the largest logit
  double total;  // sum of exp((x - peak) / T); NaN if the row holds NaN or +inf, or no finite logit
  double drawn;  // the token at the uniform
  double drawn_probability;
  double token_probability;  // of the asked one
  double candidates;         // how many there are; above kMaxCandidates of too many
  double least;              // of a GPU alone
  double likeliest;          // the likeliest token; -1 if the row holds NaN. Of a row on a CPU alone
};
// Two rows: the sum of max(0, weight * q - p), and the token at a uniform of it.
struct ResidualQuery {
  double temperature, width, peak, total;                          // of q
  double other_temperature, other_width, other_peak, other_total;  // of p
  double weight, token, uniform;                                   // `token` is of a GPU alone
  const float *target, *draft;                                     // q, p: int64 in Python
};
struct ResidualResult {
  double total, token;  // -1 without any mass
};
// What a row's cut leaves.
struct CutResult {
  double count;  // tokens that stay
  double top;    // the largest probability
  double drawn, drawn_probability, token_probability;
};
static_assert(sizeof(RowQuery) == 64 && sizeof(RowResult) == 64 && sizeof(ResidualQuery) == 104 &&
                  sizeof(ResidualResult) == 16 && sizeof(CutResult) == 40,
    "they have no gaps");

constexpr int64_t kMaxCandidates = 1024, kBlockLogits = 512;
// exp((x - peak) * inverse) * scale; `inverse` is 1 / T.
struct Softmax {
  double peak, inverse, scale;
};

struct RowKernels {
  float (*largest)(const float* x, int64_t count);  // NaN if any is
  // Sum of the masses of `count` logits, which go to `masses` unless that is null.
  double (*sum)(const float* x, int64_t count, const Softmax& softmax, double* masses);
  // The same of max(0, q - p), where `q` and `p` are logits.
  double (*residual)(
      const float* q, const Softmax& of_q, const float* p, const Softmax& of_p, int64_t count, double* masses);
};
extern const RowKernels rows_portable, rows_avx2, rows_avx512;
}  // namespace specexport

// Of each row: query and result as on the device, `kept_masses` [rows] (top-p of what the other cuts leave), candidates
// [rows, most] in any order. Gives what stays: ids [rows, most] ascending, and their probabilities. A row of which
// there are no candidates, or more than `most` (kMaxCandidates at most), has 0 that stay.
ORT_EXPORT void specexport_cut_rows(int64_t rows, int64_t most, const specexport::RowQuery* queries,
    const specexport::RowResult* results, const double* kept_masses, const int32_t* ids, const float* values,
    specexport::CutResult* cuts, int64_t* kept_ids, double* kept_probs);
// The residual of two cut rows, ids ascending.
ORT_EXPORT void specexport_cut_residual(int64_t num_targets, const int64_t* target_ids, const double* target_probs,
    int64_t num_drafts, const int64_t* draft_ids, const double* draft_probs, double weight, double uniform,
    specexport::ResidualResult* result);
// What is asked of a row of `count` logits in memory, and candidates [kMaxCandidates] where a cut wants them. `peaks`
// and `sorted` [blocks] and `sums` [blocks] are memory for blocks of kBlockLogits.
ORT_EXPORT void specexport_query_row(const float* x, int64_t count, const specexport::RowQuery* query,
    specexport::RowResult* result, int32_t* ids, float* values, float* peaks, float* sorted, double* sums);
// The residual of two rows in memory; `sums` as above.
ORT_EXPORT void specexport_row_residual(
    const specexport::ResidualQuery* query, double* sums, specexport::ResidualResult* result);
