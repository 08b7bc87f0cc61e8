// Schemas of finalize_routing_v2 and finalize_routing_v2_grad, and their shape functions (Meta kernels).
#include "finalize_routing_v2.h"

#include "../common/registration.h"

namespace moe {
namespace {

Tensor finalize_routing_v2_meta(
    const Tensor& expanded_x,
    const Tensor& expanded_row_idx,
    const OptionalTensor& x1,
    const OptionalTensor& x2,
    const OptionalTensor& bias,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    int64_t drop_pad_mode) {
  return finalize_routing_v2_output(expanded_x, expanded_row_idx, x1, x2, bias, scales, expert_idx, drop_pad_mode);
}

std::tuple<Tensor, Tensor> finalize_routing_v2_grad_meta(
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
  return finalize_routing_v2_grad_outputs(
      grad_y, expanded_row_idx, expanded_x, scales, expert_idx, bias,
      {drop_pad_mode, active_num, expert_num, expert_capacity});
}

} // namespace
} // namespace moe

MOE_SCHEMAS(m) {
  m.def(
      "finalize_routing_v2(Tensor expanded_x, Tensor expanded_row_idx, Tensor? x1=None, Tensor? x2=None,"
      " Tensor? bias=None, Tensor? scales=None, Tensor? expert_idx=None, *, int drop_pad_mode=0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "finalize_routing_v2_grad(Tensor grad_y, Tensor expanded_row_idx, Tensor? expanded_x=None,"
      " Tensor? scales=None, Tensor? expert_idx=None, Tensor? bias=None, *, int drop_pad_mode=0,"
      " SymInt active_num=0, SymInt expert_num=0, SymInt expert_capacity=0)"
      " -> (Tensor grad_expanded_x, Tensor grad_scales)",
      {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("finalize_routing_v2", TORCH_FN(moe::finalize_routing_v2_meta));
  m.impl("finalize_routing_v2_grad", TORCH_FN(moe::finalize_routing_v2_grad_meta));
}
