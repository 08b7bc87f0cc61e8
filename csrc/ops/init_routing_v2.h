// init_routing_v2 and init_routing_v2_grad: argument checks and outputs, the same on every device.
//
//   drop_pad_mode 0 (dropless): the rows of x sorted by expert id (stable), the first M = min(active_num, n) of them if
//   active_num > 0.
//
//   drop_pad_mode 1 (drop/pad): expanded_x (E, C, H); the first C slots of each expert, in slot order, the rest is
//   zero.
//
//   expanded_row_idx[t * K + k] = row of the slot, int32; -1 for a slot dropped in mode 1.
#pragma once

#include <ATen/ops/empty.h>

#include <limits>
#include <tuple>

#include "../common/checks.h"

namespace moe {

struct InitRoutingV2Options {
  SymInt active_num;
  SymInt expert_capacity;
  SymInt expert_num;
  int64_t drop_pad_mode;
  int64_t count_or_cumsum_flag;
  bool before_capacity_flag;

  bool drop_pad() const {
    return drop_pad_mode == 1;
  }
  bool wants_counts() const {
    return !drop_pad() && count_or_cumsum_flag > 0;
  }
  bool wants_before_capacity() const {
    return drop_pad() && before_capacity_flag;
  }
};

struct InitRoutingV2Outputs {
  Tensor expanded_x;
  Tensor expanded_row_idx;
  Tensor counts_or_cumsum;
  Tensor before_capacity;

  std::tuple<Tensor, Tensor, Tensor, Tensor> as_tuple() const {
    return {expanded_x, expanded_row_idx, counts_or_cumsum, before_capacity};
  }
};

inline void check_expert_capacity(const ArgChecks& check, const InitRoutingV2Options& options, const SymInt& tokens) {
  check.at_least(options.expert_num, "expert_num", 1);
  // Only a batch without tokens can have experts without room: 0 elsewhere is the default that somebody forgot to set.
  check.at_least(options.expert_capacity, "expert_capacity", tokens.min(1));
  check.at_most(options.expert_capacity, "expert_capacity", tokens, "the number of tokens in x");
}

inline InitRoutingV2Outputs init_routing_v2_outputs(
    const Tensor& x, const Tensor& expert_idx, const InitRoutingV2Options& options) {
  constexpr ArgChecks check("init_routing_v2");
  check.rank(x, "x", 2);
  check.floating(x, "x");
  check.rank_between(expert_idx, "expert_idx", 1, 2);
  check.integer_beside(expert_idx, "expert_idx", x, "x");
  check.size(expert_idx, "expert_idx", 0, x.sym_size(0));
  check.at_least(expert_idx.dim() == 2 ? expert_idx.sym_size(1) : SymInt(1), "size of expert_idx in dimension 1", 1);
  const SymInt slots = expert_idx.sym_numel();
  check.slot_count(slots, "expert_idx");
  check.one_of(options.drop_pad_mode, "drop_pad_mode", {0, 1});
  check.one_of(options.count_or_cumsum_flag, "expert_tokens_count_or_cumsum_flag", {0, 1, 2});
  check.at_least(options.active_num, "active_num", 0);
  check.at_least(options.expert_num, "expert_num", options.wants_counts() ? 1 : 0);
  check.at_most(options.expert_num, "expert_num", std::numeric_limits<int32_t>::max(), "the largest int32");

  SymSizes expanded;
  if (options.drop_pad()) {
    check_expert_capacity(check, options, x.sym_size(0));
    expanded = {options.expert_num, options.expert_capacity, x.sym_size(1)};
    check.padded_rows(options.expert_num, options.expert_capacity, "expanded_x, counted in rows,");
  } else {
    const bool all = options.active_num == 0;
    expanded = {all ? slots : options.active_num.min(slots), x.sym_size(1)};
  }
  const auto int_options = x.options().dtype(at::kInt);
  const auto per_expert = [&](bool wanted) {
    return at::empty_symint({wanted ? options.expert_num : SymInt(0)}, int_options);
  };
  return {
      at::empty_symint(expanded, x.options()), at::empty_symint({slots}, int_options),
      per_expert(options.wants_counts()), per_expert(options.wants_before_capacity())};
}

inline Tensor init_routing_v2_grad_output(
    const Tensor& grad_expanded_x,
    const Tensor& expanded_row_idx,
    const SymInt& top_k,
    int64_t drop_pad_mode,
    const SymInt& active_num) {
  constexpr ArgChecks check("init_routing_v2_grad");
  check.one_of(drop_pad_mode, "drop_pad_mode", {0, 1});
  check.rank(grad_expanded_x, "grad_expanded_x", drop_pad_mode == 1 ? 3 : 2);
  check.floating(grad_expanded_x, "grad_expanded_x");
  check.rank(expanded_row_idx, "expanded_row_idx", 1);
  check.integer_beside(expanded_row_idx, "expanded_row_idx", grad_expanded_x, "grad_expanded_x");
  check.at_least(top_k, "top_k", 1);
  check.at_least(active_num, "active_num", 0);
  const SymInt slots = expanded_row_idx.sym_numel();
  check.slot_count(slots, "expanded_row_idx");
  check.multiple_of(slots, "number of expanded_row_idx", top_k, "top_k");
  if (drop_pad_mode == 1) {
    check.padded_rows(grad_expanded_x.sym_size(0), grad_expanded_x.sym_size(1), "grad_expanded_x, counted in rows,");
  } else {
    check.size(grad_expanded_x, "grad_expanded_x", 0, active_num == 0 ? slots : active_num.min(slots));
  }
  return at::empty_symint({slots / top_k, grad_expanded_x.sym_size(-1)}, grad_expanded_x.options());
}

} // namespace moe
