// Schemas of token_permute and token_permute_grad, and their shape functions (Meta kernels).
#include "token_permute.h"

#include "../common/registration.h"

namespace moe {
namespace {

std::tuple<Tensor, Tensor> token_permute_meta(
    const Tensor& tokens, const Tensor& indices, std::optional<SymInt> num_out_tokens, bool padded_mode) {
  return token_permute_outputs(tokens, indices, num_out_tokens, padded_mode);
}

Tensor token_permute_grad_meta(
    const Tensor& permuted_output_grad, const Tensor& sorted_indices, SymInt num_topk, bool padded_mode) {
  return token_permute_grad_output(permuted_output_grad, sorted_indices, num_topk, padded_mode);
}

} // namespace
} // namespace moe

MOE_SCHEMAS(m) {
  m.def(
      "token_permute(Tensor tokens, Tensor indices, SymInt? num_out_tokens=None, bool padded_mode=False)"
      " -> (Tensor permuted_tokens, Tensor sorted_indices)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "token_permute_grad(Tensor permuted_output_grad, Tensor sorted_indices, SymInt num_topk,"
      " bool padded_mode=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("token_permute", TORCH_FN(moe::token_permute_meta));
  m.impl("token_permute_grad", TORCH_FN(moe::token_permute_grad_meta));
}
