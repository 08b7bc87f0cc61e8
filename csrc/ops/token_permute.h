// token_permute and token_permute_grad: argument checks and outputs, the same on every device.
//
//   n = T * K slots, slot i = t * K + k. sorted_indices[i] is the row of slot i when the slots are sorted by expert id
//   (stable), int32, never truncated. permuted_tokens[sorted_indices[i]] = tokens[i / K] for rows < M,
//   M = number of rows kept (see rows_kept).
#pragma once

#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/checks.h"

namespace moe {

// None or 0 keeps all n rows, v > 0 keeps min(v, n), v < 0 keeps max(n + v, 0).
inline SymInt rows_kept(const SymInt& slots, const std::optional<SymInt>& num_out_tokens) {
  if (!num_out_tokens.has_value() || *num_out_tokens == 0) {
    return slots;
  }
  return *num_out_tokens > 0 ? num_out_tokens->min(slots) : (slots + *num_out_tokens).max(0);
}

inline std::tuple<Tensor, Tensor> token_permute_outputs(
    const Tensor& tokens, const Tensor& indices, const std::optional<SymInt>& num_out_tokens, bool padded_mode) {
  constexpr ArgChecks check("token_permute");
  check.is_false(padded_mode, "padded_mode");
  check.min_rank(tokens, "tokens", 2);
  check.floating(tokens, "tokens");
  check.rank_between(indices, "indices", 1, 2);
  check.integer_beside(indices, "indices", tokens, "tokens");
  check.size(indices, "indices", 0, tokens.sym_size(0));
  const SymInt top_k = indices.dim() == 2 ? indices.sym_size(1) : SymInt(1);
  check.at_least(top_k, "size of indices in dimension 1", 1);
  const SymInt slots = indices.sym_numel();
  check.slot_count(slots, "indices");
  return {
      at::empty_symint(with_rows(tokens, rows_kept(slots, num_out_tokens)), tokens.options()),
      at::empty_symint({slots}, tokens.options().dtype(at::kInt))};
}

inline Tensor token_permute_grad_output(
    const Tensor& permuted_output_grad, const Tensor& sorted_indices, const SymInt& num_topk, bool padded_mode) {
  constexpr ArgChecks check("token_permute_grad");
  check.is_false(padded_mode, "padded_mode");
  check.min_rank(permuted_output_grad, "permuted_output_grad", 2);
  check.floating(permuted_output_grad, "permuted_output_grad");
  check.rank(sorted_indices, "sorted_indices", 1);
  check.integer_beside(sorted_indices, "sorted_indices", permuted_output_grad, "permuted_output_grad");
  check.at_least(num_topk, "num_topk", 1);
  const SymInt slots = sorted_indices.sym_numel();
  check.slot_count(slots, "sorted_indices");
  check.multiple_of(slots, "number of sorted_indices", num_topk, "num_topk");
  return at::empty_symint(with_rows(permuted_output_grad, slots / num_topk), permuted_output_grad.options());
}

} // namespace moe
