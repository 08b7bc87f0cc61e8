// Calls that no gradient formula needs to see pass by Python. Contract: autograd_entry.h.
#include "autograd_entry.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>

namespace moe {
namespace {

// Whether the result requires a gradient, or an input has a forward-mode tangent, which formulas refuse.
bool concerns_formula(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const bool grad_mode = at::GradMode::is_enabled();
  const auto arguments = stack.end() - static_cast<int64_t>(op.schema().arguments().size());
  return std::any_of(arguments, stack.end(), [grad_mode](const c10::IValue& argument) {
    if (!argument.isTensor()) {
      return false;
    }
    const at::Tensor& tensor = argument.toTensor();
    return (grad_mode && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
  });
}

void call_formula_or_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet keys_below = keys & c10::after_autograd_keyset;
  if (concerns_formula(op, *stack)) {
    op.redispatchBoxed(keys_below | c10::DispatchKeySet(c10::DispatchKey::AutogradOther), stack);
  } else {
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys_below, stack);
  }
}

} // namespace

void install_autograd_entry(const std::string& op) {
  static torch::Library library(torch::Library::IMPL, "moe", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("moe::" + op).c_str(), "");
  if (!handle.hasKernelForDispatchKey(c10::DispatchKey::Autograd)) { // else the module is being reloaded
    library.impl(op.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_formula_or_kernel>());
  }
}

} // namespace moe
