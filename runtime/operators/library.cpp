// The library that ONNX Runtime loads: the list of operators, and what all of them are registered with.
#include "cpu.h"
#include "operator.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#if defined(_WIN32)
extern "C" __declspec(dllimport) unsigned long __stdcall FlsAlloc(void(__stdcall*)(void*));
extern "C" __declspec(dllimport) int __stdcall FlsSetValue(unsigned long, void*);
#else
#include <pthread.h>
#endif

namespace specexport {
ort::Api api;

namespace {
constexpr const char* kDomain = "specexport";
constexpr void (*kDefinitions[])(Operator&) = {
    define_block_linear, define_block_embedding, define_block_experts, define_attention};
constexpr size_t kCount = sizeof kDefinitions / sizeof *kDefinitions;
Operator operators[kCount];

// What sessions read is written once, before the first of them is opened: others may run while one registers.
bool registering;
ort::Domain* domain;  // of all sessions: never released

// The buffers of a thread. A destructor of theirs would need the C++ runtime, so the system calls for them at its end.
struct Buffers {
  void* data[kNumScratch];
  size_t size[kNumScratch];
};
thread_local Buffers* buffers;

void ORT_CALL release(void* given) {
  for (void* data : static_cast<Buffers*>(given)->data) free(data);
  free(given);
}
#if defined(_WIN32)
unsigned long key = FlsAlloc(release);
bool at_end(Buffers* given) { return FlsSetValue(key, given); }
#else
pthread_key_t key;
const bool has_key = !pthread_key_create(&key, release);
bool at_end(Buffers* given) { return has_key && !pthread_setspecific(key, given); }
#endif

Status* read(const ort::Value* value, Tensor& tensor) {
  tensor.absent = value == nullptr;
  if (tensor.absent) return nullptr;
  TRY(api.GetMutableData(const_cast<ort::Value*>(value), &tensor.data));
  const int64_t* dims = tensor.dims;
  if (api.GetShapeReference) {
    TRY(api.GetShapeReference(value, &tensor.type, &dims, &tensor.rank));
  } else {
    ort::TypeInfo* info;
    TRY(api.GetTypeAndShape(value, &info));
    Status* status = api.GetRank(info, &tensor.rank);
    if (!status) status = api.GetElementType(info, &tensor.type);
    if (!status && tensor.rank <= kMaxRank) status = api.GetDims(info, tensor.dims, tensor.rank);
    api.ReleaseTypeInfo(info);
    TRY(status);
  }
  REQUIRE(tensor.rank <= kMaxRank, "a tensor has more than 8 dimensions");
  int64_t product = 1;  // sizes are multiplied with others and with attributes, those of empty tensors too
  for (size_t i = 0; i < tensor.rank; i++) {
    const bool is_over = dims[i] < 0 || __builtin_mul_overflow(product, dims[i] ? dims[i] : 1, &product);
    REQUIRE(!is_over && product < 1ll << 48, "a tensor has 2^48 elements or more");
    tensor.dims[i] = dims[i];
  }
  return nullptr;
}

const Operator* self(const ort::CustomOp* op) { return static_cast<const Operator*>(op); }
struct Instance {
  const Operator* kind;
  void* kernel;
};
ort::Characteristic characteristic(const Argument& argument) {
  return argument.optional ? ort::kOptional : ort::kRequired;
}
size_t none(int**, int**) { return 0; }
void nothing(int*, int*) {}

// Everything of OrtCustomOp that is the same for all.
void fill(Operator& op) {
  op.version = ort::kApiVersion;
  op.GetName = [](const ort::CustomOp* o) { return self(o)->name; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.GetInputType = [](const ort::CustomOp* o, size_t i) { return self(o)->inputs[i].type; };
  op.GetInputTypeCount = [](const ort::CustomOp* o) { return self(o)->num_inputs; };
  op.GetOutputType = [](const ort::CustomOp* o, size_t i) { return self(o)->outputs[i].type; };
  op.GetOutputTypeCount = [](const ort::CustomOp* o) { return self(o)->num_outputs; };
  op.GetInputCharacteristic = [](const ort::CustomOp* o, size_t i) { return characteristic(self(o)->inputs[i]); };
  op.GetOutputCharacteristic = [](const ort::CustomOp* o, size_t i) { return characteristic(self(o)->outputs[i]); };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.CreateKernelV2 = [](const ort::CustomOp* o, ort::Table, const KernelInfo* info, void** out) -> Status* {
    auto* instance = static_cast<Instance*>(calloc(1, sizeof(Instance)));
    REQUIRE(instance, "out of memory");
    instance->kind = self(o);
    if (Status* status = instance->kind->make(info, &instance->kernel)) {
      free(instance->kernel);
      free(instance);
      return status;
    }
    *out = instance;
    return nullptr;
  };
  op.KernelComputeV2 = [](void* kernel, KernelContext* context) -> Status* {
    auto* instance = static_cast<Instance*>(kernel);
    return instance->kind->run(instance->kernel, context);
  };
  op.KernelDestroy = [](void* kernel) {
    auto* instance = static_cast<Instance*>(kernel);
    free(instance->kernel);
    free(instance);
  };
  op.GetMayInplace = none, op.GetAliasMap = none;
  op.ReleaseMayInplace = nothing, op.ReleaseAliasMap = nothing;
}

int minor_of(const char* version) {  // "1.31.1" -> 31
  while (*version && *version != '.') version++;
  return atoi(*version ? version + 1 : version);
}

Status* know(const ort::ApiBase* base, ort::Table table) {
  if (domain) return nullptr;
  api.load(table);
  if (minor_of(base->GetVersionString()) >= 24) ort::Api::set(api.GetShapeReference, table, ort::kGetShapeReference);
  ort::Domain* made;
  TRY(api.CreateDomain(kDomain, &made));
  for (size_t i = 0; i < kCount; i++) {
    fill(operators[i]);
    kDefinitions[i](operators[i]);
    TRY(api.DomainAdd(made, &operators[i]));
  }
  domain = made;
  return nullptr;
}
}  // namespace

Status* refuse(const char* format, ...) {
  char text[512] = "specexport: ";
  va_list values;
  va_start(values, format);
  vsnprintf(text + strlen(text), sizeof text - strlen(text), format, values);
  va_end(values);
  return api.CreateStatus(ort::kInvalidArgument, text);
}
Status* input(KernelContext* context, size_t index, Tensor& tensor) {
  const ort::Value* value = nullptr;
  TRY(api.GetInput(context, index, &value));
  return read(value, tensor);
}
Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t rank, void** data) {
  ort::Value* value = nullptr;
  TRY(api.GetOutput(context, index, dims, rank, &value));
  *data = nullptr;
  return value ? api.GetMutableData(value, data) : nullptr;
}
Status* constant(const KernelInfo* info, size_t index, Tensor& tensor) {
  int is_constant = 0;
  const ort::Value* value = nullptr;
  TRY(api.GetConstantInput(info, index, &is_constant, &value));
  return read(is_constant ? value : nullptr, tensor);
}
Status* attribute(const KernelInfo* info, const char* name, int64_t min, int64_t max, int64_t& value) {
  TRY(api.GetAttributeInt(info, name, &value));
  if (value >= min && value <= max) return nullptr;
  return refuse("%s is %lld, and must be from %lld to %lld", name, (long long)value, (long long)min, (long long)max);
}
Status* attribute(const KernelInfo* info, const char* name, float& value) {
  TRY(api.GetAttributeFloat(info, name, &value));
  return isfinite(value) ? nullptr : refuse("%s is no finite number", name);
}
Status* attribute(const KernelInfo* info, const char* name, char* text, size_t size) {
  size_t needed = 0;
  TRY(api.GetAttributeString(info, name, nullptr, &needed));
  REQUIRE(needed <= size, "an attribute is too long");
  return api.GetAttributeString(info, name, text, &needed);
}

void* scratch(Scratch slot, size_t bytes) {
  if (!buffers) {
    auto* made = static_cast<Buffers*>(calloc(1, sizeof(Buffers)));
    if (!made || !at_end(made)) return free(made), nullptr;
    buffers = made;
  }
  void*& data = buffers->data[int(slot)];
  size_t& size = buffers->size[int(slot)];
  if (!data || bytes > size) {
    free(data);
    data = malloc(bytes + 64);
    size = data ? bytes : 0;
  }
  char* start = static_cast<char*>(data);
  return start ? start + (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64 : nullptr;
}

Status* parallel(KernelContext* context, void (*fn)(void*, size_t), size_t parts, void* data) {
  if (parts == 0) return nullptr;
  if (parts == 1) return fn(data, 0), nullptr;
  return api.ParallelFor(context, fn, parts, 0, data);
}
}  // namespace specexport

// Called for each SessionOptions. Where ONNX Runtime is too old the operators stay unknown, and loading a model says
// so.
ORT_EXPORT ort::Status* ORT_CALL RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  using namespace specexport;
  ort::Table table = base->GetApi(ort::kApiVersion);
  if (!table) return nullptr;
  while (__atomic_test_and_set(&registering, __ATOMIC_ACQUIRE)) {
  }
  Status* status = know(base, table);
  __atomic_clear(&registering, __ATOMIC_RELEASE);
  return status ? status : api.AddDomain(options, domain);
}

// Which kernels run here: "avx512vnni", "avx2", …
ORT_EXPORT const char* specexport_kernels() { return specexport::isa_name(specexport::isa()); }
// All that there are, by index, and whether this processor runs them; null after the last.
ORT_EXPORT const char* specexport_kernels_at(int index, int* runs) {
  if (index < 0 || index >= specexport::kNumIsas) return nullptr;
  *runs = specexport::runs_here(specexport::Isa(index));
  return specexport::isa_name(specexport::Isa(index));
}
// Of which sources the library was built; the Python package compares it.
ORT_EXPORT const char* specexport_build() { return SPECEXPORT_BUILD; }
