// Schemas of init_routing_v2 and init_routing_v2_grad, and their shape functions (Meta kernels).
#include "init_routing_v2.h"

#include "../common/registration.h"

namespace moe {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> init_routing_v2_meta(
    const Tensor& x,
    const Tensor& expert_idx,
    SymInt active_num,
    SymInt expert_capacity,
    SymInt expert_num,
    int64_t drop_pad_mode,
    int64_t count_or_cumsum_flag,
    bool before_capacity_flag) {
  return init_routing_v2_outputs(
             x, expert_idx,
             {active_num, expert_capacity, expert_num, drop_pad_mode, count_or_cumsum_flag, before_capacity_flag})
      .as_tuple();
}

Tensor init_routing_v2_grad_meta(
    const Tensor& grad_expanded_x,
    const Tensor& expanded_row_idx,
    SymInt top_k,
    int64_t drop_pad_mode,
    SymInt active_num) {
  return init_routing_v2_grad_output(grad_expanded_x, expanded_row_idx, top_k, drop_pad_mode, active_num);
}

} // namespace
} // namespace moe

MOE_SCHEMAS(m) {
  m.def(
      "init_routing_v2(Tensor x, Tensor expert_idx, *, SymInt active_num=0, SymInt expert_capacity=0,"
      " SymInt expert_num=0, int drop_pad_mode=0, int expert_tokens_count_or_cumsum_flag=0,"
      " bool expert_tokens_before_capacity_flag=False) -> (Tensor expanded_x, Tensor expanded_row_idx,"
      " Tensor expert_tokens_count_or_cumsum, Tensor expert_tokens_before_capacity)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "init_routing_v2_grad(Tensor grad_expanded_x, Tensor expanded_row_idx, SymInt top_k, int drop_pad_mode=0,"
      " SymInt active_num=0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("init_routing_v2", TORCH_FN(moe::init_routing_v2_meta));
  m.impl("init_routing_v2_grad", TORCH_FN(moe::init_routing_v2_grad_meta));
}
