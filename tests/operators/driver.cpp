// Runs every kernel of this processor over every format, or with `operators` all operators, or with `draws`, their
// number and a seed all of them over drawn attributes, shapes and values that nothing made sense of, without ONNX
// Runtime: for sanitizers, and for other processors by emulation. Weights are any bytes, in buffers of exactly their
// size; products are compared with those of other kernels, bit by bit, and rows in company with the same rows alone. It
// also prints a digest of all bits, to be compared with another processor's.
#include "driver.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../../runtime/operators/cpu.h"
#include "../../runtime/operators/rows.h"
#include "emulated_tiles.h"

using namespace specexport;

namespace {
void product(const LinearKernels& set, Product& p, int64_t rows) {
  p.rows = rows;
  p.split(set.group_rows(p.layout, rows));
  p.packed_rows = static_cast<uint8_t*>(malloc(size_t(p.groups) * p.group_bytes() + 1));
  void* work = malloc(work_bytes(rows));
  set.pack(p, 0, p.groups);
  set.multiply(p, 0, p.layout.tiles, 0, p.groups, work);
  free(work);
  free(p.packed_rows);
}

// The greatest difference between two products, relative to the largest output.
double difference(const float* a, const float* b, int64_t count) {
  double most = 0, largest = 1e-30;
  for (int64_t i = 0; i < count; i++) {
    most = fmax(most, fabs(double(a[i]) - b[i]));
    largest = fmax(largest, fabs(double(b[i])));
  }
  return most / largest;
}

// Whether two sets of kernels fuse multiplications and additions of float weights alike: see linear_portable.cpp.
bool same_bits(const Format& format, const LinearKernels& a, const LinearKernels& b) {
#if defined(__aarch64__)
  (void)format, (void)a, (void)b;
  return true;
#else
  const auto plain = [](const LinearKernels& set) { return &set == &linear_portable || &set == &tiles_and_portable; };
  return !format.is_float() || plain(a) == plain(b);
#endif
}
uint64_t digest = 14695981039346656037ull;
void digest_of(const float* values, int64_t count) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values);
  for (int64_t i = 0; i < 4 * count; i++) digest = (digest ^ bytes[i]) * 1099511628211ull;
}

struct Set {
  const char* name;
  Isa needs;
  const LinearKernels* kernels;
  const LinearKernels* like;  // whose products are compared
};

bool check(const char* name, const Set& the, int64_t n, int64_t k) {
  const LinearKernels& set = *the.kernels;
  const int64_t rows = set.unit_mr && draw() % 4 ? set.unit_from + draw() % 25 : 1 + draw() % 21;
  Product p = {};
  Format format;
  if (!find_format(name, format)) return printf("%s: no format\n", name), false;
  p.layout.make(format, n, k);
  const size_t size = size_t(p.layout.tiles) * p.layout.tile_bytes;
  auto* weight = static_cast<uint8_t*>(malloc(size));
  draw_weight(weight, size);
  auto* x = static_cast<float*>(malloc(sizeof(float) * size_t(rows * k)));
  for (int64_t i = 0; i < rows * k; i++) x[i] = draw_float();
  auto* bias = static_cast<float*>(malloc(sizeof(float) * size_t(n)));
  for (int64_t i = 0; i < n; i++) bias[i] = draw_float();
  auto* plain = static_cast<float*>(malloc(sizeof(float) * size_t(rows * n)));
  auto* out = static_cast<float*>(malloc(sizeof(float) * size_t(rows * n)));
  auto* alone = static_cast<float*>(malloc(sizeof(float) * size_t(n)));
  p.weight = weight, p.x = x, p.bias = bias;
  p.out = plain;
  product(*the.like, p, rows);
  p.out = out;
  product(set, p, rows);
  const double error = difference(out, plain, rows * n);
  bool same = !same_bits(format, set, *the.like) || !memcmp(out, plain, sizeof(float) * size_t(rows * n));
  if (the.like == the.kernels && !format.is_float()) digest_of(out, rows * n);
  for (int64_t row = 0; row < rows; row++) {
    p.x = x + row * k, p.out = alone;
    product(set, p, 1);
    same = same && !memcmp(alone, out + row * n, sizeof(float) * size_t(n));
  }
  free(weight), free(x), free(bias), free(plain), free(out), free(alone);
  if (error > 1e-5 || !same)
    printf("%s [%lld, %lld], %lld rows: error %g, %s bits\n", name, (long long)n, (long long)k, (long long)rows, error,
        same ? "equal" : "other");
  return error <= 1e-5 && same;
}
template <class T>
T* zeros(int64_t count) {
  return static_cast<T*>(calloc(size_t(count), sizeof(T)));
}
// Rows with as many candidates as there may be, one more and fewer; every distribution sums to 1, and no memory beside
// is touched.
bool cuts_are_distributions() {
  constexpr int64_t kRows = 130, kMost = 128;
  auto* queries = zeros<RowQuery>(kRows);
  auto* results = zeros<RowResult>(kRows);
  auto* cuts = zeros<CutResult>(kRows);
  double *masses = zeros<double>(kRows), *probs = zeros<double>(kRows * kMost);
  auto* kept = zeros<int64_t>(kRows * kMost);
  auto* ids = zeros<int32_t>(kRows * kMost);
  auto* values = zeros<float>(kRows * kMost);
  for (int64_t row = 0; row < kRows; row++) {
    queries[row] = {0.7, 1000, 0.999, 3, row % 3 ? -8.0 : -1e30, double(row % 5), 0, 1};
    results[row] = {0, 50, 0, 0, 0, double(row), 0, 0};
    masses[row] = row % 2 ? 0.9 : 1.0;
    for (int64_t i = 0; i < kMost; i++) {
      ids[row * kMost + i] = int32_t((i * 37 + row) % 1009);
      values[row * kMost + i] = -float(i * 29 % 41);
    }
  }
  specexport_cut_rows(kRows, kMost, queries, results, masses, ids, values, cuts, kept, probs);
  bool right = cuts[0].count == 0 && cuts[kRows - 1].count == 0;
  for (int64_t row = 1; row < kRows - 1; row++) {
    const int64_t count = int64_t(cuts[row].count), other = int64_t(cuts[row - 1].count);
    const int64_t at = row * kMost, before = at - kMost;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += probs[at + i];
    right = right && count >= 1 && sum > 1 - 1e-12 && sum < 1 + 1e-12;
    ResidualResult left;
    specexport_cut_residual(count, kept + at, probs + at, other, kept + before, probs + before, 1.0, 0.5, &left);
    right = right && left.total >= 0 && left.total < 1 + 1e-12 && (left.token >= 0 || left.total == 0);
  }
  free(queries), free(results), free(cuts), free(masses), free(probs), free(kept), free(ids), free(values);
  if (!right) printf("cuts of candidates are wrong\n");
  return right;
}
// Rows of every length around vectors and blocks, in memory of exactly their size, against sums of plain numbers.
bool rows_are_distributions() {
  bool right = true;
  constexpr int64_t widths[] = {1, 7, 511, 512, 513, 1500};
  for (int64_t width : widths) {
    const int64_t blocks = (width + kBlockLogits - 1) / kBlockLogits;
    float *x = zeros<float>(width), *y = zeros<float>(width), *values = zeros<float>(kMaxCandidates);
    float *peaks = zeros<float>(blocks), *sorted = zeros<float>(blocks);
    double* sums = zeros<double>(blocks);
    auto* ids = zeros<int32_t>(kMaxCandidates);
    for (int64_t i = 0; i < width; i++) x[i] = -float(i * 37 % 101) / 7, y[i] = -float(i * 53 % 97) / 9;
    double total = 0;
    for (int64_t i = 0; i < width; i++) total += exp(double(x[i]) - x[0]);
    const RowQuery queries[] = {{1, 0, 0.7, 0, -INFINITY, 0, 0, 0}, {1, 0, 0.7, 0, -INFINITY, 9, 0, 1},
        {1, 0, 0.7, 0, -INFINITY, 0, 0.9, 1}, {1, 0, 0.7, 0, -2, 0, 0, 1}};
    RowResult found, other;
    for (const RowQuery& query : queries) {
      specexport_query_row(x, width, &query, &found, ids, values, peaks, sorted, sums);
      right = right && found.peak == x[0] && found.likeliest == 0 && (query.cuts == 0 || found.candidates >= 1);
      if (query.cuts != 0) continue;
      right = right && fabs(found.total / total - 1) < 1e-12 && fabs(found.token_probability * total - 1) < 1e-12;
    }
    specexport_query_row(x, width, &queries[0], &found, ids, values, peaks, sorted, sums);
    specexport_query_row(y, width, &queries[0], &other, ids, values, peaks, sorted, sums);
    const ResidualQuery query = {
        1, double(width), found.peak, found.total, 1, double(width), other.peak, other.total, 1, -1, 0.3, x, y};
    ResidualResult left;
    specexport_row_residual(&query, sums, &left);
    right = right && left.total >= 0 && left.total <= 1 && left.token < double(width);
    free(x), free(y), free(peaks), free(sorted), free(sums), free(ids), free(values);
  }
  if (!right) printf("rows are no distributions\n");
  return right;
}
int check_kernels() {
  const Set sets[] = {
      {"portable", Isa::portable, &linear_portable, &linear_portable},
      {"tiles_and_portable", Isa::portable, &tiles_and_portable, &linear_portable},
#if defined(__x86_64__)
      {"avx2", Isa::avx2, &linear_avx2, &linear_portable},
      {"avxvnni", Isa::avxvnni, &linear_avxvnni, &linear_portable},
      {"avx512vnni", Isa::avx512vnni, &linear_avx512, &linear_portable},
      {"tiles_and_avx512", Isa::avx512vnni, &tiles_and_avx512, &linear_avx512},
      {"amx", Isa::amx, &linear_amx, &linear_avx512},
#elif defined(__aarch64__)
      {"neon_dot", Isa::neon_dot, &linear_neon, &linear_portable},
#endif
  };
  const int64_t shapes[][2] = {{16, 32}, {33, 100}, {7, 1}, {20, 1100}, {32, 2048}, {17, 1300}};
  int failed = !the_check_knows_right_units();
  for (const Set& set : sets) {
    if (!runs_here(set.needs)) continue;
    printf("%s\n", set.name);
    for (const auto& shape : shapes) {
      for (const Format& format : kFormats) failed += !check(format.name, set, shape[0], shape[1]);
      for (const char* name : kGroupFormats) failed += !check(name, set, shape[0], shape[1]);
    }
  }
  printf("digest-%016llx\n", (unsigned long long)digest);
  return failed + !cuts_are_distributions() + !rows_are_distributions();
}
}  // namespace

int main(int count, char** words) {
  if (count > 1 && !strcmp(words[1], "time")) return time_kernels();
  if (count > 3) state = uint32_t(atoi(words[3]));
  const int failed = count > 2 ? check_draws(atoi(words[2])) : count > 1 ? check_operators() : check_kernels();
  if (count > 1) printf("operators with %s\n", isa_name(isa()));
  printf("%d failed\n", failed);
  return failed;
}
