// token_permute and token_permute_grad on the NPU: aclnnMoeTokenPermute, aclnnMoeTokenPermuteGrad.
// Contract: ../token_permute.h.
#include "../token_permute.h"

#include <ATen/ops/zeros.h>

#include "../../common/registration.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kPermute = "token_permute";
constexpr const char* kPermuteGrad = "token_permute_grad";

// Sorts the slots of `indices`; `tokens` is (T, H) with T, H > 0. numOutTokens 0 would mean "all" to the kernel, so at
// least one row is asked for.
void launch_permute(const Tensor& tokens, const Tensor& indices, const Tensor& permuted, const Tensor& sorted_indices) {
  launch<MoeTokenPermute>(kPermute, tokens, indices, permuted.size(0), false, permuted, sorted_indices);
}

std::tuple<Tensor, Tensor> token_permute(
    const Tensor& tokens, const Tensor& indices, std::optional<SymInt> num_out_tokens, bool padded_mode) {
  auto [permuted, sorted_indices] = token_permute_outputs(tokens, indices, num_out_tokens, padded_mode);
  constexpr ArgChecks check(kPermute);
  check_npu_float(check, tokens, "tokens");
  check_npu_limit(check, indices.numel(), "number of indices", kMaxSlots);
  if (indices.dim() == 2 && !is_950(kPermute)) {
    check_npu_limit(check, indices.size(1), "size of indices in dimension 1", kMaxTopK);
  }
  check_range(check, indices, "indices", {1 - kSortLimit, kSortLimit});
  if (indices.numel() == 0) {
    return {permuted, sorted_indices};
  }
  if (permuted.numel() == 0) {
    // No row is kept, or rows have no elements: the order is still asked for.
    const Tensor token = at::zeros({tokens.size(0), 1}, tokens.options());
    launch_permute(token, indices, at::empty({1, 1}, tokens.options()), sorted_indices);
  } else {
    launch_permute(as_matrix(tokens), indices, as_matrix(permuted), sorted_indices);
  }
  return {permuted, sorted_indices};
}

Tensor token_permute_grad(
    const Tensor& permuted_output_grad, const Tensor& sorted_indices, SymInt num_topk, bool padded_mode) {
  Tensor grad = token_permute_grad_output(permuted_output_grad, sorted_indices, num_topk, padded_mode);
  constexpr ArgChecks check(kPermuteGrad);
  check_npu_float(check, permuted_output_grad, "permuted_output_grad");
  const int64_t top_k = num_topk.expect_int();
  if (!is_950(kPermuteGrad)) {
    check_npu_limit(check, top_k, "num_topk", kMaxTopK);
  }
  const IndexRange range = cpu::sorted_rows(sorted_indices, permuted_output_grad);
  check_range(check, sorted_indices, "sorted_indices", range);
  if (permuted_output_grad.numel() == 0 || sorted_indices.numel() == 0) {
    return grad.zero_();
  }
  Tensor index = as_int32(sorted_indices);
  if (!is_950(kPermuteGrad)) {
    index = skip_negative(index, range.high);
  }
  launch<MoeTokenPermuteGrad>(kPermuteGrad, as_matrix(permuted_output_grad), index, top_k, false, as_matrix(grad));
  return grad;
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("token_permute", TORCH_FN(moe::npu::token_permute));
  m.impl("token_permute_grad", TORCH_FN(moe::npu::token_permute_grad));
}
