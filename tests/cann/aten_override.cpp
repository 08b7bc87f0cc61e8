// ATen on NPU tensors without CANN's ATen operators: what torch_npu has a kernel for gets one that moves the tensors to
// the CPU and back, and what PyTorch composes of other operators is composed again. So arbitrary code around the
// package's operators runs. What creates, views, copies and resizes tensors stays torch_npu's own. Other namespaces are
// not touched.
#include <ATen/native/CPUFallback.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <set>
#include <string>

namespace {

using c10::DispatchKey;

// By name, all overloads: they work on storage and metadata, or are what the fallback itself is made of.
const std::set<std::string> kCore = {
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_lazy_clone",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_to_copy",
    "aten::as_strided_",
    "aten::clone",
    "aten::contiguous",
    "aten::copy_",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_"};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// Runs the kernel that PyTorch registered for all backends.
template <DispatchKey key>
void run_generic(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

bool has(const c10::OperatorHandle& op, DispatchKey key) {
  return op.hasKernelForDispatchKey(key);
}

bool runs_on_cpu(const c10::OperatorHandle& op) {
  return has(op, DispatchKey::CPU) || has(op, DispatchKey::CompositeExplicitAutograd) ||
         has(op, DispatchKey::CompositeExplicitAutogradNonFunctional);
}

class Overrides {
 public:
  void add(const c10::OperatorName& name, const c10::OperatorHandle& op) {
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    const bool forward = has(op, DispatchKey::PrivateUse1);
    const bool autograd = has(op, DispatchKey::AutogradPrivateUse1);
    if (has(op, DispatchKey::CompositeImplicitAutograd)) {
      if (forward || autograd) {
        forward_.impl(full.c_str(), boxed<&run_generic<DispatchKey::CompositeImplicitAutograd>>());
        autograd_.impl(full.c_str(), boxed<&run_generic<DispatchKey::CompositeImplicitAutograd>>());
      }
      return;
    }
    if (forward && runs_on_cpu(op)) {
      forward_.impl(full.c_str(), boxed<&run_on_cpu>());
    }
    if (autograd && has(op, DispatchKey::Autograd)) {
      autograd_.impl(full.c_str(), boxed<&run_generic<DispatchKey::Autograd>>());
    }
  }

 private:
  template <c10::KernelFunction::BoxedKernelFunction* kernel>
  static torch::CppFunction boxed() {
    return torch::CppFunction::makeFromBoxedFunction<kernel>();
  }

  torch::Library forward_{torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__};
  torch::Library autograd_{torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__};
};

// Says nothing: PyTorch would warn that kernels are replaced.
class Silence : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// Never destroyed: the kernels stay until the process ends.
const Overrides* override_all() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto* overrides = new Overrides;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    const bool aten = name.name.rfind("aten::", 0) == 0 && kCore.count(name.name) == 0;
    if (aten && op.has_value() && !returns_view(op->schema())) {
      overrides->add(name, *op);
    }
  }
  return overrides;
}

[[maybe_unused]] const Overrides* const overrides = override_all();

} // namespace
