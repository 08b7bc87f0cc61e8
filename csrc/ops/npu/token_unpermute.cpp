// token_unpermute and token_unpermute_grad on the NPU: aclnnMoeTokenUnpermute, aclnnMoeTokenUnpermuteGrad.
// Contract: ../token_unpermute.h.
#include "../token_unpermute.h"

#include <ATen/ops/clamp_min.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../../common/registration.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kUnpermute = "token_unpermute";
constexpr const char* kUnpermuteGrad = "token_unpermute_grad";

// torch_npu passes [1] for "no shape to restore"; the kernels do not read it.
const Ints kNoShape = {1};

void check_npu_unpermute(const ArgChecks& check, const Tensor& rows, const OptionalTensor& probs) {
  check_npu_float(check, rows, "permuted_tokens");
  check_npu_float(check, probs, "probs");
  if (given(probs) && !is_950(check.op())) {
    check_npu_limit(check, probs->size(1), "size of probs in dimension 1", kMaxTopK);
  }
}

// A2 and A3 skip rows past the end and slots of weight 0. Ascend 950 skips rows past the end and -1, but no other
// negative row, and multiplies by a weight of 0, which would let NaN through.
Tensor npu_row_map(const Tensor& sorted_indices, const OptionalTensor& probs, int64_t past_the_end) {
  const Tensor index = as_int32(sorted_indices);
  if (!is_950(kUnpermute)) {
    return skip_negative(index, past_the_end);
  }
  const Tensor skippable = at::clamp_min(index, -1);
  return given(probs) ? at::masked_fill(skippable, at::eq(probs->flatten(), 0), -1) : skippable;
}

Tensor token_unpermute(
    const Tensor& permuted_tokens,
    const Tensor& sorted_indices,
    const OptionalTensor& probs,
    bool padded_mode,
    at::OptionalSymIntArrayRef /*restore_shape*/) {
  Tensor output = token_unpermute_output(permuted_tokens, sorted_indices, probs, padded_mode);
  constexpr ArgChecks check(kUnpermute);
  check_npu_unpermute(check, permuted_tokens, probs);
  const IndexRange range = cpu::sorted_rows(sorted_indices, permuted_tokens);
  check_range(check, sorted_indices, "sorted_indices", range);
  if (permuted_tokens.numel() == 0 || output.numel() == 0) {
    return output.zero_();
  }
  const Tensor index = npu_row_map(sorted_indices, probs, range.high);
  launch<MoeTokenUnpermute>(kUnpermute, as_matrix(permuted_tokens), index, probs, false, kNoShape, as_matrix(output));
  return output;
}

// The kernel's view of the gradient: as many rows as slots. Releases differ in which of the two numbers they bound the
// rows by, and Ascend 950 wants them equal.
struct SquareGrad {
  int64_t tokens; // with some added where there are more rows than slots
  int64_t rows;

  SquareGrad(int64_t num_rows, int64_t num_tokens, int64_t top_k)
      : tokens(std::max(num_tokens, (num_rows + top_k - 1) / top_k)), rows(tokens * top_k) {}
};

// Without probs the rows are not read. Releases before 9.1 and Ascend 950 want a tensor of their shape all the same,
// for which the output serves: the autograd formula keeps no rows for it.
OptionalTensor rows_to_read(const Tensor& permuted_tokens, const Tensor& grad, bool with_probs) {
  if (with_probs) {
    return padded(as_matrix(permuted_tokens), 0, grad.size(0));
  }
  return is_950(kUnpermuteGrad) || !cann_at_least(9, 1) ? OptionalTensor(grad) : std::nullopt;
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
  constexpr ArgChecks check(kUnpermuteGrad);
  check_npu_unpermute(check, permuted_tokens, probs);
  const int64_t rows = permuted_tokens.size(0);
  const int64_t tokens = unpermuted_tokens_grad.size(0);
  const IndexRange range = cpu::sorted_rows(sorted_indices, permuted_tokens);
  check_range(check, sorted_indices, "sorted_indices", range);
  check_named_once(check, sorted_indices, "sorted_indices", rows);
  if (permuted_tokens.numel() == 0 || tokens == 0) {
    return {rows_grad.zero_(), probs_grad.zero_()};
  }
  const SquareGrad square(rows, tokens, sorted_indices.numel() / tokens);
  const Tensor row_map = as_int32(sorted_indices);
  const Tensor index = is_950(kUnpermuteGrad) ? row_map : skip_negative(row_map, square.rows);
  const bool is_square = square.rows == rows;
  // Zeros: the kernel leaves rows that no slot names as they are.
  const Tensor grad =
      is_square ? as_matrix(rows_grad).zero_() : at::zeros({square.rows, rows_grad[0].numel()}, rows_grad.options());
  // A tensor that is not written stands in for the gradient of absent probs: null is refused by some.
  const Tensor weights_grad =
      given(probs) ? at::empty({square.tokens, probs->size(1)}, probs->options()) : at::empty({}, rows_grad.options());
  launch<MoeTokenUnpermuteGrad>(
      kUnpermuteGrad, rows_to_read(permuted_tokens, grad, given(probs)),
      padded(as_matrix(unpermuted_tokens_grad), 0, square.tokens), padded(index, 0, square.rows, square.rows),
      padded(probs, 0, square.tokens), false, kNoShape, grad, weights_grad);
  if (!is_square) {
    as_matrix(rows_grad).copy_(grad.narrow(0, 0, rows));
  }
  if (given(probs)) {
    // What the kernels store for a slot that they skip is not documented: it is 0.
    probs_grad =
        weights_grad.narrow(0, 0, tokens).masked_fill(missing_slots(row_map, rows, range.high).view_as(probs_grad), 0);
  }
  return {rows_grad, probs_grad};
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("token_unpermute", TORCH_FN(moe::npu::token_unpermute));
  m.impl("token_unpermute_grad", TORCH_FN(moe::npu::token_unpermute_grad));
}
