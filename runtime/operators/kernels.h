// The kernels of an instruction set, and which run here.
#pragma once
#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace specexport {
struct KernelSet {
  const LinearKernels& linear;
  const AttentionKernels& attention;
  const RowKernels& rows;
};
const KernelSet& kernels();  // of this processor
}  // namespace specexport
