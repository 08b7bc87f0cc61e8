// What the parts of the stand-in for CANN share. Tests load it in place of CANN's own libraries, so that the real
// torch_npu and the NPU kernels of this package run on a machine that has neither an NPU nor CANN.
//
//   ascendcl.cpp, memory.cpp, stream.cpp   devices, memory, streams, events          -> libascendcl.so
//   nnopbase.cpp, elements.cpp, trace.cpp  descriptors, executors, elements, trace    -> libnnopbase.so
//   hccl*.cpp                              communicators, collectives                -> libhccl.so
//   opapi/*.cpp                            the aclnn functions                        -> libopapi.so
//   aten_override.cpp                      ATen on NPU tensors, by the CPU            -> libstandin_aten.so
//   build.py, bootstrap.py                 build all of it; load it into a process
//
// It is strict: device memory cannot be read through the pointers that callers hold, every extent is checked, outputs
// are poisoned before a kernel writes them, executors are used once, and what is not implemented fails loudly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "acl/acl_base_rt.h"

// Everything here crosses the libraries, which are otherwise compiled with hidden symbols.
#pragma GCC visibility push(default)

// Descriptors as callers create them. Everything is copied at creation; phase 1 copies again what its kernel needs,
// because callers destroy descriptors before a stream has run the kernel.
struct aclTensor {
  std::vector<int64_t> dims;
  std::vector<int64_t> strides; // in elements
  int64_t offset;               // in elements, from `data`
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> storage_dims;
  void* data; // device address of the storage

  int64_t numel() const;
  int64_t dim(int64_t index) const; // negative counts from the end
  int64_t rank() const {
    return static_cast<int64_t>(dims.size());
  }
  bool contiguous() const;
};

struct aclTensorList {
  std::vector<aclTensor*> tensors; // owned
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclScalar {
  aclDataType dtype;
  std::vector<char> bytes; // one element of `dtype`
};

struct aclScalarList {
  std::vector<aclScalar*> scalars; // owned
};

struct aclBoolArray {
  std::vector<bool> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclOpExecutor;

namespace standin {

// ---- settings, from the environment, read once -------------------------------------------------------------------
enum class Product { A2, A3, Ascend950 };
Product product(); // from CANN_STANDIN_SOC: Ascend910B2 (the default), Ascend910_9391, Ascend950PR_9589
bool on_950();
// True if CANN_STANDIN_VERSION ("9.1.0" by default; "8.5.0", ...) is at least this.
bool cann_at_least(int major, int minor);
// CANN_STANDIN_UNSETTLED=1: behave the other way where no public source says what a kernel does.
bool unsettled();

// ---- memory ------------------------------------------------------------------------------------------------------
// The host's own view of device bytes. Ends the process with a message if [address, address + bytes) is not inside one
// live device allocation.
void* host_view(const void* address, uint64_t bytes);
bool is_device_range(const void* address, uint64_t bytes);

// Ends the process with a message on stderr: for what real hardware would turn into a corrupted memory or a hang.
[[noreturn]] void die(const std::string& message);

// ---- elements of a tensor, in logical order whatever the strides -------------------------------------------------
int64_t item_size(aclDataType dtype);
bool is_float(aclDataType dtype); // float, float16, bfloat16
bool is_index(aclDataType dtype); // int32, int64

// Rows of a tensor seen as (product of the leading dimensions, last dimension) unless `row_dims` says how many trailing
// dimensions make a row. float16 and bfloat16 are widened on reading and rounded to nearest even on writing.
class Floats {
 public:
  explicit Floats(const aclTensor& tensor);
  float get(int64_t flat) const; // flat: index in logical (row-major) order; out of range ends the process
  void set(int64_t flat, float value) const;
  int64_t size() const;

 private:
  aclTensor tensor_;
  char* base_;
};

class Ints { // int32 and int64
 public:
  explicit Ints(const aclTensor& tensor);
  int64_t get(int64_t flat) const;
  void set(int64_t flat, int64_t value) const;
  int64_t size() const;

 private:
  aclTensor tensor_;
  char* base_;
};

// Raw elements of any dtype: `to` gets the bits of `from`, for kernels that move data.
void copy_element(const aclTensor& from, int64_t from_flat, const aclTensor& to, int64_t to_flat);

// NaN for floating dtypes, an impossible number for integers.
void poison(const aclTensor& tensor);

// Rounds through the dtype: what a kernel that computes in the tensor's own dtype has after every step.
float rounded(float value, aclDataType dtype);

// ---- two-phase calls ---------------------------------------------------------------------------------------------
constexpr int kNullptr = 161001;      // ACLNN_ERR_PARAM_NULLPTR
constexpr int kInvalid = 161002;      // ACLNN_ERR_PARAM_INVALID
constexpr int kTiling = 561002;       // ACLNN_ERR_INNER_TILING_ERROR
constexpr int kInnerNullptr = 561103; // ACLNN_ERR_INNER_NULLPTR
constexpr int kNoGroup = 361001;      // ACLNN_ERR_RUNTIME_ERROR: the name of a group is unknown
constexpr int kNoBinary = 561003;     // ACLNN_ERR_INNER_FIND_KERNEL_ERROR: not for this product

struct Refused {
  int code;
  std::string message; // what aclGetRecentErrMsg returns
};

// The description of one call that phase 1 builds. `plan.need(condition, code, message)` refuses.
class Plan {
 public:
  void need(bool condition, int code, const std::string& message) const {
    if (!condition) {
      throw Refused{code, message};
    }
  }
  // A required tensor: refuses null.
  const aclTensor& tensor(const aclTensor* tensor, const char* name, int null_code = kNullptr) const;
  // Outputs, poisoned when phase 2 runs, before the kernel.
  void output(const aclTensor* tensor);
  // An output of which the kernel leaves rows unwritten: a contiguous one keeps its old bytes there (the kernel stores
  // in place), a strided one is filled from an internal buffer and gets poison there.
  void partial_output(const aclTensor* tensor);
  // All-empty outputs: succeed without a launch, workspace 0.
  void nothing_to_do() {
    skip_ = true;
  }
  void workspace(uint64_t bytes) {
    workspace_ = bytes;
  }
  // The kernel, run on the stream. It must capture descriptors by value (aclTensor, not aclTensor*).
  void kernel(std::function<void()> kernel) {
    kernel_ = std::move(kernel);
  }

  // Read by nnopbase.cpp.
  std::vector<aclTensor> outputs_;
  std::vector<aclTensor> partial_outputs_;
  std::function<void()> kernel_;
  uint64_t workspace_ = 1024; // never 0 by default, so that callers have to allocate
  bool skip_ = false;
};

// An argument as the trace shows it.
using Argument = std::string; // one JSON value
Argument describe(const aclTensor* tensor);
Argument describe(const aclTensorList* list);
Argument describe(const aclIntArray* array);
Argument describe(const aclBoolArray* array);
Argument describe(const aclFloatArray* array);
Argument describe(const aclScalar* scalar);
Argument describe(const aclScalarList* list);
Argument describe(int64_t value);
Argument describe(uint32_t value);
Argument describe(bool value);
Argument describe(double value);
Argument describe(float value);
Argument describe(const char* text);

int run_phase1(
    const char* api,
    std::vector<Argument> arguments,
    std::vector<const aclTensor*> tensors, // every tensor argument, members of lists included: extents are checked
    uint64_t* workspace_size,
    aclOpExecutor** executor,
    const std::function<void(Plan&)>& plan);
int run_phase2(const char* api, void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream);

template <typename T>
void collect(std::vector<const aclTensor*>& all, const T& argument) {
  if constexpr (std::is_convertible_v<T, const aclTensor*>) {
    if (argument != nullptr) {
      all.push_back(argument);
    }
  } else if constexpr (std::is_convertible_v<T, const aclTensorList*>) {
    if (argument != nullptr) {
      all.insert(all.end(), argument->tensors.begin(), argument->tensors.end());
    }
  }
}

// int aclnnXGetWorkspaceSize(a, b, ..., size, executor) {
//   return phase1("aclnnX", size, executor, [&](Plan& plan) {...}, a, b, ...);
// }
template <typename... Args>
int phase1(
    const char* api,
    uint64_t* workspace_size,
    aclOpExecutor** executor,
    const std::function<void(Plan&)>& plan,
    const Args&... args) {
  std::vector<const aclTensor*> tensors;
  (collect(tensors, args), ...);
  return run_phase1(api, {describe(args)...}, std::move(tensors), workspace_size, executor, plan);
}

// Puts into the trace what has no phases, such as a collective: a call that succeeded and was launched.
void trace_launch(const char* api, const std::vector<Argument>& arguments, aclrtStream stream);

} // namespace standin

#pragma GCC visibility pop

#define STANDIN_API extern "C" __attribute__((visibility("default")))

// The second phase of an operator.
#define STANDIN_PHASE2(api)                                                                          \
  STANDIN_API int api(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) { \
    return standin::run_phase2(#api, workspace, size, executor, stream);                             \
  }

// ---- control from tests, through ctypes on libnnopbase.so --------------------------------------------------------
// Live objects: "tensor", "tensor_list", "int_array", "bool_array", "float_array", "scalar", "scalar_list", "executor",
// "stream", "event", "device_bytes". -1 for another name.
STANDIN_API int64_t standin_live(const char* kind);
// Makes the nth (1 = next) call of "phase1", "phase2" or "malloc" fail with `code`; nth 0 clears. "phase1:aclnnX"
// counts the calls of one operator only. "malloc" fails from the nth call on until cleared, because allocators try
// again.
STANDIN_API void standin_fail(const char* where, int64_t nth, int64_t code);
// Starts (path) or stops (null) a trace of aclnn calls and collectives as JSON lines. CANN_STANDIN_TRACE=path starts
// one at load.
STANDIN_API void standin_trace(const char* path);
// Kernels launched so far (phase 2 calls that were not skipped).
STANDIN_API int64_t standin_launches();
// The last value that callers set for ACL_OPT_DETERMINISTIC, -1 if none did (in libascendcl.so).
STANDIN_API int64_t standin_deterministic();
