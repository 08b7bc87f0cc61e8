// alltoallv_grouped_matmul and grouped_matmul_alltoallv: argument checks and outputs, the same on every device.
//
//   ep ranks with e experts each. Counts are indexed [peer rank * e + local expert].
//   alltoallv_grouped_matmul: gmm_x is sorted by global expert (rank-major); its rows travel to the ranks of their
//     experts, are put in the order of the experts there (expert-major: by local expert, then source rank), and
//     multiplied with their weights.
//   grouped_matmul_alltoallv: the way back. gmm_x is expert-major, its products travel back and end rank-major.
//   Shared expert, beside either: mm_y = mm_x @ mm_weight, without communication.
//   _exchange_expert_rows: the movement of rows alone, to the experts or back; for gradients.
#pragma once

#include <ATen/ops/empty.h>

#include <limits>
#include <tuple>

#include "../common/checks.h"

namespace moe {

// The arguments of both operators, as the schema has them.
struct ExpertMatmulArgs {
  const Tensor& gmm_x;
  const Tensor& gmm_weight;
  const SymInt& ep_world_size;
  SymIntArrayRef send_counts;
  SymIntArrayRef recv_counts;
  const OptionalTensor& mm_x;
  const OptionalTensor& mm_weight;
  bool trans_gmm_weight;
  bool trans_mm_weight;
};

inline SymInt sum_of(SymIntArrayRef counts) {
  SymInt sum = 0;
  for (const SymInt& count : counts) {
    sum += count;
  }
  return sum;
}

// `experts` per rank; the rows of `x` are those that this rank sends.
inline void check_counts(
    const ArgChecks& check,
    const Tensor& x,
    const char* x_arg,
    const SymInt& ep_world_size,
    const SymInt& experts,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts) {
  check.at_least(ep_world_size, "ep_world_size", 1);
  // So that its product with the number of experts cannot overflow.
  check.at_most(ep_world_size, "ep_world_size", std::numeric_limits<int32_t>::max(), "the largest int32");
  check.counts(send_counts, "send_counts", ep_world_size * experts);
  check.counts(recv_counts, "recv_counts", ep_world_size * experts);
  check.total(sum_of(send_counts), "send_counts", x.sym_size(0), x_arg);
}

inline void check_shared_expert(const ArgChecks& check, const ExpertMatmulArgs& args) {
  if (!given(args.mm_x) && !given(args.mm_weight)) {
    return;
  }
  check.present(args.mm_x, "mm_x", "mm_weight");
  check.present(args.mm_weight, "mm_weight", "mm_x");
  check.rank(*args.mm_x, "mm_x", 2);
  check.floating_like(*args.mm_x, "mm_x", args.gmm_x, "gmm_x");
  check.rank(*args.mm_weight, "mm_weight", 2);
  check.floating_like(*args.mm_weight, "mm_weight", args.gmm_x, "gmm_x");
  check.size(*args.mm_weight, "mm_weight", args.trans_mm_weight ? 1 : 0, args.mm_x->sym_size(1));
}

inline void check_expert_matmul(const ArgChecks& check, const ExpertMatmulArgs& args) {
  check.rank(args.gmm_x, "gmm_x", 2);
  check.floating(args.gmm_x, "gmm_x");
  check.rank(args.gmm_weight, "gmm_weight", 3);
  check.floating_like(args.gmm_weight, "gmm_weight", args.gmm_x, "gmm_x");
  check.size(args.gmm_weight, "gmm_weight", args.trans_gmm_weight ? 2 : 1, args.gmm_x.sym_size(1));
  check_shared_expert(check, args);
  check_counts(
      check, args.gmm_x, "gmm_x", args.ep_world_size, args.gmm_weight.sym_size(0), args.send_counts, args.recv_counts);
}

// N.
inline SymInt output_columns(const ExpertMatmulArgs& args) {
  return args.gmm_weight.sym_size(args.trans_gmm_weight ? 1 : 2);
}

// (rows received, N), in whichever order.
inline Tensor expert_matmul_output(const ExpertMatmulArgs& args) {
  return at::empty_symint({sum_of(args.recv_counts), output_columns(args)}, args.gmm_x.options());
}

// What an optional output is that was not asked for.
inline Tensor no_output(const Tensor& like) {
  return at::empty({0}, like.options());
}

inline Tensor shared_expert_output(const ExpertMatmulArgs& args) {
  if (!given(args.mm_x)) {
    return no_output(args.gmm_x);
  }
  const SymInt columns = args.mm_weight->sym_size(args.trans_mm_weight ? 0 : 1);
  return at::empty_symint({args.mm_x->sym_size(0), columns}, args.gmm_x.options());
}

inline Tensor permute_output(const ExpertMatmulArgs& args, bool permute_out_flag) {
  return permute_out_flag ? at::empty_symint({sum_of(args.recv_counts), args.gmm_x.sym_size(1)}, args.gmm_x.options())
                          : no_output(args.gmm_x);
}

// The experts per rank follow from the counts.
inline void check_exchange(
    const ArgChecks& check,
    const Tensor& rows,
    const SymInt& ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts) {
  check.rank(rows, "rows", 2);
  check.floating(rows, "rows");
  check.at_least(ep_world_size, "ep_world_size", 1);
  const SymInt counts = static_cast<int64_t>(send_counts.size());
  check.multiple_of(counts, "number of send_counts", ep_world_size, "ep_world_size");
  check_counts(check, rows, "rows", ep_world_size, counts / ep_world_size, send_counts, recv_counts);
}

} // namespace moe
