// aclnnMoeTokenPermute and aclnnMoeTokenPermuteGrad (A2, A3, 950).
//
//   order         = stable argsort of indices;  sortedIndices = inverse of order, int32, n values, never truncated
//   permuteTokens = tokens[order[:M] / K],      M = min(v, n) if v > 0 else max(n + v, 0), v = numOutTokens
//   grad:  out[t] = sum over k of permutedOutputGrad[sortedIndices[t * K + k]]
//
// A2 and A3: generated entry points, K <= 512, n < 16777215. The grad is the kernel of MoeTokenUnpermute without probs:
// float32 sums, k ascending, indices >= M skipped, negative ones unchecked.
// 950: MoeInitRoutingV2 and MoeInitRoutingV2Grad (active), which see 2-D tokens only and skip negative indices.
// Unchecked everywhere: expert ids (any int sorts). int8 tokens (950 only) are not implemented here: refused.
#include <algorithm>

#include "routing.h"

using namespace standin;
using namespace standin::routing;

namespace {

constexpr int64_t kSortLimit = 16777215;

int64_t elements_from(const aclTensor& tensor, int64_t first_dim) {
  int64_t count = 1;
  for (int64_t i = first_dim; i < tensor.rank(); ++i) {
    count *= tensor.dim(i);
  }
  return count;
}

void plan_token_permute(
    Plan& plan,
    const aclTensor& tokens,
    const aclTensor& indices,
    int64_t num_out_tokens,
    const aclTensor& permuted,
    const aclTensor& sorted_indices) {
  if (permuted.numel() == 0 && sorted_indices.numel() == 0) { // generated entry points do not even tile
    plan.nothing_to_do();
    return;
  }
  plan.need(indices.rank() == 1 || indices.rank() == 2, kTiling, "indices must have 1 or 2 dimensions");
  plan.need(tokens.rank() >= 2, kTiling, "tokens must have at least 2 dimensions");
  plan.need(permuted.rank() >= 2, kTiling, "permuteTokensOut must have at least 2 dimensions");
  plan.need(tokens.dim(0) == indices.dim(0), kTiling, "tokens and indices must agree in dimension 0");
  need_elements(plan, kTiling, "tokens", tokens);
  need_elements(plan, kTiling, "indices", indices);
  const int64_t slots = indices.numel();
  const int64_t top_k = indices.rank() == 1 ? 1 : indices.dim(1);
  const int64_t row = elements_from(tokens, 1);
  const int64_t wanted = num_out_tokens > 0 ? num_out_tokens : slots + num_out_tokens;
  const int64_t kept = std::clamp<int64_t>(wanted, 0, slots);
  plan.need(top_k <= kMaxTopK, kTiling, "topK must be at most 512");
  plan.need(slots < kSortLimit, kTiling, "indices must have less than 16777215 elements");
  plan.need(permuted.dim(0) == kept, kTiling, "permuteTokensOut must have " + std::to_string(kept) + " rows");
  plan.need(elements_from(permuted, 1) == row, kTiling, "permuteTokensOut must have the row size of tokens");
  need_shape(plan, kTiling, "sortedIndicesOut", sorted_indices, {slots});

  plan.output(&permuted);
  plan.output(&sorted_indices);
  plan.kernel([tokens, indices, permuted, sorted_indices, top_k, row, kept] {
    const SortedSlots sorted = sort_slots(Ints(indices));
    for (int64_t place = 0; place < kept; ++place) {
      copy_row(tokens, sorted.order[place] / top_k, permuted, place, row);
    }
    const Ints positions(sorted_indices);
    for (int64_t slot = 0; slot < positions.size(); ++slot) {
      positions.set(slot, sorted.position[slot]);
    }
  });
}

void plan_token_permute_grad(
    Plan& plan, const aclTensor& grad, const aclTensor& sorted_indices, int64_t top_k, const aclTensor& out) {
  if (out.numel() == 0) {
    plan.nothing_to_do();
    return;
  }
  need_rank(plan, kTiling, "permutedOutputGrad", grad, 2);
  need_rank(plan, kTiling, "sortedIndices", sorted_indices, 1);
  need_elements(plan, kTiling, "permutedOutputGrad", grad);
  need_elements(plan, kTiling, "sortedIndices", sorted_indices);
  plan.need(top_k >= 1 && top_k <= kMaxTopK, kTiling, "numTopk must be from 1 to 512");
  plan.need(sorted_indices.dim(0) % top_k == 0, kTiling, "sortedIndices must have N * numTopk elements");
  need_shape(plan, kTiling, "out", out, {sorted_indices.dim(0) / top_k, grad.dim(1)});

  plan.output(&out);
  plan.kernel([grad, sorted_indices, top_k, out] {
    unpermute_rows("MoeTokenPermuteGrad", grad, sorted_indices, std::nullopt, top_k, out);
  });
}

} // namespace

STANDIN_API int aclnnMoeTokenPermuteGetWorkspaceSize(
    const aclTensor* tokens,
    const aclTensor* indices,
    int64_t numOutTokens,
    bool paddedMode,
    const aclTensor* permuteTokensOut,
    const aclTensor* sortedIndicesOut,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeTokenPermute", workspaceSize, executor,
      [&](Plan& plan) {
        plan.tensor(tokens, "tokens");
        plan.tensor(indices, "indices");
        plan.tensor(permuteTokensOut, "permuteTokensOut");
        plan.tensor(sortedIndicesOut, "sortedIndicesOut");
        need_no_padded_mode(plan, paddedMode);
        need_float(plan, kInvalid, "tokens", *tokens);
        plan.need(is_index(indices->dtype), kInvalid, "indices must be int32 or int64");
        need_dtype_of(plan, kInvalid, "permuteTokensOut", *permuteTokensOut, "tokens", *tokens);
        need_int32(plan, kInvalid, "sortedIndicesOut", *sortedIndicesOut);
        if (on_950()) {
          plan_init_routing_v2(
              plan, {*tokens, *indices, numOutTokens, 0, 0, 0, 0, false, *permuteTokensOut, *sortedIndicesOut, nullptr,
                     nullptr});
        } else {
          plan_token_permute(plan, *tokens, *indices, numOutTokens, *permuteTokensOut, *sortedIndicesOut);
        }
      },
      tokens, indices, numOutTokens, paddedMode, permuteTokensOut, sortedIndicesOut);
}
STANDIN_PHASE2(aclnnMoeTokenPermute)

STANDIN_API int aclnnMoeTokenPermuteGradGetWorkspaceSize(
    const aclTensor* permutedOutputGrad,
    const aclTensor* sortedIndices,
    int64_t numTopk,
    bool paddedMode,
    aclTensor* out,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeTokenPermuteGrad", workspaceSize, executor,
      [&](Plan& plan) {
        plan.tensor(permutedOutputGrad, "permutedOutputGrad");
        plan.tensor(sortedIndices, "sortedIndices");
        plan.tensor(out, "out");
        need_no_padded_mode(plan, paddedMode);
        need_float(plan, kInvalid, "permutedOutputGrad", *permutedOutputGrad);
        need_int32(plan, kInvalid, "sortedIndices", *sortedIndices);
        need_dtype_of(plan, kInvalid, "out", *out, "permutedOutputGrad", *permutedOutputGrad);
        if (on_950()) {
          plan.need(permutedOutputGrad->rank() > 0, kInvalid, "permutedOutputGrad must have dimensions");
          const int64_t active_num = permutedOutputGrad->dim(0);
          plan_init_routing_v2_grad(plan, {*permutedOutputGrad, *sortedIndices, numTopk, 0, active_num, *out});
        } else {
          plan_token_permute_grad(plan, *permutedOutputGrad, *sortedIndices, numTopk, *out);
        }
      },
      permutedOutputGrad, sortedIndices, numTopk, paddedMode, out);
}
STANDIN_PHASE2(aclnnMoeTokenPermuteGrad)
