#include "cpu.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <unistd.h>
extern "C" long syscall(long, ...);
extern "C" unsigned long getauxval(unsigned long);
#endif

namespace specexport {
namespace {
constexpr const char* kNames[kNumIsas] = {"portable", "avx2", "avxvnni", "avx512vnni", "amx", "neon_dot"};

bool runs[kNumIsas];  // what this processor can run
Isa chosen;

#if defined(__x86_64__) || defined(_M_X64)
// Not __builtin_cpu_supports: what zig links says no to everything.
void detect() {
  unsigned a, b, c, d, most, low, high;
  if (!__get_cpuid(0, &most, &b, &c, &d) || most < 7 || !__get_cpuid(1, &a, &b, &c, &d)) return;
  const unsigned wanted = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;  // FMA, OSXSAVE, AVX, F16C
  if ((c & wanted) != wanted) return;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  if ((low & 6) != 6 || !(b & 1u << 5)) return;
  runs[int(Isa::avx2)] = true;
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  const bool zmm = (low & 0xe6) == 0xe6 && (b & avx512) == avx512 && (c & 1u << 11);
  const bool tiles = (low & 0x60000) == 0x60000 && (d & 1u << 24) && (d & 1u << 25);  // AMX-TILE, AMX-INT8
  __get_cpuid_count(7, 1, &a, &b, &c, &d);
  runs[int(Isa::avxvnni)] = a & 1u << 4;
  runs[int(Isa::avx512vnni)] = zmm;
#if defined(__linux__)
  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
  if (zmm && tiles) runs[int(Isa::amx)] = !syscall(158, 0x1023, 18) && amx_multiplies_right();
#else
  (void)tiles;
#endif
}
#elif defined(__aarch64__) && defined(__APPLE__)
void detect() { runs[int(Isa::neon_dot)] = true; }  // every Apple silicon
#elif defined(__aarch64__) && defined(__linux__)
void detect() { runs[int(Isa::neon_dot)] = getauxval(16) & (1ul << 20); }  // AT_HWCAP: ASIMDDP
#else
void detect() {}
#endif

// When the library is loaded, before any thread can ask.
__attribute__((constructor)) void choose() {
  detect();
  runs[int(Isa::portable)] = true;
  for (int i = 0; i < kNumIsas; i++)
    if (runs[i]) chosen = Isa(i);
  const char* wanted = getenv("SPECEXPORT_CPU_KERNELS");
  for (int i = 0; wanted && i < kNumIsas; i++)
    if (runs[i] && !strcmp(wanted, kNames[i])) chosen = Isa(i);
}
}  // namespace

Isa isa() { return chosen; }
const char* isa_name(Isa isa) { return kNames[int(isa)]; }
bool runs_here(Isa isa) { return runs[int(isa)]; }
}  // namespace specexport
