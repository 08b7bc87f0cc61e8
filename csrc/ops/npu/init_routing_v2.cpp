// init_routing_v2 and init_routing_v2_grad on the NPU: aclnnMoeInitRoutingV2, aclnnMoeInitRoutingV2Grad.
// Contract: ../init_routing_v2.h.
#include "../init_routing_v2.h"

#include <ATen/ops/zeros.h>

#include "../../common/registration.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kInit = "init_routing_v2";
constexpr const char* kInitGrad = "init_routing_v2_grad";

OptionalTensor if_any(const Tensor& output) {
  return output.numel() > 0 ? OptionalTensor(output) : std::nullopt;
}

// Where the kernel counts or places by expert, an id from outside would write outside its buffers.
Tensor npu_expert_idx(const ArgChecks& check, const Tensor& expert_idx, int64_t experts) {
  const Tensor ids = expert_idx.dim() == 2 ? expert_idx : expert_idx.unsqueeze(1);
  if (experts > 0) {
    check_range(check, ids, "expert_idx", {0, experts});
    return clamped(ids, {0, experts});
  }
  check_not_negative(check, ids, "expert_idx");
  check_range(check, ids, "expert_idx", {0, kSortLimit});
  return as_int32(ids);
}

InitRoutingV2Outputs zeroed(InitRoutingV2Outputs outputs) {
  for (Tensor* output : {&outputs.expanded_x, &outputs.counts_or_cumsum, &outputs.before_capacity}) {
    output->zero_();
  }
  return outputs;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> init_routing_v2(
    const Tensor& x,
    const Tensor& expert_idx,
    SymInt active_num,
    SymInt expert_capacity,
    SymInt expert_num,
    int64_t drop_pad_mode,
    int64_t count_or_cumsum_flag,
    bool before_capacity_flag) {
  const InitRoutingV2Options options{active_num,    expert_capacity,      expert_num,
                                     drop_pad_mode, count_or_cumsum_flag, before_capacity_flag};
  const InitRoutingV2Outputs outputs = init_routing_v2_outputs(x, expert_idx, options);
  constexpr ArgChecks check(kInit);
  check_npu_float(check, x, "x");
  check_npu_limit(check, expert_idx.numel(), "number of expert_idx", kMaxSlots);
  check_npu_limit(check, expert_num.expect_int(), "expert_num", kSortLimit);
  const Tensor ids = npu_expert_idx(check, expert_idx, expert_num.expect_int());
  if (ids.numel() == 0) {
    return zeroed(outputs).as_tuple();
  }
  // Rows without elements: the row map and the counts are still asked for, so one column stands in.
  const bool no_columns = x.size(1) == 0;
  const Tensor rows = no_columns ? at::zeros({x.size(0), 1}, x.options()) : x;
  at::DimVector expanded_sizes(outputs.expanded_x.sizes());
  expanded_sizes.back() = rows.size(1);
  const Tensor expanded = no_columns ? at::empty(expanded_sizes, x.options()) : outputs.expanded_x;
  launch<MoeInitRoutingV2>(
      kInit, rows, ids, active_num.expect_int(), expert_capacity.expect_int(), expert_num.expect_int(), drop_pad_mode,
      count_or_cumsum_flag, before_capacity_flag, expanded, outputs.expanded_row_idx, if_any(outputs.counts_or_cumsum),
      if_any(outputs.before_capacity));
  return outputs.as_tuple();
}

Tensor init_routing_v2_grad(
    const Tensor& grad_expanded_x,
    const Tensor& expanded_row_idx,
    SymInt top_k,
    int64_t drop_pad_mode,
    SymInt active_num) {
  Tensor grad = init_routing_v2_grad_output(grad_expanded_x, expanded_row_idx, top_k, drop_pad_mode, active_num);
  constexpr ArgChecks check(kInitGrad);
  check_npu_float(check, grad_expanded_x, "grad_expanded_x");
  const bool drop_pad = drop_pad_mode == 1;
  const IndexRange range = cpu::expanded_rows(expanded_row_idx, grad_expanded_x, drop_pad);
  check_range(check, expanded_row_idx, "expanded_row_idx", range);
  if (grad_expanded_x.numel() == 0 || expanded_row_idx.numel() == 0) {
    return grad.zero_();
  }
  const Tensor index = clamped(expanded_row_idx, range);
  // Rows from active_num on are skipped; without it every row is there. The kernel wants exactly the number of rows.
  const int64_t active = drop_pad || active_num == 0 ? 0 : grad_expanded_x.size(0);
  launch<MoeInitRoutingV2Grad>(kInitGrad, grad_expanded_x, index, top_k.expect_int(), drop_pad_mode, active, grad);
  return grad;
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("init_routing_v2", TORCH_FN(moe::npu::init_routing_v2));
  m.impl("init_routing_v2_grad", TORCH_FN(moe::npu::init_routing_v2_grad));
}
