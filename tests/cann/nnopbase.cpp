// Descriptors and the two phases of aclnn calls, with CANN's rules: what phase 1 is given must be live device memory,
// an executor is used once, and phase 2 gets the workspace that phase 1 asked for.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "trace.h"

// Never freed, so that the address of a used executor does not come back as a new one.
struct aclOpExecutor {
  std::string api;
  int64_t call;
  int device; // of the tensors, -1 without any
  standin::Plan plan;
};

namespace standin {
namespace {

// Live handles of one kind. Never destroyed.
template <typename T>
class Handles {
 public:
  explicit Handles(const char* kind) : kind_(kind) {}

  T* add(T value) {
    auto* handle = new T(std::move(value));
    std::unique_lock lock(mutex_);
    live_.insert(handle);
    return handle;
  }

  void remove(const T* handle) {
    check_out(handle);
    delete handle;
  }

  // Ends the life of a handle without freeing it.
  void check_out(const T* handle) {
    std::unique_lock lock(mutex_);
    if (live_.erase(handle) == 0) {
      die(std::string("destroying, of the kind ") + kind_ + ", what does not exist or no longer does");
    }
  }

  bool contains(const T* handle) {
    std::unique_lock lock(mutex_);
    return live_.count(handle) != 0;
  }

  int64_t size() {
    std::unique_lock lock(mutex_);
    return static_cast<int64_t>(live_.size());
  }

 private:
  const char* kind_;
  std::mutex mutex_;
  std::unordered_set<const T*> live_;
};

struct AllHandles {
  Handles<aclTensor> tensors{"tensor"};
  Handles<aclTensorList> tensor_lists{"tensor list"};
  Handles<aclIntArray> int_arrays{"int array"};
  Handles<aclBoolArray> bool_arrays{"bool array"};
  Handles<aclFloatArray> float_arrays{"float array"};
  Handles<aclScalar> scalars{"scalar"};
  Handles<aclScalarList> scalar_lists{"scalar list"};
  Handles<aclOpExecutor> executors{"executor"};
};

AllHandles& handles() {
  static auto* handles = new AllHandles;
  return *handles;
}

std::atomic<int64_t> launches = 0;

// Destroying null succeeds.
template <typename T>
int destroy(Handles<T>& all, const T* handle) {
  if (handle != nullptr) {
    all.remove(handle);
  }
  return ACL_SUCCESS;
}

template <typename Array, typename T>
Array* create_array(Handles<Array>& all, const T* values, uint64_t size) {
  if (values == nullptr && size > 0) {
    return nullptr;
  }
  return all.add(Array{std::vector<T>(values, values + size)});
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& dims) {
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * dims[i];
  }
  return strides;
}

// First and last element of a tensor with elements, in elements from the start of the storage.
std::pair<int64_t, int64_t> extent(const aclTensor& tensor) {
  int64_t last = tensor.offset;
  for (int64_t i = 0; i < tensor.rank(); ++i) {
    last += (tensor.dims[i] - 1) * tensor.strides[i];
  }
  return {tensor.offset, last};
}

void check_tensor(const aclTensor* tensor) {
  if (!handles().tensors.contains(tensor)) {
    die("an aclnn call is given a tensor that does not exist or no longer does");
  }
  if (tensor->numel() == 0) {
    return;
  }
  const auto [first, last] = extent(*tensor);
  int64_t storage = 1;
  for (const int64_t dim : tensor->storage_dims) {
    storage *= dim;
  }
  if (last >= storage) {
    throw Refused{kInvalid, "a tensor reaches beyond its storage: " + describe(tensor)};
  }
  const int64_t size = item_size(tensor->dtype);
  const auto bytes = static_cast<uint64_t>((last - first + 1) * size);
  if (!is_device_range(static_cast<char*>(tensor->data) + first * size, bytes)) {
    throw Refused{kNullptr, "a tensor is not in live device memory: " + describe(tensor)};
  }
}

int common_device(const std::vector<const aclTensor*>& tensors) {
  int common = -1;
  for (const aclTensor* tensor : tensors) {
    const int device = tensor->numel() == 0 ? -1 : device_of(tensor->data);
    if (common >= 0 && device >= 0 && device != common) {
      throw Refused{kInvalid, "the tensors of a call are on different devices"};
    }
    common = std::max(common, device);
  }
  return common;
}

void check_fault(const char* phase, const char* api) {
  const int any = injected_fault(phase);
  const int named = injected_fault(std::string(phase) + ":" + api);
  if (any != 0 || named != 0) {
    throw Refused{any != 0 ? any : named, std::string(api) + ": injected fault in " + phase};
  }
}

aclOpExecutor make_executor(
    const char* api, const std::vector<const aclTensor*>& tensors, const std::function<void(Plan&)>& describe_plan) {
  check_fault("phase1", api);
  std::for_each(tensors.begin(), tensors.end(), check_tensor);
  aclOpExecutor made{api, 0, common_device(tensors), {}};
  describe_plan(made.plan);
  if (made.plan.skip_) {
    made.plan.workspace_ = 0;
  } else if (!made.plan.kernel_) {
    die(std::string(api) + " has no kernel");
  }
  return made;
}

// What phase 2 is given must fit the executor, which is used up already.
void check_launch(const aclOpExecutor& used, const char* api, void* workspace, uint64_t size, aclrtStream stream) {
  const auto need = [&](bool condition, int code, const char* message) {
    if (!condition) {
      throw Refused{code, std::string(api) + ": " + message};
    }
  };
  need(used.api == api, kInvalid, "the executor belongs to another operator");
  need(size == used.plan.workspace_, kInvalid, "the workspace has another size than phase 1 asked for");
  need(size == 0 || workspace != nullptr, kNullptr, "the workspace is null");
  need(size == 0 || is_device_range(workspace, size), kInvalid, "the workspace is not live device memory");
  need(
      used.device < 0 || used.device == stream_device(stream), kInvalid,
      "the stream belongs to another device than the tensors");
  check_fault("phase2", api);
}

void launch(const Plan& plan, void* workspace, aclrtStream stream) {
  ++launches;
  const uint64_t size = plan.workspace_;
  submit(stream, [plan, workspace, size]() noexcept {
    if (size > 0) {
      fill_poison(host_view(workspace, size), size);
    }
    std::for_each(plan.outputs_.begin(), plan.outputs_.end(), poison);
    for (const aclTensor& output : plan.partial_outputs_) {
      if (!output.contiguous()) {
        poison(output);
      }
    }
    plan.kernel_();
  });
}

} // namespace

const aclTensor& Plan::tensor(const aclTensor* tensor, const char* name, int null_code) const {
  need(tensor != nullptr, null_code, std::string(name) + " is null");
  return *tensor;
}

void Plan::output(const aclTensor* tensor) {
  outputs_.push_back(*tensor);
}

void Plan::partial_output(const aclTensor* tensor) {
  partial_outputs_.push_back(*tensor);
}

int run_phase1(
    const char* api,
    std::vector<Argument> arguments,
    std::vector<const aclTensor*> tensors,
    uint64_t* workspace_size,
    aclOpExecutor** executor,
    const std::function<void(Plan&)>& plan) {
  if (workspace_size == nullptr || executor == nullptr) {
    return refuse(kNullptr, std::string(api) + ": workspace size or executor is null");
  }
  try {
    aclOpExecutor made = make_executor(api, tensors, plan);
    *workspace_size = made.plan.workspace_;
    made.call = trace_phase1(api, arguments, made.plan.workspace_, ACL_SUCCESS);
    *executor = handles().executors.add(std::move(made));
    return ACL_SUCCESS;
  } catch (const Refused& refused) {
    trace_phase1(api, arguments, 0, refused.code);
    return refuse(refused.code, refused.message);
  }
}

int run_phase2(const char* api, void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream) {
  if (executor == nullptr) {
    return refuse(kNullptr, std::string(api) + ": the executor is null");
  }
  if (!handles().executors.contains(executor)) {
    return refuse(kInvalid, std::string(api) + ": the executor does not exist or was used before");
  }
  handles().executors.check_out(executor);
  const Plan plan = std::exchange(executor->plan, {});
  int status = ACL_SUCCESS;
  try {
    executor->plan.workspace_ = plan.workspace_;
    check_launch(*executor, api, workspace, workspace_size, stream);
  } catch (const Refused& refused) {
    status = refuse(refused.code, refused.message);
  }
  const bool launched = status == ACL_SUCCESS && !plan.skip_;
  trace_phase2(executor->call, api, stream, launched, status);
  if (launched) {
    launch(plan, workspace, stream);
  }
  return status;
}

} // namespace standin

using namespace standin;

// ---- descriptors -------------------------------------------------------------------------------------------------
STANDIN_API aclTensor* aclCreateTensor(
    const int64_t* dims,
    uint64_t rank,
    aclDataType dtype,
    const int64_t* strides,
    int64_t offset,
    aclFormat format,
    const int64_t* storage_dims,
    uint64_t storage_rank,
    void* data) {
  const auto negative = [](int64_t number) { return number < 0; };
  if ((dims == nullptr && rank > 0) || (storage_dims == nullptr && storage_rank > 0) || offset < 0 ||
      std::any_of(dims, dims + rank, negative) ||
      (strides != nullptr && std::any_of(strides, strides + rank, negative))) {
    refuse(kInvalid, "aclCreateTensor: invalid dimensions, strides or offset");
    return nullptr;
  }
  aclTensor tensor{{dims, dims + rank}, {}, offset, dtype, format, {storage_dims, storage_dims + storage_rank}, data};
  tensor.strides = strides == nullptr ? contiguous_strides(tensor.dims) : std::vector<int64_t>(strides, strides + rank);
  return handles().tensors.add(std::move(tensor));
}

STANDIN_API int aclDestroyTensor(const aclTensor* tensor) {
  return destroy(handles().tensors, tensor);
}

STANDIN_API aclTensorList* aclCreateTensorList(aclTensor* const* tensors, uint64_t size) {
  return create_array(handles().tensor_lists, tensors, size);
}

STANDIN_API int aclDestroyTensorList(const aclTensorList* list) {
  if (list != nullptr) {
    for (const aclTensor* tensor : list->tensors) {
      destroy(handles().tensors, tensor);
    }
  }
  return destroy(handles().tensor_lists, list);
}

STANDIN_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return create_array(handles().int_arrays, values, size);
}

STANDIN_API int aclDestroyIntArray(const aclIntArray* array) {
  return destroy(handles().int_arrays, array);
}

STANDIN_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return create_array(handles().bool_arrays, values, size);
}

STANDIN_API int aclDestroyBoolArray(const aclBoolArray* array) {
  return destroy(handles().bool_arrays, array);
}

STANDIN_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return create_array(handles().float_arrays, values, size);
}

STANDIN_API int aclDestroyFloatArray(const aclFloatArray* array) {
  return destroy(handles().float_arrays, array);
}

STANDIN_API aclScalar* aclCreateScalar(const void* value, aclDataType dtype) {
  const auto* bytes = static_cast<const char*>(value);
  return bytes == nullptr ? nullptr : handles().scalars.add(aclScalar{dtype, {bytes, bytes + item_size(dtype)}});
}

STANDIN_API int aclDestroyScalar(const aclScalar* scalar) {
  return destroy(handles().scalars, scalar);
}

STANDIN_API aclScalarList* aclCreateScalarList(aclScalar* const* scalars, uint64_t size) {
  return create_array(handles().scalar_lists, scalars, size);
}

STANDIN_API int aclDestroyScalarList(const aclScalarList* list) {
  if (list != nullptr) {
    for (const aclScalar* scalar : list->scalars) {
      destroy(handles().scalars, scalar);
    }
  }
  return destroy(handles().scalar_lists, list);
}

// For executors that phase 2 never got; phase 2 uses them up otherwise.
STANDIN_API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  if (executor != nullptr) {
    handles().executors.check_out(executor);
    executor->plan = {};
  }
  return ACL_SUCCESS;
}

// ---- control -----------------------------------------------------------------------------------------------------
STANDIN_API int64_t standin_live(const char* kind) {
  static const std::unordered_map<std::string, int64_t (*)()> counts = {
      {"tensor", [] { return handles().tensors.size(); }},
      {"tensor_list", [] { return handles().tensor_lists.size(); }},
      {"int_array", [] { return handles().int_arrays.size(); }},
      {"bool_array", [] { return handles().bool_arrays.size(); }},
      {"float_array", [] { return handles().float_arrays.size(); }},
      {"scalar", [] { return handles().scalars.size(); }},
      {"scalar_list", [] { return handles().scalar_lists.size(); }},
      {"executor", [] { return handles().executors.size(); }},
      {"stream", live_streams},
      {"event", live_events},
      {"device_bytes", [] { return live_device_bytes(); }}};
  const auto found = counts.find(kind);
  return found == counts.end() ? -1 : found->second();
}

STANDIN_API int64_t standin_launches() {
  return launches;
}
