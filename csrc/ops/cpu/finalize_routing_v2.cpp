// finalize_routing_v2 and finalize_routing_v2_grad on the CPU. Contract: ../finalize_routing_v2.h.
#include "../finalize_routing_v2.h"

#include "../../common/registration.h"
#include "../../cpu/move.h"
#include "../../cpu/slots.h"

namespace moe::cpu {
namespace {

int64_t choices(const OptionalTensor& scales) {
  return given(scales) ? scales->size(1) : 1;
}

OptionalTensor checked_experts(const ArgChecks& check, const OptionalTensor& expert_idx, const OptionalTensor& bias) {
  if (!given(bias)) {
    return std::nullopt;
  }
  return checked_index(check, *expert_idx, "expert_idx", {0, bias->size(0)});
}

Tensor finalize_routing_v2(
    const Tensor& expanded_x,
    const Tensor& expanded_row_idx,
    const OptionalTensor& x1,
    const OptionalTensor& x2,
    const OptionalTensor& bias,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    int64_t drop_pad_mode) {
  Tensor y = finalize_routing_v2_output(expanded_x, expanded_row_idx, x1, x2, bias, scales, expert_idx, drop_pad_mode);
  constexpr ArgChecks check("finalize_routing_v2");
  CombineArgs args;
  args.rows = expanded_x;
  args.row_of_slot = checked_index(
      check, expanded_row_idx, "expanded_row_idx", expanded_rows(expanded_row_idx, expanded_x, drop_pad_mode % 2 == 1));
  args.top_k = choices(scales);
  args.k_major = drop_pad_mode < 2;
  args.weights = scales;
  args.x1 = x1;
  args.x2 = x2;
  args.bias = bias;
  args.expert_idx = checked_experts(check, expert_idx, bias);
  combine_rows(args, y);
  return y;
}

std::tuple<Tensor, Tensor> finalize_routing_v2_grad(
    const Tensor& grad_y,
    const Tensor& expanded_row_idx,
    const OptionalTensor& expanded_x,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    const OptionalTensor& bias,
    int64_t drop_pad_mode,
    SymInt active_num,
    SymInt expert_num,
    SymInt expert_capacity) {
  auto [grad_expanded_x, grad_scales] = finalize_routing_v2_grad_outputs(
      grad_y, expanded_row_idx, expanded_x, scales, expert_idx, bias,
      {drop_pad_mode, active_num, expert_num, expert_capacity});
  constexpr ArgChecks check("finalize_routing_v2_grad");
  ScatterArgs args;
  args.grad = grad_y;
  args.row_of_slot = checked_index(
      check, expanded_row_idx, "expanded_row_idx",
      expanded_rows(expanded_row_idx, grad_expanded_x, drop_pad_mode == 1));
  args.top_k = choices(scales);
  args.weights = scales;
  args.rows = expanded_x;
  args.bias = bias;
  args.expert_idx = checked_experts(check, expert_idx, bias);
  scatter_rows(check, "expanded_row_idx", args, grad_expanded_x, grad_scales);
  return {grad_expanded_x, grad_scales};
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("finalize_routing_v2", TORCH_FN(moe::cpu::finalize_routing_v2));
  m.impl("finalize_routing_v2_grad", TORCH_FN(moe::cpu::finalize_routing_v2_grad));
}
