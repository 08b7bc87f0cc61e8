// What the operators do first with tensors that autograd could record.
//
// The gradient formulas are Python kernels for AutogradOther (torch_moe_ops/ops/_registration.py). The entry holds the
// alias key Autograd and so stands in front of them, whatever the device: it hands on to the formula what this must
// see, and everything else straight to the kernels. For small inputs the way through Python takes longer than the
// kernel, and of a backward pass hardly anything is recorded.
#pragma once

#include <string>

namespace moe {

// For an operator with a formula.
void install_autograd_entry(const std::string& op);

} // namespace moe
