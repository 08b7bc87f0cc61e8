// token_unpermute and token_unpermute_grad on the CPU. Contract: ../token_unpermute.h.
#include "../token_unpermute.h"

#include "../../common/registration.h"
#include "../../cpu/move.h"
#include "../../cpu/slots.h"

namespace moe::cpu {
namespace {

int64_t choices(const OptionalTensor& probs) {
  return given(probs) ? probs->size(1) : 1;
}

Tensor checked_rows(const ArgChecks& check, const Tensor& sorted_indices, const Tensor& permuted_tokens) {
  return checked_index(check, sorted_indices, "sorted_indices", sorted_rows(sorted_indices, permuted_tokens));
}

// restore_shape is part of CANN's signature; without padded_mode it has no meaning there or here.
Tensor token_unpermute(
    const Tensor& permuted_tokens,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode,
    at::OptionalSymIntArrayRef /*restore_shape*/) {
  Tensor output = token_unpermute_output(permuted_tokens, sorted_indices, probs, padded_mode);
  constexpr ArgChecks check("token_unpermute");
  CombineArgs args;
  args.rows = permuted_tokens;
  args.row_of_slot = checked_rows(check, sorted_indices, permuted_tokens);
  args.top_k = choices(probs);
  args.weights = probs;
  args.skip_zero_weights = true;
  combine_rows(args, output);
  return output;
}

std::tuple<Tensor, Tensor> token_unpermute_grad(
    const Tensor& permuted_tokens,
    const Tensor& unpermuted_tokens_grad,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode,
    at::OptionalSymIntArrayRef /*restore_shape*/) {
  auto [rows_grad, probs_grad] =
      token_unpermute_grad_outputs(permuted_tokens, unpermuted_tokens_grad, sorted_indices, probs, padded_mode);
  constexpr ArgChecks check("token_unpermute_grad");
  ScatterArgs args;
  args.grad = unpermuted_tokens_grad;
  args.row_of_slot = checked_rows(check, sorted_indices, permuted_tokens);
  args.top_k = choices(probs);
  args.weights = probs;
  args.rows = permuted_tokens;
  scatter_rows(check, "sorted_indices", args, rows_grad, probs_grad);
  return {rows_grad, probs_grad};
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("token_unpermute", TORCH_FN(moe::cpu::token_unpermute));
  m.impl("token_unpermute_grad", TORCH_FN(moe::cpu::token_unpermute_grad));
}
