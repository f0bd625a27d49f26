// What every operator is made with: statuses, tensors, memory of a thread, parts side by side, and registration.
//
// Neither the C++ runtime library nor its headers are used: no exceptions, no RTTI, no guarded statics, malloc instead
// of new. zig would build libc++ from source first, which takes a minute, and wheels would carry it.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "ort_abi.h"

namespace specexport {
using ort::ElementType;
using ort::KernelContext;
using ort::KernelInfo;
using ort::Status;

template <class T>
constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
constexpr T max(T a, T b) {
  return a > b ? a : b;
}

extern ort::Api api;  // filled when the library is registered

// A status that is not null is an error, and is returned at once.
#define TRY(call)                                        \
  do {                                                   \
    if (::ort::Status* status_ = (call)) return status_; \
  } while (0)
#define REQUIRE(condition, message) TRY((condition) ? nullptr : ::specexport::refuse(message))
Status* refuse(const char* format, ...);  // as printf: an error of one line

constexpr size_t kMaxRank = 8;
constexpr int64_t kMaxSize = INT32_MAX;  // of a matrix, in one dimension
constexpr int64_t kMaxHeads = 65535, kMaxHeadSize = 65535;

// An input that is there has data or no elements; one that is left out has `absent`.
struct Tensor {
  void* data = nullptr;
  int type = ort::kUndefined;
  bool absent = true;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};  // the product of any of them is below 2^48
  int64_t count() const {
    int64_t n = 1;
    for (size_t i = 0; i < rank; i++) n *= dims[i];
    return n;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

Status* input(KernelContext* context, size_t index, Tensor& tensor);  // optional ones may be absent
Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t rank, void** data);
Status* constant(const KernelInfo* info, size_t index, Tensor& tensor);  // absent where it is no constant
Status* attribute(const KernelInfo* info, const char* name, int64_t min, int64_t max, int64_t& value);
Status* attribute(const KernelInfo* info, const char* name, float& value);             // finite
Status* attribute(const KernelInfo* info, const char* name, char* text, size_t size);  // ends with a null byte

// A buffer of the calling thread that only grows, until that ends; null if there is no memory. Kernels of one session
// may run in several threads at once, so none may keep such memory itself.
enum class Scratch { step, states, part };  // of a call of an operator, of what it needs later, of one part of the call
constexpr int kNumScratch = 3;
void* scratch(Scratch slot, size_t bytes);

// Arrays one after the other in such a buffer, each from a cache line on; false if there is no memory.
template <class T>
struct Array {
  T*& start;
  int64_t count;
  size_t bytes() const { return (size_t(count) * sizeof(T) + 63) / 64 * 64; }
};
template <class T>
Array(T*&, int64_t) -> Array<T>;
template <class... T>
bool allocate(Scratch slot, Array<T>... arrays) {
  char* at = static_cast<char*>(scratch(slot, (arrays.bytes() + ...)));
  if (!at) return false;
  ((arrays.start = reinterpret_cast<T*>(at), at += arrays.bytes()), ...);
  return true;
}

// Runs fn(data, 0) … fn(data, parts - 1) on the session's threads, which claim them one by one; returns when all are
// done. One part runs in its caller. Nothing that a part computes may depend on how many threads there are.
Status* parallel(KernelContext* context, void (*fn)(void* data, size_t part), size_t parts, void* data);

template <class F>
Status* parallel(KernelContext* context, size_t parts, const F& work) {
  return parallel(
      context, [](void* data, size_t part) { (*static_cast<const F*>(data))(part); }, parts, const_cast<F*>(&work));
}

// The same for parts that need memory, and return false if there is none.
template <class F>
Status* parallel_with_memory(KernelContext* context, size_t parts, const F& work) {
  bool failed = false;
  TRY(parallel(context, parts, [&](size_t part) {
    if (!work(part)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  }));
  REQUIRE(!failed, "out of memory");
  return nullptr;
}

// A kind of operator. `make` reads attributes and constants into a kernel (from malloc; freed with free) and checks
// what can be checked without a step; `run` is one step of it.
struct Argument {
  ElementType type;  // kUndefined: any
  bool optional;
};
struct Operator : ort::CustomOp {
  const char* name;
  Argument inputs[16];
  size_t num_inputs;
  Argument outputs[4];
  size_t num_outputs;
  Status* (*make)(const KernelInfo* info, void** kernel);
  Status* (*run)(const void* kernel, KernelContext* context);
};

// The operators, each defined in a file of its own; library.cpp has their list.
void define_block_linear(Operator&);
void define_block_embedding(Operator&);
void define_block_experts(Operator&);
void define_attention(Operator&);
}  // namespace specexport
