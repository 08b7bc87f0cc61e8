// swiglu and swiglu_grad: argument checks and outputs, the same on every device.
//
//   x = [gate, up], each half of the last dimension;  s = sigmoid(gate) = 1 / (1 + e^-gate)
//   output    = gate * s * up
//   gate_grad = grad_output * up * s * (1 + gate * (1 - s)),  up_grad = grad_output * gate * s;  in the layout of x
#pragma once

#include <ATen/ops/empty.h>

#include "../common/checks.h"

namespace moe {

// The shape of the output: half of x.
inline SymSizes check_swiglu_input(const ArgChecks& check, const Tensor& x) {
  check.min_rank(x, "x", 1);
  check.floating(x, "x");
  SymSizes sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  check.even(sizes.back(), "last size of x");
  sizes.back() = sizes.back() / 2;
  return sizes;
}

inline Tensor swiglu_output(const Tensor& x) {
  constexpr ArgChecks check("swiglu");
  const SymSizes sizes = check_swiglu_input(check, x);
  return at::empty_symint(sizes, x.options());
}

inline Tensor swiglu_grad_output(const Tensor& grad_output, const Tensor& x) {
  constexpr ArgChecks check("swiglu_grad");
  const SymSizes half = check_swiglu_input(check, x);
  check.floating_like(grad_output, "grad_output", x, "x");
  check.shape(grad_output, "grad_output", half);
  return at::empty_symint(x.sym_sizes(), x.options());
}

} // namespace moe
