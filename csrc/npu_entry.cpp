// What the operators do with an NPU tensor while the NPU kernels are not loaded. Contract: npu_entry.h.
#include "npu_entry.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace moe {
namespace {

namespace py = pybind11;

// Empty if the NPU kernels are loaded now, else why they cannot be.
std::string load_npu_kernels() {
  const py::gil_scoped_acquire gil;
  return py::module_::import("torch_moe_ops._npu").attr("load")().cast<std::string>();
}

bool allows_cpu_fallback() {
  const char* value = std::getenv("MOE_OPS_ALLOW_CPU_FALLBACK");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

void warn_once(const std::string& op, const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  const std::lock_guard lock(mutex);
  if (warned.insert(op).second) {
    TORCH_WARN(op, ": runs on the CPU, with copies there and back (MOE_OPS_ALLOW_CPU_FALLBACK=1): ", reason);
  }
}

void load_and_call_again(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string reason = load_npu_kernels();
  if (reason.empty()) {
    op.callBoxed(stack);
    return;
  }
  const std::string& name = op.operator_name().name;
  TORCH_CHECK_NOT_IMPLEMENTED(
      allows_cpu_fallback(), name, ": the NPU kernels cannot be used: ", reason,
      " (`python -m torch_moe_ops.info` shows what is there; MOE_OPS_ALLOW_CPU_FALLBACK=1 runs the CPU kernel "
      "instead)");
  warn_once(name, reason);
  at::native::cpu_fallback(op, stack);
}

std::unique_ptr<torch::Library>& entry() {
  static std::unique_ptr<torch::Library> library;
  return library;
}

} // namespace

void install_npu_entry() {
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "moe", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    // Without arguments there is no tensor whose device could choose.
    if (name.getNamespace() == "moe" && op.has_value() && !op->schema().arguments().empty()) {
      library->impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&load_and_call_again>());
    }
  }
  entry() = std::move(library);
}

void remove_npu_entry() {
  entry().reset();
}

} // namespace moe
