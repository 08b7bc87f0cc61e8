// alltoallv_grouped_matmul and grouped_matmul_alltoallv on the CPU, over gloo. Contract: ../alltoallv_grouped_matmul.h.
#include "../alltoallv_grouped_matmul.h"

#include "../../comm/expert_rows.h"
#include "../../common/registration.h"
#include "../../common/switches.h"

namespace moe::cpu {
namespace {

// MOE_OPS_CHECK_COUNTS=0 turns it off.
bool compares_counts() {
  return !switched_off("MOE_OPS_CHECK_COUNTS");
}

std::tuple<Tensor, Tensor, Tensor> alltoallv_grouped_matmul(
    const Tensor& gmm_x,
    const Tensor& gmm_weight,
    std::string_view group,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    const OptionalTensor& mm_x,
    const OptionalTensor& mm_weight,
    bool trans_gmm_weight,
    bool trans_mm_weight,
    bool permute_out_flag) {
  constexpr ArgChecks check("alltoallv_grouped_matmul");
  const ExpertMatmulArgs args{gmm_x, gmm_weight, ep_world_size,    send_counts,    recv_counts,
                              mm_x,  mm_weight,  trans_gmm_weight, trans_mm_weight};
  check_expert_matmul(check, args);
  const auto counts = comm::make_counts(ep_world_size.expect_int(), send_counts, recv_counts);
  const auto ranks = comm::agreed_group(check, group, counts, gmm_x, gmm_x.size(1), compares_counts());
  return comm::alltoallv_grouped_matmul(check, ranks, counts, args, permute_out_flag);
}

std::tuple<Tensor, Tensor> grouped_matmul_alltoallv(
    const Tensor& gmm_x,
    const Tensor& gmm_weight,
    std::string_view group,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    const OptionalTensor& mm_x,
    const OptionalTensor& mm_weight,
    bool trans_gmm_weight,
    bool trans_mm_weight) {
  constexpr ArgChecks check("grouped_matmul_alltoallv");
  const ExpertMatmulArgs args{gmm_x, gmm_weight, ep_world_size,    send_counts,    recv_counts,
                              mm_x,  mm_weight,  trans_gmm_weight, trans_mm_weight};
  check_expert_matmul(check, args);
  const auto counts = comm::make_counts(ep_world_size.expect_int(), send_counts, recv_counts);
  const int64_t row_size = output_columns(args).expect_int();
  const auto ranks = comm::agreed_group(check, group, counts, gmm_x, row_size, compares_counts());
  return comm::grouped_matmul_alltoallv(check, ranks, counts, args);
}

Tensor exchange_expert_rows(
    const Tensor& rows,
    std::string_view group,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    bool to_experts) {
  constexpr ArgChecks check("_exchange_expert_rows");
  check_exchange(check, rows, ep_world_size, send_counts, recv_counts);
  const auto counts = comm::make_counts(ep_world_size.expect_int(), send_counts, recv_counts);
  const auto ranks = comm::agreed_group(check, group, counts, rows, rows.size(1), compares_counts());
  return comm::exchange_expert_rows(check, ranks, counts, rows, to_experts);
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("alltoallv_grouped_matmul", TORCH_FN(moe::cpu::alltoallv_grouped_matmul));
  m.impl("grouped_matmul_alltoallv", TORCH_FN(moe::cpu::grouped_matmul_alltoallv));
  m.impl("_exchange_expert_rows", TORCH_FN(moe::cpu::exchange_expert_rows));
}
