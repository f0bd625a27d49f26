// A packed weight as an attribute of operators: format, N, K.
#pragma once
#include "formats.h"
#include "operator.h"

namespace specexport {
Status* make_layout(const char* name, int64_t n, int64_t k, Layout& layout);
struct Weight {
  Layout layout;
  char format[48];
};
Status* make_weight(const KernelInfo* info, void** kernel);  // reads and checks the attributes, and a constant weight
Status* check(const Weight& weight, const Tensor& packed);
Status* bad_shape(const char* what, const Tensor& tensor, const char* wanted, long long a, long long b = 0);
}  // namespace specexport
