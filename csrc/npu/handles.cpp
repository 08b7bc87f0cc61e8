// Owners of the C objects that one aclnn call needs. Contract: handles.h.
#include "handles.h"

#include <c10/util/Exception.h>

#include <utility>

#include "symbols.h"

namespace moe::npu {
namespace {

// The functions that make and destroy descriptors.
struct DescriptorApi {
  aclTensor* (*create_tensor)(
      const int64_t*, uint64_t, aclDataType, const int64_t*, int64_t, aclFormat, const int64_t*, uint64_t, void*);
  Status (*destroy_tensor)(const aclTensor*);
  aclTensorList* (*create_list)(const aclTensor* const*, uint64_t);
  Status (*destroy_list)(const aclTensorList*);
  aclIntArray* (*create_int_array)(const int64_t*, uint64_t);
  Status (*destroy_int_array)(const aclIntArray*);
  Status (*destroy_executor)(aclOpExecutor*);

  static const DescriptorApi& get() {
    static const DescriptorApi kApi = [] {
      DescriptorApi api;
      resolve(api.create_tensor, "aclCreateTensor");
      resolve(api.destroy_tensor, "aclDestroyTensor");
      resolve(api.create_list, "aclCreateTensorList");
      resolve(api.destroy_list, "aclDestroyTensorList");
      resolve(api.create_int_array, "aclCreateIntArray");
      resolve(api.destroy_int_array, "aclDestroyIntArray");
      // Old releases have no way to give back an executor that was never run; there it is lost with its error.
      api.destroy_executor = reinterpret_cast<Status (*)(aclOpExecutor*)>(find_symbol("aclDestroyAclOpExecutor"));
      return api;
    }();
    return kApi;
  }

 private:
  template <typename Function>
  static void resolve(Function& function, const char* name) {
    function = reinterpret_cast<Function>(require_symbol("npu", name));
  }
};

aclDataType acl_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ACL_FLOAT;
    case at::kHalf:
      return ACL_FLOAT16;
    case at::kBFloat16:
      return ACL_BF16;
    case at::kDouble:
      return ACL_DOUBLE;
    case at::kInt:
      return ACL_INT32;
    case at::kLong:
      return ACL_INT64;
    case at::kBool:
      return ACL_BOOL;
    default:
      TORCH_CHECK_TYPE(false, "torch_moe_ops passes no ", dtype, " tensors to an NPU");
  }
}

// The format that torch_npu gives to a plain tensor of this rank.
aclFormat plain_format(int64_t rank) {
  switch (rank) {
    case 3:
      return ACL_FORMAT_NCL;
    case 4:
      return ACL_FORMAT_NCHW;
    case 5:
      return ACL_FORMAT_NCDHW;
    default:
      return ACL_FORMAT_ND;
  }
}

aclTensor* create_tensor(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes();
  const int64_t storage_items = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  aclTensor* descriptor = DescriptorApi::get().create_tensor(
      sizes.data(), sizes.size(), acl_dtype(tensor.scalar_type()), tensor.strides().data(), tensor.storage_offset(),
      plain_format(tensor.dim()), &storage_items, 1, const_cast<void*>(tensor.storage().data()));
  TORCH_CHECK(descriptor != nullptr, "aclCreateTensor failed for a tensor of shape ", sizes);
  return descriptor;
}

} // namespace

aclTensor* Handles::tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return nullptr;
  }
  tensors_.reserve(tensors_.size() + 1); // nothing may throw between creation and ownership
  return tensors_.emplace_back(create_tensor(tensor));
}

aclTensorList* Handles::list(at::TensorList tensors) {
  const size_t first_member = tensors_.size();
  for (const auto& member : tensors) {
    tensor(member);
  }
  lists_.reserve(lists_.size() + 1);
  aclTensorList* list = DescriptorApi::get().create_list(tensors_.data() + first_member, tensors.size());
  TORCH_CHECK(list != nullptr, "aclCreateTensorList failed for ", tensors.size(), " tensors");
  tensors_.resize(first_member); // the list owns them now
  return lists_.emplace_back(list);
}

aclIntArray* Handles::int_array(at::IntArrayRef values) {
  int_arrays_.reserve(int_arrays_.size() + 1);
  aclIntArray* array = DescriptorApi::get().create_int_array(values.data(), values.size());
  TORCH_CHECK(array != nullptr, "aclCreateIntArray failed for ", values.size(), " values");
  return int_arrays_.emplace_back(array);
}

const char* Handles::text(std::string_view value) {
  return texts_.emplace_back(value).c_str();
}

aclOpExecutor* Handles::take_executor() {
  return std::exchange(executor_, nullptr);
}

void Handles::release() noexcept {
  if (executor_ == nullptr && tensors_.empty() && lists_.empty() && int_arrays_.empty()) {
    return;
  }
  const DescriptorApi& api = DescriptorApi::get(); // found before: something was created
  aclOpExecutor* unused = take_executor();
  if (unused != nullptr && api.destroy_executor != nullptr) {
    api.destroy_executor(unused);
  }
  for (const auto* list : std::exchange(lists_, {})) {
    api.destroy_list(list);
  }
  for (const auto* tensor : std::exchange(tensors_, {})) {
    api.destroy_tensor(tensor);
  }
  for (const auto* array : std::exchange(int_arrays_, {})) {
    api.destroy_int_array(array);
  }
}

} // namespace moe::npu
