// token_unpermute and token_unpermute_grad: argument checks and outputs, the same on every device.
//
//   output[t] = sum over k of probs[t, k] * permuted_tokens[sorted_indices[t * K + k]], K = 1 without probs. A row of
//   -1 or past the rows that are there (cut off by num_out_tokens) contributes nothing; so does a slot whose prob is
//   exactly 0. permuted_tokens_grad[row] = probs * output_grad[t]; probs_grad[t, k] = <row, output_grad[t]>.
#pragma once

#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/checks.h"

namespace moe {

// The number of tokens T.
inline SymInt check_unpermute_inputs(
    const ArgChecks& check,
    const Tensor& permuted_tokens,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode) {
  check.is_false(padded_mode, "padded_mode");
  check.min_rank(permuted_tokens, "permuted_tokens", 2);
  check.floating(permuted_tokens, "permuted_tokens");
  check.rank(sorted_indices, "sorted_indices", 1);
  check.integer_beside(sorted_indices, "sorted_indices", permuted_tokens, "permuted_tokens");
  const SymInt slots = sorted_indices.sym_numel();
  check.slot_count(slots, "sorted_indices");
  if (!given(probs)) {
    return slots;
  }
  check.rank(*probs, "probs", 2);
  check.floating(*probs, "probs");
  check.same_device(*probs, "probs", permuted_tokens, "permuted_tokens");
  check.at_least(probs->sym_size(1), "size of probs in dimension 1", 1);
  check.element_count(*probs, "probs", slots, "sorted_indices");
  return probs->sym_size(0);
}

inline Tensor token_unpermute_output(
    const Tensor& permuted_tokens, const Tensor& sorted_indices, const OptionalTensor& probs, bool padded_mode) {
  constexpr ArgChecks check("token_unpermute");
  const SymInt tokens = check_unpermute_inputs(check, permuted_tokens, sorted_indices, probs, padded_mode);
  return at::empty_symint(with_rows(permuted_tokens, tokens), permuted_tokens.options());
}

inline std::tuple<Tensor, Tensor> token_unpermute_grad_outputs(
    const Tensor& permuted_tokens,
    const Tensor& unpermuted_tokens_grad,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode) {
  constexpr ArgChecks check("token_unpermute_grad");
  const SymInt tokens = check_unpermute_inputs(check, permuted_tokens, sorted_indices, probs, padded_mode);
  check.floating_like(unpermuted_tokens_grad, "unpermuted_tokens_grad", permuted_tokens, "permuted_tokens");
  check.shape(unpermuted_tokens_grad, "unpermuted_tokens_grad", with_rows(permuted_tokens, tokens));
  return {
      at::empty_symint(permuted_tokens.sym_sizes(), permuted_tokens.options()),
      given(probs) ? at::empty_symint(probs->sym_sizes(), probs->options())
                   : at::empty_symint({0}, permuted_tokens.options())};
}

} // namespace moe
