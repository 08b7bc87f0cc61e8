// init_routing_v2 and init_routing_v2_grad on the CPU. Contract: ../init_routing_v2.h.
#include "../init_routing_v2.h"

#include <vector>

#include "../../common/registration.h"
#include "../../cpu/move.h"
#include "../../cpu/slots.h"

namespace moe::cpu {
namespace {

void count_experts(const Tensor& ids, Tensor& counts) {
  counts.zero_();
  int32_t* count = counts.mutable_data_ptr<int32_t>();
  const int32_t* id = ids.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    ++count[id[i]];
  }
}

void running_totals(Tensor& counts) {
  int32_t* total = counts.mutable_data_ptr<int32_t>();
  for (int64_t e = 1; e < counts.numel(); ++e) {
    total[e] += total[e - 1];
  }
}

// First come, first served in slot order: row e * C + (slots of e seen so far), none once the expert is full.
void capacity_rows(const Tensor& ids, int64_t experts, int64_t capacity, int32_t* row_of_slot) {
  std::vector<int32_t> seen(experts, 0);
  const int32_t* id = ids.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int32_t place = seen[id[i]];
    const bool fits = place < capacity;
    row_of_slot[i] = fits ? static_cast<int32_t>(id[i] * capacity + place) : kNoRow;
    seen[id[i]] += fits ? 1 : 0;
  }
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
  InitRoutingV2Outputs out = init_routing_v2_outputs(x, expert_idx, options);
  constexpr ArgChecks check("init_routing_v2");
  const int64_t experts = expert_num.expect_int();
  const int64_t top_k = expert_idx.dim() == 2 ? expert_idx.size(1) : 1;
  int32_t* row_of_slot = out.expanded_row_idx.mutable_data_ptr<int32_t>();

  Tensor ids = expert_idx;
  if (experts > 0) {
    ids = checked_index(check, expert_idx, "expert_idx", {0, experts});
  } else {
    check_not_negative(check, expert_idx, "expert_idx");
  }
  if (options.wants_counts()) {
    count_experts(ids, out.counts_or_cumsum);
    if (count_or_cumsum_flag == 1) {
      running_totals(out.counts_or_cumsum);
    }
  }
  if (options.wants_before_capacity()) {
    count_experts(ids, out.before_capacity);
  }
  if (!options.drop_pad()) {
    stable_rows(ids, row_of_slot);
    copy_to_rows(x, row_of_slot, top_k, out.expanded_x, out.expanded_x.size(0));
    return out.as_tuple();
  }
  const int64_t rows = out.expanded_x.size(0) * out.expanded_x.size(1);
  capacity_rows(ids, experts, expert_capacity.expect_int(), row_of_slot);
  zero_unnamed_rows(slot_of_row(check, "expanded_row_idx", out.expanded_row_idx, rows), out.expanded_x);
  copy_to_rows(x, row_of_slot, top_k, out.expanded_x, rows);
  return out.as_tuple();
}

Tensor init_routing_v2_grad(
    const Tensor& grad_expanded_x,
    const Tensor& expanded_row_idx,
    SymInt top_k,
    int64_t drop_pad_mode,
    SymInt active_num) {
  Tensor grad = init_routing_v2_grad_output(grad_expanded_x, expanded_row_idx, top_k, drop_pad_mode, active_num);
  constexpr ArgChecks check("init_routing_v2_grad");
  CombineArgs args;
  args.rows = grad_expanded_x;
  args.row_of_slot = checked_index(
      check, expanded_row_idx, "expanded_row_idx",
      expanded_rows(expanded_row_idx, grad_expanded_x, drop_pad_mode == 1));
  args.top_k = top_k.expect_int();
  combine_rows(args, grad);
  return grad;
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("init_routing_v2", TORCH_FN(moe::cpu::init_routing_v2));
  m.impl("init_routing_v2_grad", TORCH_FN(moe::cpu::init_routing_v2_grad));
}
