// finalize_routing_v2 and finalize_routing_v2_grad: argument checks and outputs, the same on every device.
//
//   y[t] = x1[t] + x2[t] + sum over k of scales[t, k] * (expanded_x[row(t, k)] + bias[expert_idx[t, k]])
//   drop_pad_mode: 0/1 read the row map k-major (row(t, k) = map[k * T + t]), 2/3 token-major (map[t * K + k]); 1/3 are
//   drop/pad, with expanded_x (E, C, H) and -1 for a dropped slot, which loses its whole term, bias included.
//   The grad op knows modes 0 and 1 only, both token-major (forward modes 2 and 3).
#pragma once

#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/checks.h"

namespace moe {

// scales, bias and expert_idx, which forward and grad have in common. `rows` is the tensor whose dtype and device the
// floating ones follow. Returns K.
inline SymInt check_finalize_terms(
    const ArgChecks& check,
    const Tensor& rows,
    const char* rows_arg,
    const SymInt& slots,
    const OptionalTensor& scales,
    const OptionalTensor& bias,
    const OptionalTensor& expert_idx) {
  SymInt top_k = 1;
  if (given(scales)) {
    check.rank(*scales, "scales", 2);
    check.floating(*scales, "scales");
    check.same_device(*scales, "scales", rows, rows_arg);
    top_k = scales->sym_size(1);
    check.at_least(top_k, "size of scales in dimension 1", 1);
    check.element_count(*scales, "scales", slots, "expanded_row_idx");
  }
  const SymInt tokens = slots / top_k;
  if (given(expert_idx)) {
    check.integer_beside(*expert_idx, "expert_idx", rows, rows_arg);
    check.shape(*expert_idx, "expert_idx", {tokens, top_k});
  }
  if (given(bias)) {
    check.present(expert_idx, "expert_idx", "bias");
    check.rank(*bias, "bias", 2);
    check.floating_like(*bias, "bias", rows, rows_arg);
    check.size(*bias, "bias", 1, rows.sym_size(-1));
  }
  return top_k;
}

inline Tensor finalize_routing_v2_output(
    const Tensor& expanded_x,
    const Tensor& expanded_row_idx,
    const OptionalTensor& x1,
    const OptionalTensor& x2,
    const OptionalTensor& bias,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    int64_t drop_pad_mode) {
  constexpr ArgChecks check("finalize_routing_v2");
  check.one_of(drop_pad_mode, "drop_pad_mode", {0, 1, 2, 3});
  const bool drop_pad = drop_pad_mode % 2 == 1;
  check.rank(expanded_x, "expanded_x", drop_pad ? 3 : 2);
  check.floating(expanded_x, "expanded_x");
  check.rank(expanded_row_idx, "expanded_row_idx", 1);
  check.integer_beside(expanded_row_idx, "expanded_row_idx", expanded_x, "expanded_x");
  const SymInt slots = expanded_row_idx.sym_numel();
  check.slot_count(slots, "expanded_row_idx");
  const SymInt top_k = check_finalize_terms(check, expanded_x, "expanded_x", slots, scales, bias, expert_idx);
  if (drop_pad) {
    check.padded_rows(expanded_x.sym_size(0), expanded_x.sym_size(1), "expanded_x, counted in rows,");
    if (given(bias)) {
      check.size(*bias, "bias", 0, expanded_x.sym_size(0));
    }
  } else {
    check.at_least(expanded_x.sym_size(0), "size of expanded_x in dimension 0", slots.min(1));
    check.at_most(expanded_x.sym_size(0), "size of expanded_x in dimension 0", slots, "the number of slots");
  }
  const SymSizes output = {slots / top_k, expanded_x.sym_size(-1)};
  if (given(x2)) {
    check.present(x1, "x1", "x2");
  }
  for (const auto& [skip, name] : {std::pair{&x1, "x1"}, std::pair{&x2, "x2"}}) {
    if (given(*skip)) {
      check.floating_like(**skip, name, expanded_x, "expanded_x");
      check.shape(**skip, name, output);
    }
  }
  return at::empty_symint(output, expanded_x.options());
}

struct FinalizeRoutingV2GradOptions {
  int64_t drop_pad_mode;
  SymInt active_num;
  SymInt expert_num;
  SymInt expert_capacity;

  bool drop_pad() const {
    return drop_pad_mode == 1;
  }
};

inline SymSizes finalize_grad_shape(
    const ArgChecks& check, const FinalizeRoutingV2GradOptions& options, const SymInt& slots, const SymInt& hidden) {
  check.one_of(options.drop_pad_mode, "drop_pad_mode", {0, 1});
  check.at_least(options.active_num, "active_num", 0);
  if (!options.drop_pad()) {
    return {options.active_num == 0 ? slots : options.active_num.min(slots), hidden};
  }
  check.at_least(options.expert_num, "expert_num", 0);
  check.at_least(options.expert_capacity, "expert_capacity", 0);
  check.padded_rows(options.expert_num, options.expert_capacity, "grad_expanded_x, counted in rows,");
  return {options.expert_num, options.expert_capacity, hidden};
}

inline std::tuple<Tensor, Tensor> finalize_routing_v2_grad_outputs(
    const Tensor& grad_y,
    const Tensor& expanded_row_idx,
    const OptionalTensor& expanded_x,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    const OptionalTensor& bias,
    const FinalizeRoutingV2GradOptions& options) {
  constexpr ArgChecks check("finalize_routing_v2_grad");
  check.rank(grad_y, "grad_y", 2);
  check.floating(grad_y, "grad_y");
  check.rank(expanded_row_idx, "expanded_row_idx", 1);
  check.integer_beside(expanded_row_idx, "expanded_row_idx", grad_y, "grad_y");
  const SymInt slots = expanded_row_idx.sym_numel();
  check.slot_count(slots, "expanded_row_idx");
  const SymInt top_k = check_finalize_terms(check, grad_y, "grad_y", slots, scales, bias, expert_idx);
  check.size(grad_y, "grad_y", 0, slots / top_k);
  const SymSizes expanded = finalize_grad_shape(check, options, slots, grad_y.sym_size(1));
  if (options.drop_pad() && given(bias)) {
    check.size(*bias, "bias", 0, options.expert_num);
  }
  if (given(scales)) {
    check.present(expanded_x, "expanded_x", "scales");
  }
  if (given(expanded_x)) {
    check.floating_like(*expanded_x, "expanded_x", grad_y, "grad_y");
    check.shape(*expanded_x, "expanded_x", expanded);
  }
  return {
      at::empty_symint(expanded, grad_y.options()), given(scales)
                                                        ? at::empty_symint(scales->sym_sizes(), scales->options())
                                                        : at::empty_symint({0}, grad_y.options())};
}

} // namespace moe
