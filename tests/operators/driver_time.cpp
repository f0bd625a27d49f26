// `driver time`: for each line `FORMAT ROWS near|far THREADS` that comes in, what products take with the kernels that
// SPECEXPORT_CPU_KERNELS names. Near, a weight [256, 1024] lies in the L2 cache; far, 128 MB are read once. The answer
// is one line: seconds (the least of some runs), MACs a cycle and thread, the share of what a plain read gets, and
// seconds that packing takes.
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "../../runtime/operators/kernels.h"
#include "driver.h"

using namespace specexport;

namespace {
constexpr size_t kFarBytes = 128 << 20;
constexpr int kMostThreads = 64, kMostProducts = 512;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
double cycle_seconds() {  // of a chain of additions, each of which takes a cycle (of a constant, some make five)
  double least = 1;
  for (int i = 0; i < 5; i++) {
    const double start = now();
    uint64_t sum = 0;
    for (int n = 0; n < 20000; n++)
#if defined(__aarch64__)
      __asm__ volatile("add %0,%0,%0\nadd %0,%0,%0\nadd %0,%0,%0\nadd %0,%0,%0\nadd %0,%0,%0" : "+r"(sum));
#else
      __asm__ volatile("add %0,%0\nadd %0,%0\nadd %0,%0\nadd %0,%0\nadd %0,%0" : "+r"(sum));
#endif
    const double took = (now() - start) / 100000;
    least = took < least ? took : least;
  }
  return least;
}

struct Task {
  Product* products;
  int64_t count, now, again, rows;
  size_t size;  // of the weights of one
  int threads;
  pthread_barrier_t barrier;
  bool read, stop;
};
struct Worker {
  Task* task;
  int id;
};
void work_on(Task& task, int id, void* work) {  // a share of one product
  const Product& p = task.products[task.now];
  if (task.read) {
    uint64_t sum = 0, value;
    const size_t lines = task.size / 64, end = lines * size_t(id + 1) / size_t(task.threads);
    for (size_t i = lines * size_t(id) / size_t(task.threads); i < end; i++) {
      __builtin_prefetch(p.weight + 64 * i + 8192);
      memcpy(&value, p.weight + 64 * i, 8), sum += value;
    }
    __asm__ volatile("" : : "r"(sum));  // or nothing would be read
    return;
  }
  for (int64_t i = 0; i < task.again; i++)
    kernels().linear.multiply(
        p, p.layout.tiles * id / task.threads, p.layout.tiles * (id + 1) / task.threads, 0, p.groups, work);
}
void* run(void* data) {
  const Worker& worker = *static_cast<Worker*>(data);
  void* work = malloc(work_bytes(worker.task->rows));
  for (;;) {
    pthread_barrier_wait(&worker.task->barrier);
    if (worker.task->stop) break;
    work_on(*worker.task, worker.id, work);
    pthread_barrier_wait(&worker.task->barrier);
  }
  free(work);
  return nullptr;
}
// Each product's least time, all of them together: whoever else uses the machine seldom disturbs all of the runs.
double least_of(Task& task, int runs, void* work) {
  double sum = 0, least[kMostProducts];
  for (int i = 0; i < runs; i++)
    for (task.now = 0; task.now < task.count; task.now++) {
      pthread_barrier_wait(&task.barrier);
      const double start = now();
      work_on(task, 0, work);
      pthread_barrier_wait(&task.barrier);
      const double took = now() - start;
      least[task.now] = i && least[task.now] < took ? least[task.now] : took;
    }
  for (int64_t i = 0; i < task.count; i++) sum += least[i];
  task.now = 0;
  return sum;
}
}  // namespace

int time_kernels() {
  char name[64], where[16];
  long rows;
  int threads;
  uint8_t* weight = nullptr;
  size_t held = 0;
  while (scanf("%63s %ld %15s %d", name, &rows, where, &threads) == 4) {
    const bool far = where[0] == 'f';
    Product p = {};
    Format format;
    if (!find_format(name, format) || rows < 1 || threads < 1 || threads > kMostThreads) return 1;
    p.layout.make(format, far ? 1024 : 256, far ? 2048 : 1024);
    const size_t size = size_t(p.layout.tiles) * p.layout.tile_bytes;
    Task task = {};
    task.count = far ? int64_t(kFarBytes / size) : 1, task.rows = rows, task.threads = threads;
    if (task.count > kMostProducts) task.count = kMostProducts;
    task.size = size;
    const size_t wanted = size * size_t(task.count) + 65536;
    const double macs = double(p.layout.N) * double(p.layout.K) * double(rows);
    task.again = far ? 1 : int64_t(2e7 / macs) + 1;
    if (held < wanted) {
      free(weight);
      held = wanted, weight = static_cast<uint8_t*>(aligned_alloc(4096, held / 4096 * 4096 + 4096));
      draw_weight(weight, 1 << 16);
      for (size_t i = 1 << 16; i < held; i++) weight[i] = weight[i - 65521];
    }
    auto* x = static_cast<float*>(malloc(sizeof(float) * size_t(rows * p.layout.K)));
    for (int64_t i = 0; i < rows * p.layout.K; i++) x[i] = draw_float();
    p.x = x, p.rows = rows, p.out = static_cast<float*>(malloc(sizeof(float) * size_t(rows * p.layout.N)));
    p.split(kernels().linear.group_rows(p.layout, rows));
    p.packed_rows = static_cast<uint8_t*>(aligned_alloc(64, (size_t(p.groups) * p.group_bytes() + 127) / 64 * 64));
    double packing = 1e9;
    for (int i = 0; i < 15; i++) {
      const double start = now();
      for (int n = 0; n < 10; n++) kernels().linear.pack(p, 0, p.groups);
      const double took = (now() - start) / 10;
      packing = took < packing ? took : packing;
    }
    auto* products = static_cast<Product*>(malloc(sizeof(Product) * size_t(task.count)));
    for (int64_t i = 0; i < task.count; i++) products[i] = p, products[i].weight = weight + size * size_t(i);
    task.products = products;
    pthread_barrier_init(&task.barrier, nullptr, unsigned(threads));
    pthread_t ids[kMostThreads];
    Worker workers[kMostThreads];
    for (int i = 1; i < threads; i++) workers[i] = {&task, i}, pthread_create(ids + i, nullptr, run, workers + i);
    void* work = malloc(work_bytes(rows));
    const double seconds = least_of(task, far ? 8 : 15, work) / double(task.again), cycle = cycle_seconds();
    task.read = true;
    const double read = far ? least_of(task, 8, work) : 0;
    task.stop = true;
    pthread_barrier_wait(&task.barrier);
    for (int i = 1; i < threads; i++) pthread_join(ids[i], nullptr);
    printf("%.9f %.2f %.3f %.9f\n", seconds, macs * double(task.count) * cycle / seconds / threads, read / seconds,
        packing);
    fflush(stdout);
    free(work), free(products), free(p.packed_rows), free(p.out), free(x);
  }
  free(weight);
  return 0;
}
