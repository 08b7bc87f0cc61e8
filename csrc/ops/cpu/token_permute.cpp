// token_permute and token_permute_grad on the CPU. Contract: ../token_permute.h.
#include "../token_permute.h"

#include "../../common/registration.h"
#include "../../cpu/move.h"
#include "../../cpu/slots.h"

namespace moe::cpu {
namespace {

std::tuple<Tensor, Tensor> token_permute(
    const Tensor& tokens, const Tensor& indices, std::optional<SymInt> num_out_tokens, bool padded_mode) {
  auto [permuted, sorted_indices] = token_permute_outputs(tokens, indices, num_out_tokens, padded_mode);
  int32_t* row_of_slot = sorted_indices.mutable_data_ptr<int32_t>();
  stable_rows(indices, row_of_slot);
  const int64_t top_k = indices.dim() == 2 ? indices.size(1) : 1;
  copy_to_rows(tokens, row_of_slot, top_k, permuted, permuted.size(0));
  return {permuted, sorted_indices};
}

Tensor token_permute_grad(
    const Tensor& permuted_output_grad, const Tensor& sorted_indices, SymInt num_topk, bool padded_mode) {
  Tensor grad = token_permute_grad_output(permuted_output_grad, sorted_indices, num_topk, padded_mode);
  constexpr ArgChecks check("token_permute_grad");
  CombineArgs args;
  args.rows = permuted_output_grad;
  args.row_of_slot =
      checked_index(check, sorted_indices, "sorted_indices", sorted_rows(sorted_indices, permuted_output_grad));
  args.top_k = num_topk.expect_int();
  combine_rows(args, grad);
  return grad;
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("token_permute", TORCH_FN(moe::cpu::token_permute));
  m.impl("token_permute_grad", TORCH_FN(moe::cpu::token_permute_grad));
}
