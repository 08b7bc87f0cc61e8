// Schemas of token_unpermute and token_unpermute_grad, and their shape functions (Meta kernels).
#include "token_unpermute.h"

#include "../common/registration.h"

namespace moe {
namespace {

Tensor token_unpermute_meta(
    const Tensor& permuted_tokens,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode,
    at::OptionalSymIntArrayRef /*restore_shape*/) {
  return token_unpermute_output(permuted_tokens, sorted_indices, probs, padded_mode);
}

std::tuple<Tensor, Tensor> token_unpermute_grad_meta(
    const Tensor& permuted_tokens,
    const Tensor& unpermuted_tokens_grad,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode,
    at::OptionalSymIntArrayRef /*restore_shape*/) {
  return token_unpermute_grad_outputs(permuted_tokens, unpermuted_tokens_grad, sorted_indices, probs, padded_mode);
}

} // namespace
} // namespace moe

MOE_SCHEMAS(m) {
  m.def(
      "token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False,"
      " SymInt[]? restore_shape=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "token_unpermute_grad(Tensor permuted_tokens, Tensor unpermuted_tokens_grad, Tensor sorted_indices,"
      " Tensor? probs=None, bool padded_mode=False, SymInt[]? restore_shape=None)"
      " -> (Tensor permuted_tokens_grad, Tensor probs_grad)",
      {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("token_unpermute", TORCH_FN(moe::token_unpermute_meta));
  m.impl("token_unpermute_grad", TORCH_FN(moe::token_unpermute_grad_meta));
}
