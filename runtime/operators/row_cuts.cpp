// Cuts of rows whose candidates are at hand: top-k, top-p and a threshold, then a draw; and what a refusal leaves of two.
// The rules are those of sampling/truncation.py and sampling/accept.py; sums run in the order that each line says.
#include <math.h>

#include "ort_abi.h"

namespace {
struct Candidate {
  int64_t id;
  double weight;
  float value;
};

template <class Before>
void sort(Candidate* all, int64_t count, Before before) {
  constexpr int64_t gaps[] = {57, 23, 10, 4, 1};
  for (int64_t gap : gaps)
    for (int64_t i = gap; i < count; i++) {
      Candidate moved = all[i];
      int64_t j = i;
      for (; j >= gap && before(moved, all[j - gap]); j -= gap) all[j] = all[j - gap];
      all[j] = moved;
    }
}

// The first place whose running sum is above `target`, or, by rounding, the last with mass.
template <class Mass>
int64_t find(int64_t count, double target, Mass mass) {
  double sum = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    double each = mass(i);
    sum += each;
    if (sum > target) return i;
    if (each > 0) last = i;
  }
  return last;
}
}  // namespace

constexpr int64_t kMost = 128, kAsk = 8, kFound = 8, kCut = 5;  // as in executors/row_kernels.py and row_cuts.py

// Of each row: `asks` [rows, 8] and `found` [rows, 8] as on the device, `kept_masses` [rows] (top-p of what the other cuts
// leave), candidates [rows, few] in any order. Gives numbers [rows, 5] (how many stay, the largest probability, the token at
// the uniform, its probability, that of the asked token), ids [rows, few] ascending and their probabilities. A row of which
// there are no candidates, or more than `few` (128 at most), has 0 that stay.
ORT_EXPORT void specexport_cut_rows(int64_t rows, int64_t few, const double* asks, const double* found, const double* kept_masses,
                                    const int32_t* ids, const float* values, double* cut, int64_t* kept_ids, double* kept_probs) {
  Candidate all[kMost];
  for (int64_t row = 0; row < rows; row++, asks += kAsk, found += kFound, cut += kCut, ids += few, values += few,
               kept_ids += few, kept_probs += few) {
    const double temperature = asks[0], uniform = asks[2], token = asks[3], least = asks[4], top_k = asks[5], of_all = asks[6];
    const double peak = found[0], total = found[1];
    cut[0] = 0;
    if (!(temperature > 0) || asks[7] == 0 || !isfinite(total) || !(found[5] >= 1 && found[5] <= few && few <= kMost)) continue;
    int64_t count = int64_t(found[5]);
    for (int64_t i = 0; i < count; i++) all[i] = {ids[i], 0.0, values[i]};
    sort(all, count, [](const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); });
    const float border = float(peak + least);
    int64_t kept = 0;
    double sum = 0;  // the likeliest first
    while (kept < count && all[kept].value >= border && !(top_k > 0 && double(kept) >= top_k)) {
      all[kept].weight = exp((double(all[kept].value) - peak) / temperature);
      sum += all[kept++].weight;
    }
    if (kept_masses[row] < 1) {
      const double goal = kept_masses[row] * (of_all > 0 ? total : sum);
      double running = 0;
      for (int64_t i = 0; i < kept; i++)
        if ((running += all[i].weight) >= goal) kept = i + 1;
      sum = running;
    }
    cut[0] = double(kept), cut[1] = all[0].weight / sum;
    sort(all, kept, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    cut[4] = 0;
    for (int64_t i = 0; i < kept; i++) {
      kept_ids[i] = all[i].id, kept_probs[i] = all[i].weight / sum;
      if (double(all[i].id) == token) cut[4] = kept_probs[i];
    }
    double drawn_from = 0;  // ids ascending, as the draw
    for (int64_t i = 0; i < kept; i++) drawn_from += kept_probs[i];
    const int64_t drawn = find(kept, uniform * drawn_from, [&](int64_t i) { return kept_probs[i]; });
    cut[2] = double(kept_ids[drawn]), cut[3] = kept_probs[drawn];
  }
}

// The masses max(0, weight * q - p) of two cut rows, ids ascending: gives their sum and the id at `uniform` of it, -1 without
// any mass. Without `num_drafts` p is one-hot at `token`.
ORT_EXPORT void specexport_cut_surplus(int64_t num_targets, const int64_t* target_ids, const double* target_probs, int64_t num_drafts,
                                       const int64_t* draft_ids, const double* draft_probs, int64_t token, double weight,
                                       double uniform, double* out) {
  double masses[kMost], sum = 0;
  for (int64_t i = 0, j = 0; i < num_targets; i++) {
    while (j < num_drafts && draft_ids[j] < target_ids[i]) j++;
    const bool is_both = j < num_drafts && draft_ids[j] == target_ids[i];
    const double mass = weight * target_probs[i] - (is_both ? draft_probs[j] : 0.0);
    masses[i] = mass > 0 && (num_drafts || target_ids[i] != token) ? mass : 0.0;
    sum += masses[i];
  }
  out[0] = sum;
  out[1] = sum > 0 ? double(target_ids[find(num_targets, uniform * sum, [&](int64_t i) { return masses[i]; })]) : -1;
}
