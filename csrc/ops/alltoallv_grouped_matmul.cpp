// Schemas of alltoallv_grouped_matmul and grouped_matmul_alltoallv, and their shape functions (Meta kernels). These see
// one rank: whether the ranks agree, and what the group is, the kernels find out.
#include "alltoallv_grouped_matmul.h"

#include "../common/registration.h"

namespace moe {
namespace {

std::tuple<Tensor, Tensor, Tensor> alltoallv_grouped_matmul_meta(
    const Tensor& gmm_x,
    const Tensor& gmm_weight,
    std::string_view,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    const OptionalTensor& mm_x,
    const OptionalTensor& mm_weight,
    bool trans_gmm_weight,
    bool trans_mm_weight,
    bool permute_out_flag) {
  const ExpertMatmulArgs args{gmm_x, gmm_weight, ep_world_size,    send_counts,    recv_counts,
                              mm_x,  mm_weight,  trans_gmm_weight, trans_mm_weight};
  check_expert_matmul(ArgChecks("alltoallv_grouped_matmul"), args);
  return {expert_matmul_output(args), shared_expert_output(args), permute_output(args, permute_out_flag)};
}

std::tuple<Tensor, Tensor> grouped_matmul_alltoallv_meta(
    const Tensor& gmm_x,
    const Tensor& gmm_weight,
    std::string_view,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    const OptionalTensor& mm_x,
    const OptionalTensor& mm_weight,
    bool trans_gmm_weight,
    bool trans_mm_weight) {
  const ExpertMatmulArgs args{gmm_x, gmm_weight, ep_world_size,    send_counts,    recv_counts,
                              mm_x,  mm_weight,  trans_gmm_weight, trans_mm_weight};
  check_expert_matmul(ArgChecks("grouped_matmul_alltoallv"), args);
  return {expert_matmul_output(args), shared_expert_output(args)};
}

Tensor exchange_expert_rows_meta(
    const Tensor& rows,
    std::string_view,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    bool) {
  check_exchange(ArgChecks("_exchange_expert_rows"), rows, ep_world_size, send_counts, recv_counts);
  return at::empty_symint({sum_of(recv_counts), rows.sym_size(1)}, rows.options());
}

} // namespace
} // namespace moe

MOE_SCHEMAS(m) {
  m.def(
      "alltoallv_grouped_matmul(Tensor gmm_x, Tensor gmm_weight, str group, SymInt ep_world_size,"
      " SymInt[] send_counts, SymInt[] recv_counts, *, Tensor? mm_x=None, Tensor? mm_weight=None,"
      " bool trans_gmm_weight=False, bool trans_mm_weight=False, bool permute_out_flag=False)"
      " -> (Tensor gmm_y, Tensor mm_y, Tensor permute_out)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "grouped_matmul_alltoallv(Tensor gmm_x, Tensor gmm_weight, str group, SymInt ep_world_size,"
      " SymInt[] send_counts, SymInt[] recv_counts, *, Tensor? mm_x=None, Tensor? mm_weight=None,"
      " bool trans_gmm_weight=False, bool trans_mm_weight=False) -> (Tensor y, Tensor mm_y)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_exchange_expert_rows(Tensor rows, str group, SymInt ep_world_size, SymInt[] send_counts,"
      " SymInt[] recv_counts, *, bool to_experts) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("alltoallv_grouped_matmul", TORCH_FN(moe::alltoallv_grouped_matmul_meta));
  m.impl("grouped_matmul_alltoallv", TORCH_FN(moe::grouped_matmul_alltoallv_meta));
  m.impl("_exchange_expert_rows", TORCH_FN(moe::exchange_expert_rows_meta));
}
