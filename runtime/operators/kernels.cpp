#include "kernels.h"

#include "cpu.h"

namespace specexport {
namespace {
constexpr KernelSet kPortable = {linear_portable, attention_portable, rows_portable};
// In the order of Isa.
#if defined(__x86_64__) || defined(_M_X64)
constexpr KernelSet kSets[] = {
    kPortable,
    {linear_avx2, attention_avx2, rows_avx2},
    {linear_avxvnni, attention_avx2, rows_avx2},
    {linear_avx512, attention_avx512, rows_avx512},
    {linear_amx, attention_avx512, rows_avx512},
};
#elif defined(__aarch64__)
constexpr KernelSet kNeon = {linear_neon, attention_portable, rows_portable};
constexpr KernelSet kSets[] = {kPortable, kPortable, kPortable, kPortable, kPortable, kNeon};
#else
constexpr KernelSet kSets[] = {kPortable};
#endif
}  // namespace

const KernelSet& kernels() { return kSets[int(isa())]; }
}  // namespace specexport
