// The part of ONNX Runtime's C ABI that a library of custom operators needs, declared on our own.
// The table of functions is append-only (ONNX Runtime's rule since version 1), so a function is known by its index.
// Indices are those of API version 18 (ONNX Runtime 1.18), the first with KernelContext_ParallelFor.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ORT_CALL __stdcall
#define ORT_EXPORT extern "C" __declspec(dllexport)
#else
#define ORT_CALL
#define ORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace ort {
constexpr uint32_t kApiVersion = 18;
constexpr int kGetShapeReference = 414;  // GetTensorElementTypeAndShapeDataReference, since version 24

struct Status;
struct Value;
struct TypeInfo;  // of a tensor: element type and shape
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct Domain;
struct ShapeContext;

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kBfloat16 = 16
};
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

using Table = void* const*;  // OrtApi

struct ApiBase {
  Table(ORT_CALL* GetApi)(uint32_t version);
  const char*(ORT_CALL* GetVersionString)();
};

// One typed view of the table; `load` is the only place that knows indices.
struct Api {
  Status*(ORT_CALL* CreateStatus)(int code, const char* message);
  Status*(ORT_CALL* CreateDomain)(const char* name, Domain** out);
  Status*(ORT_CALL* DomainAdd)(Domain*, const struct CustomOp*);
  Status*(ORT_CALL* AddDomain)(SessionOptions*, Domain*);
  Status*(ORT_CALL* GetMutableData)(Value*, void** out);
  Status*(ORT_CALL* GetElementType)(const TypeInfo*, int* out);
  Status*(ORT_CALL* GetRank)(const TypeInfo*, size_t* out);
  Status*(ORT_CALL* GetDims)(const TypeInfo*, int64_t* dims, size_t rank);
  Status*(ORT_CALL* GetTypeAndShape)(const Value*, TypeInfo** out);
  Status*(ORT_CALL* GetAttributeInt)(const KernelInfo*, const char* name, int64_t* out);
  Status*(ORT_CALL* GetAttributeFloat)(const KernelInfo*, const char* name, float* out);
  Status*(ORT_CALL* GetAttributeString)(const KernelInfo*, const char* name, char* out, size_t* size);
  Status*(ORT_CALL* GetInput)(const KernelContext*, size_t index, const Value** out);
  Status*(ORT_CALL* GetOutput)(KernelContext*, size_t index, const int64_t* dims, size_t rank, Value** out);
  void(ORT_CALL* ReleaseTypeInfo)(TypeInfo*);
  Status*(ORT_CALL* GetConstantInput)(const KernelInfo*, size_t index, int* is_constant, const Value** out);
  Status*(ORT_CALL* ParallelFor)(
      const KernelContext*, void (*fn)(void*, size_t), size_t total, size_t batches, void* data);
  // API version 24, else null: element type and shape without an allocation.
  Status*(ORT_CALL* GetShapeReference)(const Value*, int* type, const int64_t** dims, size_t* rank);

  template <class F>
  static void set(F& f, Table t, int index) {
    f = reinterpret_cast<F>(t[index]);
  }

  void load(Table t) {
    set(CreateStatus, t, 0);
    set(CreateDomain, t, 26);
    set(DomainAdd, t, 27);
    set(AddDomain, t, 28);
    set(GetMutableData, t, 51);
    set(GetElementType, t, 60);
    set(GetRank, t, 61);
    set(GetDims, t, 62);
    set(GetTypeAndShape, t, 65);
    set(GetAttributeFloat, t, 85);
    set(GetAttributeInt, t, 86);
    set(GetAttributeString, t, 87);
    set(GetInput, t, 90);
    set(GetOutput, t, 91);
    set(ReleaseTypeInfo, t, 99);
    set(GetConstantInput, t, 249);
    set(ParallelFor, t, 274);
    GetShapeReference = nullptr;
  }
};

// OrtCustomOp. `version` says up to which field it is filled; a field added in version V is read from V on.
struct CustomOp {
  uint32_t version;
  void*(ORT_CALL* CreateKernel)(const CustomOp*, Table, const KernelInfo*);
  const char*(ORT_CALL* GetName)(const CustomOp*);
  const char*(ORT_CALL* GetExecutionProviderType)(const CustomOp*);
  ElementType(ORT_CALL* GetInputType)(const CustomOp*, size_t);
  size_t(ORT_CALL* GetInputTypeCount)(const CustomOp*);
  ElementType(ORT_CALL* GetOutputType)(const CustomOp*, size_t);
  size_t(ORT_CALL* GetOutputTypeCount)(const CustomOp*);
  void(ORT_CALL* KernelCompute)(void*, KernelContext*);
  void(ORT_CALL* KernelDestroy)(void*);
  Characteristic(ORT_CALL* GetInputCharacteristic)(const CustomOp*, size_t);  // 8
  Characteristic(ORT_CALL* GetOutputCharacteristic)(const CustomOp*, size_t);
  int(ORT_CALL* GetInputMemoryType)(const CustomOp*, size_t);  // 13
  int(ORT_CALL* GetVariadicInputMinArity)(const CustomOp*);    // 14
  int(ORT_CALL* GetVariadicInputHomogeneity)(const CustomOp*);
  int(ORT_CALL* GetVariadicOutputMinArity)(const CustomOp*);
  int(ORT_CALL* GetVariadicOutputHomogeneity)(const CustomOp*);
  Status*(ORT_CALL* CreateKernelV2)(const CustomOp*, Table, const KernelInfo*, void** kernel);  // 16
  Status*(ORT_CALL* KernelComputeV2)(void*, KernelContext*);
  Status*(ORT_CALL* InferOutputShape)(const CustomOp*, ShapeContext*);  // 17
  int(ORT_CALL* GetStartVersion)(const CustomOp*);
  int(ORT_CALL* GetEndVersion)(const CustomOp*);
  size_t(ORT_CALL* GetMayInplace)(int** inputs, int** outputs);  // 18; of the kind, not of one instance
  void(ORT_CALL* ReleaseMayInplace)(int* inputs, int* outputs);
  size_t(ORT_CALL* GetAliasMap)(int** inputs, int** outputs);
  void(ORT_CALL* ReleaseAliasMap)(int* inputs, int* outputs);
};
}  // namespace ort
