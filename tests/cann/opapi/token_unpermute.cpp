// aclnnMoeTokenUnpermute and aclnnMoeTokenUnpermuteGrad (A2, A3, 950).
//
//   out[t] = sum over k of probs[t, k] * permutedTokens[sortedIndices[t * K + k]]       (no probs: K = 1, weight 1)
//   grad:  permutedTokensGrad[r] = probs[t, k] * unpermutedTokensGrad[t],  probsGrad[t, k] = dot(permutedTokens[r],
//   ...)
//
// A2 and A3: generated entry points, K <= 512. Float32 sums in k order. Forward: indices >= rows and slots of
// probability 0 are skipped, negative indices are unchecked. Grad: slots with an index beyond the bound are skipped;
// the bound is the number of slots from CANN 9.1.0 on, rows of permutedTokens before, so that truncated tokens run past
// their buffers on 9.1.0. Before 9.1.0 permutedTokens is required; later only with probs. probsGrad of a skipped slot
// stays unwritten, or becomes 0 with CANN_STANDIN_UNSETTLED.
// 950: MoeFinalizeRoutingV2 mode 2 and MoeFinalizeRoutingV2Grad mode 0. -1 and indices >= rows are skipped, probability
// 0 is not; permutedTokens is always required. Everywhere: rows of permutedTokensGrad that no slot names are not
// written; restoreShape is not used.
#include "routing.h"

using namespace standin;
using namespace standin::routing;

namespace standin::routing {

void unpermute_rows(
    const char* kernel,
    const aclTensor& rows,
    const aclTensor& indices,
    const std::optional<aclTensor>& probs,
    int64_t top_k,
    const aclTensor& out) {
  const int64_t hidden = out.dim(-1);
  const Floats from(rows);
  const Floats to(out);
  const Ints index(indices);
  const std::optional<Floats> weight = view_of<Floats>(probs);
  std::vector<float> sum(hidden);
  for (int64_t token = 0; token < out.dim(0); ++token) {
    sum.assign(hidden, 0.0f);
    for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
      const float scale = weight ? weight->get(slot) : 1.0f;
      if (index.get(slot) >= rows.dim(0) || scale == 0.0f) {
        continue;
      }
      const int64_t row = unchecked_index(kernel, "sortedIndices", slot, index.get(slot), rows.dim(0));
      for (int64_t h = 0; h < hidden; ++h) {
        sum[h] += scale * from.get(row * hidden + h);
      }
    }
    for (int64_t h = 0; h < hidden; ++h) {
      to.set(token * hidden + h, sum[h]);
    }
  }
}

} // namespace standin::routing

namespace {

void plan_token_unpermute(
    Plan& plan,
    const aclTensor& permuted,
    const aclTensor& sorted_indices,
    const aclTensor* probs,
    const aclTensor& out) {
  if (out.numel() == 0) { // generated entry points do not even tile
    plan.nothing_to_do();
    return;
  }
  need_rank(plan, kTiling, "permutedTokens", permuted, 2);
  need_rank(plan, kTiling, "sortedIndices", sorted_indices, 1);
  need_elements(plan, kTiling, "permutedTokens", permuted);
  need_elements(plan, kTiling, "sortedIndices", sorted_indices);
  const int64_t slots = sorted_indices.dim(0);
  int64_t top_k = 1;
  if (probs != nullptr) {
    need_rank(plan, kTiling, "probs", *probs, 2);
    plan.need(probs->numel() == slots, kTiling, "probs must have as many elements as sortedIndices");
    top_k = probs->dim(1);
    plan.need(top_k <= kMaxTopK, kTiling, "topK must be at most 512");
  }
  need_shape(plan, kTiling, "out", out, {slots / top_k, permuted.dim(1)});

  plan.output(&out);
  plan.kernel([permuted, sorted_indices, probs = copy_of(probs), top_k, out] {
    unpermute_rows("MoeTokenUnpermute", permuted, sorted_indices, probs, top_k, out);
  });
}

struct UnpermuteGrad {
  std::optional<aclTensor> permuted;
  aclTensor grad;
  aclTensor sorted_indices;
  std::optional<aclTensor> probs;
  aclTensor permuted_grad;
  aclTensor probs_grad;
  int64_t top_k;
  int64_t bound;
};

void unpermute_grad(const UnpermuteGrad& op) {
  const int64_t hidden = op.grad.dim(1);
  const int64_t out_rows = op.permuted_grad.dim(0);
  const Floats grad(op.grad);
  const Ints index(op.sorted_indices);
  const Floats permuted_grad(op.permuted_grad);
  const std::optional<Floats> probs = view_of<Floats>(op.probs);
  const std::optional<Floats> permuted = op.probs ? view_of<Floats>(op.permuted) : std::nullopt;
  const std::optional<Floats> probs_grad = op.probs ? std::optional<Floats>(Floats(op.probs_grad)) : std::nullopt;
  ScatterOrder order(out_rows);
  for (int64_t slot = 0; slot < index.size(); ++slot) {
    if (index.get(slot) >= op.bound) {
      if (probs && unsettled()) {
        probs_grad->set(slot, 0.0f);
      }
      continue;
    }
    const int64_t row = unchecked_index("MoeTokenUnpermuteGrad", "permutedTokensGrad", slot, index.get(slot), out_rows);
    const int64_t token = slot / op.top_k;
    if (order.may_write(row)) {
      const float scale = probs ? probs->get(slot) : 1.0f;
      for (int64_t h = 0; h < hidden; ++h) {
        permuted_grad.set(row * hidden + h, scale * grad.get(token * hidden + h));
      }
    }
    if (probs) {
      unchecked_index("MoeTokenUnpermuteGrad", "permutedTokens", slot, row, op.permuted->dim(0));
      float sum = 0.0f;
      for (int64_t h = 0; h < hidden; ++h) {
        sum += permuted->get(row * hidden + h) * grad.get(token * hidden + h);
      }
      probs_grad->set(slot, sum);
    }
  }
}

void plan_token_unpermute_grad(
    Plan& plan,
    const aclTensor* permuted,
    const aclTensor& grad,
    const aclTensor& sorted_indices,
    const aclTensor* probs,
    const aclTensor& permuted_grad,
    const aclTensor& probs_grad) {
  need_rank(plan, kTiling, "unpermutedTokensGrad", grad, 2);
  need_rank(plan, kTiling, "sortedIndices", sorted_indices, 1);
  need_elements(plan, kTiling, "unpermutedTokensGrad", grad);
  need_elements(plan, kTiling, "sortedIndices", sorted_indices);
  const int64_t tokens = grad.dim(0);
  const int64_t hidden = grad.dim(1);
  int64_t top_k = 1;
  if (probs != nullptr) {
    plan.need(permuted != nullptr, kTiling, "permutedTokens must be given with probs");
    need_rank(plan, kTiling, "probs", *probs, 2);
    top_k = probs->dim(1);
    plan.need(top_k >= 1 && top_k <= kMaxTopK, kTiling, "topK must be from 1 to 512");
    need_shape(plan, kTiling, "probs", *probs, {tokens, top_k});
    need_shape(plan, kTiling, "probsGradOut", probs_grad, probs->dims);
  }
  plan.need(sorted_indices.dim(0) == tokens * top_k, kTiling, "sortedIndices must have N * topK elements");
  if (permuted != nullptr) {
    need_rank(plan, kTiling, "permutedTokens", *permuted, 2);
    need_elements(plan, kTiling, "permutedTokens", *permuted);
    plan.need(permuted->dim(1) == hidden, kTiling, "permutedTokens must have the row size of unpermutedTokensGrad");
  }
  need_rank(plan, kTiling, "permutedTokensGradOut", permuted_grad, 2);
  need_elements(plan, kTiling, "permutedTokensGradOut", permuted_grad);
  plan.need(permuted_grad.dim(1) == hidden, kTiling, "permutedTokensGradOut must have the row size of the gradient");

  const int64_t bound = cann_at_least(9, 1) ? sorted_indices.dim(0) : permuted->dim(0);
  plan.partial_output(&permuted_grad);
  plan.output(&probs_grad); // not written without probs
  plan.kernel([op = UnpermuteGrad{
                   copy_of(permuted), grad, sorted_indices, copy_of(probs), permuted_grad, probs_grad, top_k, bound}] {
    unpermute_grad(op);
  });
}

} // namespace

STANDIN_API int aclnnMoeTokenUnpermuteGetWorkspaceSize(
    const aclTensor* permutedTokens,
    const aclTensor* sortedIndices,
    const aclTensor* probsOptional,
    bool paddedMode,
    const aclIntArray* restoreShapeOptional,
    aclTensor* out,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeTokenUnpermute", workspaceSize, executor,
      [&](Plan& plan) {
        plan.tensor(permutedTokens, "permutedTokens");
        plan.tensor(sortedIndices, "sortedIndices");
        plan.tensor(out, "out");
        need_no_padded_mode(plan, paddedMode);
        need_float(plan, kInvalid, "permutedTokens", *permutedTokens);
        need_int32(plan, kInvalid, "sortedIndices", *sortedIndices);
        need_dtype_of(plan, kInvalid, "out", *out, "permutedTokens", *permutedTokens);
        if (probsOptional != nullptr) {
          need_float(plan, kInvalid, "probs", *probsOptional);
        }
        if (on_950()) {
          plan_finalize_routing_v2(
              plan, {*permutedTokens, *sortedIndices, nullptr, nullptr, nullptr, probsOptional, nullptr, 2, *out});
        } else {
          plan_token_unpermute(plan, *permutedTokens, *sortedIndices, probsOptional, *out);
        }
      },
      permutedTokens, sortedIndices, probsOptional, paddedMode, restoreShapeOptional, out);
}
STANDIN_PHASE2(aclnnMoeTokenUnpermute)

STANDIN_API int aclnnMoeTokenUnpermuteGradGetWorkspaceSize(
    const aclTensor* permuteTokensOptional,
    const aclTensor* unpermutedTokensGrad,
    const aclTensor* sortedIndices,
    const aclTensor* probsOptional,
    bool paddedMode,
    const aclIntArray* restoreShapeOptional,
    aclTensor* permutedTokensGradOut,
    aclTensor* probsGradOut,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeTokenUnpermuteGrad", workspaceSize, executor,
      [&](Plan& plan) {
        if (on_950() || !cann_at_least(9, 1)) {
          plan.tensor(permuteTokensOptional, "permutedTokens");
        }
        plan.tensor(unpermutedTokensGrad, "unpermutedTokensGrad");
        plan.tensor(sortedIndices, "sortedIndices");
        plan.tensor(permutedTokensGradOut, "permutedTokensGradOut");
        plan.tensor(probsGradOut, "probsGradOut");
        need_no_padded_mode(plan, paddedMode);
        need_float(plan, kInvalid, "unpermutedTokensGrad", *unpermutedTokensGrad);
        need_int32(plan, kInvalid, "sortedIndices", *sortedIndices);
        need_dtype_of(
            plan, kInvalid, "permutedTokensGradOut", *permutedTokensGradOut, "unpermutedTokensGrad",
            *unpermutedTokensGrad);
        need_float(plan, kInvalid, "probsGradOut", *probsGradOut);
        if (permuteTokensOptional != nullptr) {
          need_dtype_of(
              plan, kInvalid, "permutedTokens", *permuteTokensOptional, "unpermutedTokensGrad", *unpermutedTokensGrad);
        }
        if (probsOptional != nullptr) {
          need_float(plan, kInvalid, "probs", *probsOptional);
          need_dtype_of(plan, token_tiling_code(), "probsGradOut", *probsGradOut, "probs", *probsOptional);
        }
        if (on_950()) {
          plan.need(sortedIndices->rank() > 0, kInvalid, "sortedIndices must have dimensions");
          const int64_t active_num = sortedIndices->dim(0);
          plan_finalize_routing_v2_grad(
              plan, {*unpermutedTokensGrad, *sortedIndices, permuteTokensOptional, probsOptional, nullptr, nullptr, 0,
                     active_num, 0, 0, *permutedTokensGradOut, *probsGradOut});
        } else {
          plan_token_unpermute_grad(
              plan, permuteTokensOptional, *unpermutedTokensGrad, *sortedIndices, probsOptional, *permutedTokensGradOut,
              *probsGradOut);
        }
      },
      permuteTokensOptional, unpermutedTokensGrad, sortedIndices, probsOptional, paddedMode, restoreShapeOptional,
      permutedTokensGradOut, probsGradOut);
}
STANDIN_PHASE2(aclnnMoeTokenUnpermuteGrad)
