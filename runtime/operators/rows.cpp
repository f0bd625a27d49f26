// Draws from rows of logits, cuts of their candidates, and what a refusal leaves of two of them. The rules are those of
// sampling/truncation.py and sampling/accept.py, and what is asked and found is as in executors/row_kernels.py.
#include "rows.h"

#include <math.h>

#include "cpu.h"
#include "ort_abi.h"

namespace specexport {
namespace {
constexpr int64_t kMostCut = 1024, kAsk = 8, kFound = 8, kCut = 5, kBlock = 512;
constexpr double kColdest = 1e-300;  // temperature

struct Candidate {
  int64_t id;
  double weight;
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

const RowKernels& kernels() {
#if defined(__x86_64__) || defined(_M_X64)
  if (isa() == Isa::avx512vnni || isa() == Isa::amx) return rows_avx512;
  if (isa() != Isa::portable) return rows_avx2;
#endif
  return rows_portable;
}

// A row of `width` logits in blocks, with the sum of each and room for the masses of one.
struct Blocks {
  int64_t width;
  double* sums;
  double masses[kBlock];

  int64_t size(int64_t block) const { return width - block * kBlock < kBlock ? width - block * kBlock : kBlock; }
  int64_t count() const { return (width + kBlock - 1) / kBlock; }
  // The place at `target` of the running sum; `fill` puts a block's masses there.
  template <class Fill>
  int64_t draw(double target, Fill fill) {
    const int64_t block = find(count(), target, [&](int64_t i) { return sums[i]; });
    for (int64_t i = 0; i < block; i++) target -= sums[i];
    fill(block);
    return block * kBlock + find(size(block), target, [&](int64_t i) { return masses[i]; });
  }
};

// Ids and logits of those from `least` on, at most kMostCut; one more than that if there are more.
int64_t gather(const float* x, const float* tops, const Blocks& row, float least, int32_t* ids, float* values) {
  int64_t found = 0;
  for (int64_t block = 0; block < row.count(); block++) {
    if (!(tops[block] >= least)) continue;
    for (int64_t i = block * kBlock, end = i + row.size(block); i < end; i++) {
      if (!(x[i] >= least)) continue;
      if (found == kMostCut) return kMostCut + 1;
      ids[found] = int32_t(i), values[found++] = x[i];
    }
  }
  return found;
}

// The k-th largest of the blocks' tops, from which on there are k logits or more; -inf of fewer blocks.
float kth(const float* tops, int64_t blocks, double wanted, float* room) {
  if (!(wanted >= 1 && wanted <= double(blocks))) return -INFINITY;
  int64_t k = int64_t(wanted), kept = 0;
  for (int64_t i = 0; i < blocks; i++) {
    if (kept == k && !(tops[i] > room[kept - 1])) continue;
    int64_t j = kept < k ? kept++ : k - 1;
    for (; j > 0 && room[j - 1] < tops[i]; j--) room[j] = room[j - 1];
    room[j] = tops[i];
  }
  return room[k - 1];
}
}  // namespace
}  // namespace specexport

using namespace specexport;

// Of each row: `asks` [rows, 8] and `found` [rows, 8] as on the device, `kept_masses` [rows] (top-p of what the other cuts
// leave), candidates [rows, few] in any order. Gives numbers [rows, 5] (how many stay, the largest probability, the token at
// the uniform, its probability, that of the asked token), ids [rows, few] ascending and their probabilities. A row of which
// there are no candidates, or more than `few` (1024 at most), has 0 that stay.
ORT_EXPORT void specexport_cut_rows(int64_t rows, int64_t few, const double* asks, const double* found, const double* kept_masses,
                                    const int32_t* ids, const float* values, double* cut, int64_t* kept_ids, double* kept_probs) {
  Candidate all[kMostCut];
  for (int64_t row = 0; row < rows; row++, asks += kAsk, found += kFound, cut += kCut, ids += few, values += few,
               kept_ids += few, kept_probs += few) {
    const double temperature = asks[0], uniform = asks[2], token = asks[3], least = asks[4], top_k = asks[5], of_all = asks[6];
    const double peak = found[0], total = found[1];
    cut[0] = 0;
    if (!(temperature > 0) || asks[7] == 0 || !isfinite(total) || !(found[5] >= 1 && found[5] <= few && few <= kMostCut)) continue;
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
// any mass.
ORT_EXPORT void specexport_cut_surplus(int64_t num_targets, const int64_t* target_ids, const double* target_probs, int64_t num_drafts,
                                       const int64_t* draft_ids, const double* draft_probs, double weight, double uniform,
                                       double* out) {
  double masses[kMostCut], sum = 0;
  num_targets = num_targets < kMostCut ? num_targets : kMostCut;
  for (int64_t i = 0, j = 0; i < num_targets; i++) {
    while (j < num_drafts && draft_ids[j] < target_ids[i]) j++;
    const bool is_both = j < num_drafts && draft_ids[j] == target_ids[i];
    const double mass = weight * target_probs[i] - (is_both ? draft_probs[j] : 0.0);
    masses[i] = mass > 0 ? mass : 0.0;
    sum += masses[i];
  }
  out[0] = sum;
  out[1] = sum > 0 ? double(target_ids[find(num_targets, uniform * sum, [&](int64_t i) { return masses[i]; })]) : -1;
}

// What is asked of a row of `count` logits in memory, as `asks` [8] has it; gives `found` [8], of which the last is the likeliest
// token, and candidates [1024] where a cut wants them: their number is above 1024 if there are more. `tops` and `room`
// [blocks] and `sums` [blocks] are memory for blocks of 512.
ORT_EXPORT void specexport_find_row(const float* x, int64_t count, const double* ask, double* found, int32_t* ids, float* values,
                                    float* tops, float* room, double* sums) {
  const RowKernels& with = kernels();
  const double temperature = ask[0], uniform = ask[2], token = ask[3], top_k = ask[5], top_p = ask[6];
  Blocks row{ask[1] > 0 && ask[1] < double(count) ? int64_t(ask[1]) : count, sums, {}};
  float peak = -INFINITY;
  int64_t likeliest = -1;
  bool is_odd = false;
  for (int64_t block = 0; block < row.count(); block++) {
    tops[block] = with.top(x + block * kBlock, row.size(block));
    is_odd |= tops[block] != tops[block];
    if (tops[block] > peak) peak = tops[block], likeliest = block * kBlock;
  }
  while (likeliest >= 0 && x[likeliest] != peak) likeliest++;
  for (int64_t i = 0; i < kFound; i++) found[i] = 0;
  found[0] = peak, found[1] = NAN, found[7] = is_odd ? -1.0 : double(likeliest);
  if (is_odd || !isfinite(peak) || !(temperature > 0)) return;
  const Softmax softmax = {peak, 1 / fmax(temperature, kColdest), 1};
  double total = 0;
  const bool is_whole = ask[7] == 0 || top_p > 0;  // else what the cuts leave says all
  for (int64_t block = 0; is_whole && block < row.count(); block++)
    total += sums[block] = with.weigh(x + block * kBlock, row.size(block), softmax, nullptr);
  found[1] = is_whole ? total : 1;
  if (ask[7] == 0) {
    const auto fill = [&](int64_t block) { with.weigh(x + block * kBlock, row.size(block), softmax, row.masses); };
    const int64_t drawn = row.draw(uniform * total, fill);
    found[2] = double(drawn), found[3] = row.masses[drawn % kBlock] / total;
    if (token >= 0 && token < double(row.width)) {
      with.weigh(x + int64_t(token), 1, softmax, row.masses);
      found[4] = row.masses[0] / total;
    }
    return;
  }
  float least = float(peak + ask[4]);
  const float border = kth(tops, row.count(), top_k, room);
  if (border > least) least = border;
  // Where no border is known, the likeliest that are enough: half a nat more at a time.
  const bool is_open = top_p > 0 || (top_k > 0 && border == -INFINITY);
  for (double nats = 0.5;; nats += 0.5) {
    const double step = peak - nats * temperature;
    const bool is_last = !is_open || step <= least || nats > 750;
    const int64_t taken = gather(x, tops, row, is_last ? least : float(step), ids, values);
    found[5] = double(taken);
    if (is_last || taken > kMostCut || (top_k > 0 && double(taken) >= top_k)) return;
    double mass = 0;
    for (int64_t i = 0; i < taken && top_p > 0; i++) mass += exp((double(values[i]) - peak) / temperature);
    if (top_p > 0 && mass >= top_p * total) return;
  }
}

// The masses max(0, weight * q - p) of two rows in memory, which `ask` [13] tells of as executors/row_kernels.py's SurplusAsk;
// its addresses are `q` and `p`. Gives their sum and the id at the uniform of it, -1 without any. `sums` as above.
ORT_EXPORT void specexport_row_surplus(const double* ask, const float* q, const float* p, double* sums, double* out) {
  const RowKernels& with = kernels();
  const Softmax of_q = {ask[2], 1 / fmax(ask[0], kColdest), ask[8] / ask[3]}, of_p = {ask[6], 1 / fmax(ask[4], kColdest), 1 / ask[7]};
  const int64_t drafts = int64_t(ask[5]);
  Blocks row{int64_t(ask[1]), sums, {}};
  const auto masses = [&](int64_t block, double* into) {
    const int64_t start = block * kBlock, size = row.size(block);
    const int64_t both = drafts - start < 0 ? 0 : drafts - start < size ? drafts - start : size;
    double sum = both ? with.residual(q + start, of_q, p + start, of_p, both, into) : 0;
    if (size > both) sum += with.weigh(q + start + both, size - both, of_q, into ? into + both : nullptr);
    return sum;
  };
  double total = 0;
  for (int64_t block = 0; block < row.count(); block++) total += sums[block] = masses(block, nullptr);
  out[0] = total;
  out[1] = total > 0 ? double(row.draw(ask[10] * total, [&](int64_t block) { masses(block, row.masses); })) : -1;
}
