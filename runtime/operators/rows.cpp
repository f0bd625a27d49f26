// Draws from rows of logits, cuts of their candidates, and what a refusal leaves of two of them. The rules are those of
// sampling/truncation.py and sampling/accept.py.
#include "kernels.h"

#include <math.h>

namespace specexport {
namespace {
constexpr double kColdest = 1e-300;  // temperature

struct Candidate {
  int64_t id;
  double mass;
  float value;
};

template <class Before>
void sort(Candidate* all, int64_t count, Before before) {
  constexpr int64_t gaps[] = {301, 132, 57, 23, 10, 4, 1};
  for (int64_t gap : gaps)
    for (int64_t i = gap; i < count; i++) {
      Candidate moved = all[i];
      int64_t j = i;
      for (; j >= gap && before(moved, all[j - gap]); j -= gap) all[j] = all[j - gap];
      all[j] = moved;
    }
}

// The first place with mass whose running sum is above `target`, or, by rounding, the last with mass.
template <class Mass>
int64_t find(int64_t count, double target, Mass mass) {
  double sum = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    double each = mass(i);
    sum += each;
    if (!(each > 0)) continue;  // also where rounding has left a target below 0
    if (sum > target) return i;
    last = i;
  }
  return last;
}

// A row of `width` logits in blocks, with the sum of each and room for the masses of one.
struct Blocks {
  int64_t width;
  double* sums;
  double masses[kBlockLogits];

  int64_t size(int64_t block) const {
    const int64_t left = width - block * kBlockLogits;
    return left < kBlockLogits ? left : kBlockLogits;
  }
  int64_t count() const { return (width + kBlockLogits - 1) / kBlockLogits; }
  // The place at `target` of the running sum; `fill` puts a block's masses there.
  template <class Fill>
  int64_t draw(double target, Fill fill) {
    const int64_t block = find(count(), target, [&](int64_t i) { return sums[i]; });
    for (int64_t i = 0; i < block; i++) target -= sums[i];
    fill(block);
    return block * kBlockLogits + find(size(block), target, [&](int64_t i) { return masses[i]; });
  }
};

// Ids and logits of those from `least` on, at most kMaxCandidates; one more than that if there are more.
int64_t gather(const float* x, const float* peaks, const Blocks& row, float least, int32_t* ids, float* values) {
  int64_t found = 0;
  for (int64_t block = 0; block < row.count(); block++) {
    if (!(peaks[block] >= least)) continue;
    for (int64_t i = block * kBlockLogits, end = i + row.size(block); i < end; i++) {
      if (!(x[i] >= least)) continue;
      if (found == kMaxCandidates) return kMaxCandidates + 1;
      ids[found] = int32_t(i);
      values[found++] = x[i];
    }
  }
  return found;
}

// The k-th largest of the blocks' peaks, from which on there are k logits or more; -inf of fewer blocks.
float kth_peak(const float* peaks, int64_t blocks, double wanted, float* sorted) {
  if (!(wanted >= 1 && wanted <= double(blocks))) return -INFINITY;
  int64_t k = int64_t(wanted), kept = 0;
  for (int64_t i = 0; i < blocks; i++) {
    if (kept == k && !(peaks[i] > sorted[kept - 1])) continue;
    int64_t j = kept < k ? kept++ : k - 1;
    for (; j > 0 && sorted[j - 1] < peaks[i]; j--) sorted[j] = sorted[j - 1];
    sorted[j] = peaks[i];
  }
  return sorted[k - 1];
}
}  // namespace
}  // namespace specexport

using namespace specexport;

void specexport_cut_rows(int64_t rows, int64_t most, const RowQuery* queries, const RowResult* results,
    const double* kept_masses, const int32_t* ids, const float* values, CutResult* cuts, int64_t* kept_ids,
    double* kept_probs) {
  Candidate all[kMaxCandidates];
  for (int64_t row = 0; row < rows; row++, ids += most, values += most, kept_ids += most, kept_probs += most) {
    const RowQuery& query = queries[row];
    const RowResult& of_row = results[row];
    CutResult& cut = cuts[row];
    cut.count = 0;
    const bool is_wanted = query.temperature > 0 && query.cuts != 0 && isfinite(of_row.total);
    if (!is_wanted || !(of_row.candidates >= 1 && of_row.candidates <= double(most) && most <= kMaxCandidates))
      continue;
    const int64_t count = int64_t(of_row.candidates);
    for (int64_t i = 0; i < count; i++) all[i] = {ids[i], 0.0, values[i]};
    sort(all, count, [](const Candidate& a, const Candidate& b) {
      return a.value > b.value || (a.value == b.value && a.id < b.id);
    });
    const float border = float(of_row.peak + query.least);
    int64_t kept = 0;
    double sum = 0;  // the likeliest first
    while (kept < count && all[kept].value >= border && !(query.top_k > 0 && double(kept) >= query.top_k)) {
      all[kept].mass = exp((double(all[kept].value) - of_row.peak) / query.temperature);
      sum += all[kept++].mass;
    }
    if (kept_masses[row] < 1) {
      const double goal = kept_masses[row] * (query.top_p > 0 ? of_row.total : sum);
      double running = 0;
      for (int64_t i = 0; i < kept; i++) {
        running += all[i].mass;
        if (running >= goal) kept = i + 1;
      }
      sum = running;
    }
    cut = {double(kept), all[0].mass / sum, 0, 0, 0};
    sort(all, kept, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    double drawn_from = 0;  // ids ascending, as the draw
    for (int64_t i = 0; i < kept; i++) {
      kept_ids[i] = all[i].id;
      kept_probs[i] = all[i].mass / sum;
      drawn_from += kept_probs[i];
      if (double(all[i].id) == query.token) cut.token_probability = kept_probs[i];
    }
    const int64_t drawn = find(kept, query.uniform * drawn_from, [&](int64_t i) { return kept_probs[i]; });
    cut.drawn = double(kept_ids[drawn]);
    cut.drawn_probability = kept_probs[drawn];
  }
}

void specexport_cut_residual(int64_t num_targets, const int64_t* target_ids, const double* target_probs,
    int64_t num_drafts, const int64_t* draft_ids, const double* draft_probs, double weight, double uniform,
    ResidualResult* result) {
  double masses[kMaxCandidates], sum = 0;
  num_targets = num_targets < kMaxCandidates ? num_targets : kMaxCandidates;
  for (int64_t i = 0, j = 0; i < num_targets; i++) {
    while (j < num_drafts && draft_ids[j] < target_ids[i]) j++;
    const bool is_both = j < num_drafts && draft_ids[j] == target_ids[i];
    const double mass = weight * target_probs[i] - (is_both ? draft_probs[j] : 0.0);
    masses[i] = mass > 0 ? mass : 0.0;
    sum += masses[i];
  }
  const auto drawn = [&] { return find(num_targets, uniform * sum, [&](int64_t i) { return masses[i]; }); };
  *result = {sum, sum > 0 ? double(target_ids[drawn()]) : -1};
}

void specexport_query_row(const float* x, int64_t count, const RowQuery* asked, RowResult* result, int32_t* ids,
    float* values, float* peaks, float* sorted, double* sums) {
  const RowKernels& with = kernels().rows;
  const RowQuery& query = *asked;
  const bool is_narrow = query.width > 0 && query.width < double(count);
  Blocks row{is_narrow ? int64_t(query.width) : count, sums, {}};
  float peak = -INFINITY;
  int64_t likeliest = -1;
  bool has_nan = false;
  for (int64_t block = 0; block < row.count(); block++) {
    peaks[block] = with.largest(x + block * kBlockLogits, row.size(block));
    has_nan |= bool(isnan(peaks[block]));
    if (!(peaks[block] > peak)) continue;
    peak = peaks[block];
    likeliest = block * kBlockLogits;
  }
  while (likeliest >= 0 && x[likeliest] != peak) likeliest++;
  *result = {peak, NAN, 0, 0, 0, 0, 0, has_nan ? -1.0 : double(likeliest)};
  if (has_nan || !isfinite(peak) || !(query.temperature > 0)) return;
  const Softmax softmax = {peak, 1 / fmax(query.temperature, kColdest), 1};
  double total = 0;
  const bool is_whole = query.cuts == 0 || query.top_p > 0;  // else what the cuts leave says all
  for (int64_t block = 0; is_whole && block < row.count(); block++)
    total += sums[block] = with.sum(x + block * kBlockLogits, row.size(block), softmax, nullptr);
  result->total = is_whole ? total : 1;
  if (query.cuts == 0) {
    const auto fill = [&](int64_t block) { with.sum(x + block * kBlockLogits, row.size(block), softmax, row.masses); };
    const int64_t drawn = row.draw(query.uniform * total, fill);
    result->drawn = double(drawn);
    result->drawn_probability = row.masses[drawn % kBlockLogits] / total;
    if (query.token >= 0 && query.token < double(row.width)) {
      with.sum(x + int64_t(query.token), 1, softmax, row.masses);
      result->token_probability = row.masses[0] / total;
    }
    return;
  }
  float least = float(peak + query.least);
  const float border = kth_peak(peaks, row.count(), query.top_k, sorted);
  if (border > least) least = border;
  // Where no border is known, the likeliest that are enough: half a nat more at a time.
  const bool is_open = query.top_p > 0 || (query.top_k > 0 && border == -INFINITY);
  for (double nats = 0.5;; nats += 0.5) {
    const double step = peak - nats * query.temperature;
    const bool is_last = !is_open || step <= least || nats > 750;
    const int64_t taken = gather(x, peaks, row, is_last ? least : float(step), ids, values);
    result->candidates = double(taken);
    if (is_last || taken > kMaxCandidates || (query.top_k > 0 && double(taken) >= query.top_k)) return;
    double mass = 0;
    for (int64_t i = 0; i < taken && query.top_p > 0; i++) mass += exp((double(values[i]) - peak) / query.temperature);
    if (query.top_p > 0 && mass >= query.top_p * total) return;
  }
}

void specexport_row_residual(const ResidualQuery* query, double* sums, ResidualResult* result) {
  const RowKernels& with = kernels().rows;
  const Softmax of_q = {query->peak, 1 / fmax(query->temperature, kColdest), query->weight / query->total};
  const Softmax of_p = {query->other_peak, 1 / fmax(query->other_temperature, kColdest), 1 / query->other_total};
  const int64_t drafts = int64_t(query->other_width);
  Blocks row{int64_t(query->width), sums, {}};
  const auto masses = [&](int64_t block, double* out) {
    const int64_t start = block * kBlockLogits, size = row.size(block);
    const float* q = query->target + start;
    const int64_t both = drafts < start ? 0 : drafts - start < size ? drafts - start : size;
    double sum = both ? with.residual(q, of_q, query->draft + start, of_p, both, out) : 0;
    if (size > both) sum += with.sum(q + both, size - both, of_q, out ? out + both : nullptr);
    return sum;
  };
  double total = 0;
  for (int64_t block = 0; block < row.count(); block++) total += sums[block] = masses(block, nullptr);
  const auto drawn = [&] {
    return row.draw(query->uniform * total, [&](int64_t block) { masses(block, row.masses); });
  };
  *result = {total, total > 0 ? double(drawn()) : -1};
}
