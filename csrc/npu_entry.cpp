// What the operators do with an NPU tensor while the NPU kernels are not loaded. Contract: npu_entry.h.
//
// The entry is registered for the alias key of all backends, which a kernel for PrivateUse1 itself outranks: it takes
// over without a moment in which another thread would find neither, and so torch_npu's fallback.
#include "npu_entry.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "common/switches.h"

namespace moe {
namespace {

namespace py = pybind11;

// Empty if the NPU kernels are loaded now, else why they cannot be.
std::string load_npu_kernels() {
  const py::gil_scoped_acquire gil;
  return py::module_::import("torch_moe_ops._npu").attr("load")().cast<std::string>();
}

bool is_first_warning(const std::string& op) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  const std::lock_guard lock(mutex);
  return warned.insert(op).second;
}

void load_and_call_again(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  if (keys.highestPriorityTypeId() == c10::DispatchKey::Undefined) {
    // None for every tensor: each kernel checks that, in the words of all other errors.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      keys.has_backend(c10::BackendComponent::PrivateUse1Bit), name,
      ": the tensors must be on the CPU, an NPU or the meta device, got ", toString(keys.highestPriorityTypeId()));
  std::string reason = load_npu_kernels();
  if (reason.empty()) {
    if (op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      op.callBoxed(stack);
      return;
    }
    reason = "none is registered for this operator";
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      switched_on("MOE_OPS_ALLOW_CPU_FALLBACK"), name, ": the NPU kernels cannot be used: ", reason,
      " (`python -m torch_moe_ops.info` shows what is there; MOE_OPS_ALLOW_CPU_FALLBACK=1 runs the CPU kernel "
      "instead)");
  if (is_first_warning(name)) {
    TORCH_WARN(name, ": runs on the CPU, with copies there and back (MOE_OPS_ALLOW_CPU_FALLBACK=1): ", reason);
  }
  at::native::cpu_fallback(op, stack);
}

} // namespace

void install_npu_entry() {
  static std::unique_ptr<torch::Library> library;
  if (library != nullptr) {
    return; // the package is being reloaded
  }
  library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "moe", c10::DispatchKey::CompositeExplicitAutogradNonFunctional, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    // Without arguments there is no tensor whose device could choose.
    if (name.getNamespace() == "moe" && op.has_value() && !op->schema().arguments().empty()) {
      library->impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&load_and_call_again>());
    }
  }
}

} // namespace moe
