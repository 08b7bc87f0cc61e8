// grouped_matmul and grouped_matmul_weight_grad: argument checks and outputs, the same on every device.
//
//   Rows of x are consecutive groups, one for each expert: y[rows of e] = x[rows of e] @ weight[e].
//   group_list_type 0: running totals, 1: counts. weight is (E, K, N), or (E, N, K) with trans_weight.
#pragma once

#include <ATen/ops/empty.h>

#include "../common/checks.h"

namespace moe {

inline void check_group_list(
    const ArgChecks& check, const Tensor& group_list, int64_t group_list_type, const Tensor& x) {
  check.rank(group_list, "group_list", 1);
  check.integer_beside(group_list, "group_list", x, "x");
  check.one_of(group_list_type, "group_list_type", {0, 1});
}

inline Tensor grouped_matmul_output(
    const Tensor& x, const Tensor& weight, const Tensor& group_list, bool trans_weight, int64_t group_list_type) {
  constexpr ArgChecks check("grouped_matmul");
  check.rank(x, "x", 2);
  check.floating(x, "x");
  check.rank(weight, "weight", 3);
  check.floating_like(weight, "weight", x, "x");
  check_group_list(check, group_list, group_list_type, x);
  check.size(group_list, "group_list", 0, weight.sym_size(0));
  check.size(weight, "weight", trans_weight ? 2 : 1, x.sym_size(1));
  return at::empty_symint({x.sym_size(0), weight.sym_size(trans_weight ? 1 : 2)}, x.options());
}

inline Tensor grouped_matmul_weight_grad_output(
    const Tensor& x, const Tensor& grad_y, const Tensor& group_list, bool trans_weight, int64_t group_list_type) {
  constexpr ArgChecks check("grouped_matmul_weight_grad");
  check.rank(x, "x", 2);
  check.floating(x, "x");
  check.rank(grad_y, "grad_y", 2);
  check.floating_like(grad_y, "grad_y", x, "x");
  check.size(grad_y, "grad_y", 0, x.sym_size(0));
  check_group_list(check, group_list, group_list_type, x);
  const SymInt experts = group_list.sym_size(0);
  const SymInt in = x.sym_size(1);
  const SymInt out = grad_y.sym_size(1);
  return trans_weight ? at::empty_symint({experts, out, in}, x.options())
                      : at::empty_symint({experts, in, out}, x.options());
}

} // namespace moe
