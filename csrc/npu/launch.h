// The two-phase call of an aclnn operator.
//
//   launch<MoeTokenPermute>("token_permute", tokens, indices, rows, false, permuted, sorted_indices);
//
// Phase 1 (GetWorkspaceSize) runs at once, on this thread, on the device of the first tensor; the workspace comes from
// torch's caching allocator; phase 2 goes through torch_npu's task queue, so that it keeps its place among torch's own
// launches in every queue mode. Everything that the queued part needs is owned by it.
//
// The arguments are those of the C function, in its order, and the compiler holds them against signatures.h:
//   aclTensor*      a Tensor; an optional Tensor or nullptr where null is allowed
//   aclTensorList*  Tensors{...}, or nullptr
//   aclIntArray*    Ints{...}, or nullptr
//   const char*     a std::string
//   int64_t, bool   exactly that type: anything that would be converted does not compile
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "handles.h"
#include "signatures.h"
#include "symbols.h"

namespace moe::npu {

using Tensors = std::vector<at::Tensor>;
using Ints = std::vector<int64_t>;

// What a message says about an argument. It keeps no tensor alive.
struct Argument {
  enum class Kind { Null, Tensor, TensorList, Ints, Int, Bool, Text } kind = Kind::Null;
  std::vector<std::pair<at::ScalarType, at::DimVector>> tensors;
  Ints values; // of an int, a bool, or an int array
  std::string text{};
};

// One call, from the conversion of its arguments to the end of phase 2.
class Call {
 public:
  Call(const char* op, const char* api, const char* const* names) : op_(op), api_(api), names_(names) {}

  Handles& handles() {
    return handles_;
  }
  void add(Argument argument) {
    arguments_.push_back(std::move(argument));
  }
  // For the argument that was added last: raises for a tensor that is on no NPU, or in a format (FRACTAL_NZ, say) whose
  // bytes are not where sizes and strides tell.
  void check_tensor(const at::Tensor& tensor) const;

  // Before phase 1: state of this thread that CANN reads there.
  static void prepare_thread();
  // Throws the error of an earlier call that failed in the task queue, after its caller had gone on.
  static void raise_earlier_failure();
  [[noreturn]] void fail_phase1(Status status) const;
  // Allocates the workspace and hands phase 2 to torch_npu.
  static void enqueue(const std::shared_ptr<Call>& call, Phase2 phase2, uint64_t workspace_size);

 private:
  Status run_phase2(Phase2 phase2, void* workspace, uint64_t workspace_size, aclrtStream stream);
  std::string failure(const char* phase, Status status) const;

  const char* op_;
  const char* api_;
  const char* const* names_;
  std::vector<Argument> arguments_;
  Handles handles_;
  std::string message_;        // of a failed phase 2
  bool failed_inline_ = false; // read and written by the calling thread alone
};

// From what a wrapper passes to the C type. There is no general rule: what is not listed does not compile.
template <typename Parameter>
struct Convert;

template <>
struct Convert<aclTensor*> {
  static aclTensor* from(Call& call, const at::Tensor& tensor);
  static aclTensor* from(Call& call, const std::optional<at::Tensor>& tensor);
  static aclTensor* from(Call& call, std::nullptr_t);
};

template <>
struct Convert<aclTensorList*> {
  static aclTensorList* from(Call& call, const Tensors& tensors);
  static aclTensorList* from(Call& call, const std::optional<Tensors>& tensors);
  static aclTensorList* from(Call& call, std::nullptr_t);
};

template <>
struct Convert<aclIntArray*> {
  static aclIntArray* from(Call& call, const Ints& values);
  static aclIntArray* from(Call& call, const std::optional<Ints>& values);
  static aclIntArray* from(Call& call, std::nullptr_t);
};

template <typename Handle>
struct Convert<const Handle*> : Convert<Handle*> {};

template <>
struct Convert<const char*> {
  static const char* from(Call& call, const std::string& text);
};

template <>
struct Convert<int64_t> {
  static int64_t from(Call& call, int64_t value);
  template <typename Other>
  static int64_t from(Call&, Other) = delete;
};

template <>
struct Convert<bool> {
  static bool from(Call& call, bool value);
  template <typename Other>
  static bool from(Call&, Other) = delete;
};

template <typename... Parameters, typename... Given>
std::tuple<Parameters...> convert_all(AclnnOperator<Parameters...>, Call& call, const Given&... given) {
  static_assert(sizeof...(Parameters) == sizeof...(Given), "an argument of the aclnn operator is missing or too many");
  // Braces: converted, and so listed in messages, from left to right.
  return std::tuple<Parameters...>{Convert<Parameters>::from(call, given)...};
}

inline void find_device(std::optional<at::Device>& device, const at::Tensor& tensor) {
  if (!device.has_value() && tensor.defined()) {
    device = tensor.device();
  }
}
inline void find_device(std::optional<at::Device>& device, const std::optional<at::Tensor>& tensor) {
  find_device(device, tensor.value_or(at::Tensor()));
}
inline void find_device(std::optional<at::Device>& device, const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    find_device(device, tensor);
  }
}
inline void find_device(std::optional<at::Device>& device, const std::optional<Tensors>& tensors) {
  find_device(device, tensors.value_or(Tensors()));
}
template <typename Other>
void find_device(std::optional<at::Device>&, const Other&) {}

template <typename Operator>
struct Functions {
  typename Operator::Phase1 phase1;
  Phase2 phase2;

  // Looked up at the first call. A failed look-up is tried again at the next.
  static const Functions& get(const char* op) {
    static const Functions kFunctions = {
        reinterpret_cast<typename Operator::Phase1>(
            require_symbol(op, std::string(Operator::kName) + "GetWorkspaceSize")),
        reinterpret_cast<Phase2>(require_symbol(op, Operator::kName))};
    return kFunctions;
  }
};

template <typename Operator, typename... Given>
void launch(const char* op, const Given&... given) {
  const Functions<Operator>& functions = Functions<Operator>::get(op);
  Call::raise_earlier_failure();
  std::optional<at::Device> device;
  (find_device(device, given), ...);
  const c10::OptionalDeviceGuard guard(device);

  const auto call = std::make_shared<Call>(op, Operator::kName, Operator::kArguments.data());
  const auto arguments = convert_all(Operator{}, *call, given...);
  Call::prepare_thread();
  uint64_t workspace_size = 0;
  const Status status = std::apply(
      [&](const auto&... converted) {
        return functions.phase1(converted..., &workspace_size, call->handles().executor_slot());
      },
      arguments);
  if (status != kSuccess) {
    call->fail_phase1(status);
  }
  Call::enqueue(call, functions.phase2, workspace_size);
}

} // namespace moe::npu
