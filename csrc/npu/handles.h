// Owners of the C objects that one aclnn call needs.
//
// aclCreateTensorList takes over its members; an executor belongs to CANN from phase 2 on. `Handles` knows which of its
// objects are still its own, and gives each back exactly once on every road: after phase 2, or when the call ends
// early.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "acl_types.h"

namespace moe::npu {

class Handles {
 public:
  Handles() = default;
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles() {
    release();
  }

  // Null for an undefined tensor. The descriptor has the storage's address and the offset in elements, as the two-phase
  // interface wants them: an operator sees a strided view as the view that it is.
  aclTensor* tensor(const at::Tensor& tensor);
  aclTensorList* list(at::TensorList tensors);
  aclIntArray* int_array(at::IntArrayRef values);
  // A copy that lives as long as the call: no document says when CANN reads it.
  const char* text(std::string_view value);

  // Where phase 1 stores its executor. It stays null until then, so that a failed phase 1 leaves nothing to release.
  aclOpExecutor** executor_slot() {
    return &executor_;
  }
  // The executor for phase 2, which consumes it, whatever it returns.
  aclOpExecutor* take_executor();

  void release() noexcept;

 private:
  aclOpExecutor* executor_ = nullptr;
  std::vector<aclTensor*> tensors_;
  std::vector<aclTensorList*> lists_;
  std::vector<aclIntArray*> int_arrays_;
  std::list<std::string> texts_;
};

} // namespace moe::npu
