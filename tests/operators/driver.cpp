// Runs every kernel of this processor over every format, or with `operators` all operators, or with `draws`, their number and a seed
// all of them over drawn attributes, shapes and values that nothing made sense of, without ONNX Runtime: for
// sanitizers, and for other processors by emulation. Weights are any bytes, in buffers of exactly their size; products
// are compared with those of other kernels, bit by bit, and rows in company with the same rows alone. It also prints a
// digest of all bits, to be compared with another processor's.
#include "driver.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../../runtime/operators/cpu.h"
#include "emulated_tiles.h"

using namespace specexport;

namespace {
void product(const Kernels& set, Product& p, int64_t rows) {
  p.rows = rows;
  p.cut(set.most_of(p.layout, rows));
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
bool same_bits(const Format& format, const Kernels& a, const Kernels& b) {
#if defined(__aarch64__)
  (void)format, (void)a, (void)b;
  return true;
#else
  const auto plain = [](const Kernels& set) { return &set == &portable_kernels || &set == &tiles_and_portable; };
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
  const Kernels* kernels;
  const Kernels* like;  // whose products are compared
};

bool check(const char* name, const Set& the, int64_t n, int64_t k) {
  const Kernels& set = *the.kernels;
  const int64_t rows = set.many && draw() % 4 ? set.many_from + draw() % 25 : 1 + draw() % 21;
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
// Rows with as many candidates as there may be, one more and fewer; every law sums to 1, and no memory beside is touched.
bool cuts_are_laws() {
  constexpr int64_t kRows = 130, kFew = 128;
  double* numbers = static_cast<double*>(calloc(size_t(kRows), (8 + 8 + 1 + 5 + kFew) * sizeof(double)));
  double *asks = numbers, *found = asks + 8 * kRows, *masses = found + 8 * kRows, *cut = masses + kRows, *probs = cut + 5 * kRows;
  int64_t* kept = static_cast<int64_t*>(calloc(size_t(kRows * kFew), sizeof(int64_t)));
  int32_t* ids = static_cast<int32_t*>(calloc(size_t(kRows * kFew), sizeof(int32_t)));
  float* values = static_cast<float*>(calloc(size_t(kRows * kFew), sizeof(float)));
  for (int64_t row = 0; row < kRows; row++) {
    double ask[] = {0.7, 1000, 0.999, 3, row % 3 ? -8.0 : -1e30, double(row % 5), 0, 1}, answer[] = {0, 50, 0, 0, 0, double(row)};
    memcpy(asks + 8 * row, ask, sizeof ask), memcpy(found + 8 * row, answer, sizeof answer);
    masses[row] = row % 2 ? 0.9 : 1.0;
    for (int64_t i = 0; i < kFew; i++) ids[row * kFew + i] = int32_t((i * 37 + row) % 1009), values[row * kFew + i] = -float(i * 29 % 41);
  }
  specexport_cut_rows(kRows, kFew, asks, found, masses, ids, values, cut, kept, probs);
  bool right = cut[0] == 0 && cut[5 * (kRows - 1)] == 0;
  for (int64_t row = 1; row < kRows - 1; row++) {
    const int64_t count = int64_t(cut[5 * row]);
    double sum = 0, left[2];
    for (int64_t i = 0; i < count; i++) sum += probs[row * kFew + i];
    right = right && count >= 1 && sum > 1 - 1e-12 && sum < 1 + 1e-12;
    const int64_t other = row > 1 ? int64_t(cut[5 * (row - 1)]) : 0;
    const int64_t at = row * kFew, before = at - kFew;
    specexport_cut_surplus(count, kept + at, probs + at, other, kept + before, probs + before, 1.0, 0.5, left);
    right = right && left[0] >= 0 && left[0] < 1 + 1e-12 && (left[1] >= 0 || left[0] == 0);
  }
  free(numbers), free(kept), free(ids), free(values);
  if (!right) printf("cuts of candidates are wrong\n");
  return right;
}
// Rows of every length around vectors and blocks, in memory of exactly their size, against sums of plain numbers.
bool rows_are_laws() {
  bool right = true;
  constexpr int64_t widths[] = {1, 7, 511, 512, 513, 1500};
  for (int64_t width : widths) {
    const int64_t blocks = (width + 511) / 512;
    float* x = static_cast<float*>(malloc(size_t(width) * sizeof(float)));
    float* y = static_cast<float*>(malloc(size_t(width) * sizeof(float)));
    float* tops = static_cast<float*>(malloc(size_t(blocks) * sizeof(float)));
    float* room = static_cast<float*>(malloc(size_t(blocks) * sizeof(float)));
    double* sums = static_cast<double*>(malloc(size_t(blocks) * sizeof(double)));
    int32_t* ids = static_cast<int32_t*>(malloc(1024 * sizeof(int32_t)));
    float* values = static_cast<float*>(malloc(1024 * sizeof(float)));
    double total = 0, found[8], other[8], left[2];
    for (int64_t i = 0; i < width; i++) x[i] = -float(i * 37 % 101) / 7, y[i] = -float(i * 53 % 97) / 9;
    for (int64_t i = 0; i < width; i++) total += exp(double(x[i]) - x[0]);
    const double asks[][8] = {{1, 0, 0.7, 0, -INFINITY, 0, 0, 0}, {1, 0, 0.7, 0, -INFINITY, 9, 0, 1},
                              {1, 0, 0.7, 0, -INFINITY, 0, 0.9, 1}, {1, 0, 0.7, 0, -2, 0, 0, 1}};
    for (const auto& ask : asks) {
      specexport_find_row(x, width, ask, found, ids, values, tops, room, sums);
      if (ask[7] == 0) right = right && fabs(found[1] / total - 1) < 1e-12 && fabs(found[4] * total - 1) < 1e-12;
      right = right && found[0] == x[0] && found[7] == 0 && (ask[7] == 0 || found[5] >= 1);
    }
    specexport_find_row(x, width, asks[0], found, ids, values, tops, room, sums);
    specexport_find_row(y, width, asks[0], other, ids, values, tops, room, sums);
    const double ask[] = {1, double(width), found[0], found[1], 1, double(width), other[0], other[1], 1, -1, 0.3};
    specexport_row_surplus(ask, x, y, sums, left);
    right = right && left[0] >= 0 && left[0] <= 1 && left[1] < double(width);
    free(x), free(y), free(tops), free(room), free(sums), free(ids), free(values);
  }
  if (!right) printf("rows are no laws\n");
  return right;
}
int check_kernels() {
  const Set sets[] = {
      {"portable", Isa::portable, &portable_kernels, &portable_kernels},
      {"tiles_and_portable", Isa::portable, &tiles_and_portable, &portable_kernels},
#if defined(__x86_64__)
      {"avx2", Isa::avx2, &avx2_kernels, &portable_kernels},
      {"avxvnni", Isa::avxvnni, &avxvnni_kernels, &portable_kernels},
      {"avx512vnni", Isa::avx512vnni, &avx512_kernels, &portable_kernels},
      {"tiles_and_avx512", Isa::avx512vnni, &tiles_and_avx512, &avx512_kernels},
      {"amx", Isa::amx, &amx_kernels, &avx512_kernels},
#elif defined(__aarch64__)
      {"neon_dot", Isa::neon_dot, &neon_kernels, &portable_kernels},
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
  return failed + !cuts_are_laws() + !rows_are_laws();
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
