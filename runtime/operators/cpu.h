// What the processor has, and which kernels therefore run.
#pragma once

namespace specexport {
// In the order of preference within a processor family; `portable` runs everywhere.
enum class Isa { portable, avx2, avxvnni, avx512vnni, amx, neon_dot };
constexpr int kNumIsas = 6;

// The best that the processor has and the system saves; SPECEXPORT_CPU_KERNELS names another, which must be runnable
// here: an unknown name, or one that this processor lacks, leaves the best.
Isa isa();
const char* isa_name(Isa);
bool runs_here(Isa);

// Whether tiles compute what they should; a processor must say that it has them before this is called.
bool amx_multiplies_right();
}  // namespace specexport
