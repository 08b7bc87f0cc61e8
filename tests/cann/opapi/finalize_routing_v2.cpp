// aclnnMoeFinalizeRoutingV2 and aclnnMoeFinalizeRoutingV2Grad (A2, A3, 950; hand-written entry points).
//
//   out[t] = x1[t] + x2[t] + sum over k of (expandedX[r] + bias[expertIdx[t, k]]) * scales[t, k]
//   modes 0, 1: r = expandedRowIdx[k * N + t] (k-major); modes 2, 3: r = expandedRowIdx[t * K + k] (token-major)
//   modes 1, 3: expandedX is (E, C, H), and a slot with r = -1 loses its whole term, bias included
//
// Modes 0 and 2 on A2/A3: expandedX must have N * K rows, indices are unchecked; -1 leaves stale data in the sum (NaN
// here). On 950, -1 and indices >= rows are skipped, other negatives unchecked. Modes 1 and 3 skip -1 only. expertIdx
// is unchecked. A2/A3 compute in the dtype, float16 rounding after each step (bfloat16: float32), 950 in float32. The
// float16 and float32 kernels of A2/A3 add 0 * scale for a dropped slot at odd k, so that a NaN scale shows.
//
//   grad, slot i = t * K + k, r = expandedRowIdx[i], valid if 0 <= r < rows (checked on every product):
//   gradExpandedX[r] = gradY[t] * scales[t, k] if valid
//   gradScales[t, k] = dot((valid ? expandedX[r] : 0) + bias[expertIdx[t, k]], gradY[t]), float32
//
// Mode 0 (forward mode 2) leaves rows that no slot names unwritten, mode 1 (forward mode 3) clears them. Without scales
// gradScales is not written. The bias part of a dropped slot is in gradScales although the forward dropped it.
#include <limits>

#include "routing.h"

using namespace standin;
using namespace standin::routing;

namespace {

constexpr int kCode = kInnerNullptr; // what tiling refuses

struct Finalize {
  aclTensor expanded_x;
  aclTensor expanded_row_idx;
  std::optional<aclTensor> x1;
  std::optional<aclTensor> x2;
  std::optional<aclTensor> bias;
  std::optional<aclTensor> scales;
  std::optional<aclTensor> expert_idx;
  int64_t mode;
  aclTensor out;
  int64_t top_k;
  int64_t rows;
};

enum class Slot { Read, Dropped, Stale };

// What the kernel does with a row index. A Slot::Read is used unchecked.
Slot slot_state(int64_t mode, int64_t row, int64_t rows) {
  const bool drop_pad = mode == 1 || mode == 3;
  if (drop_pad) {
    return row == -1 ? Slot::Dropped : Slot::Read;
  }
  if (on_950()) {
    return row == -1 || row >= rows ? Slot::Dropped : Slot::Read;
  }
  return row == -1 ? Slot::Stale : Slot::Read;
}

aclDataType arithmetic_dtype(const Finalize& op) {
  return on_950() || op.out.dtype == ACL_BF16 ? ACL_FLOAT : op.out.dtype;
}

// The kernel of one token: `sum` in, `sum` out.
void add_slots(const Finalize& op, int64_t token, std::vector<float>& sum) {
  const Floats x(op.expanded_x);
  const Ints row_idx(op.expanded_row_idx);
  const std::optional<Floats> scales = view_of<Floats>(op.scales);
  const std::optional<Floats> bias = view_of<Floats>(op.bias);
  const std::optional<Ints> expert_idx = view_of<Ints>(op.expert_idx);
  const int64_t tokens = op.out.dim(0);
  const int64_t hidden = op.out.dim(1);
  const aclDataType dtype = arithmetic_dtype(op);
  for (int64_t k = 0; k < op.top_k; ++k) {
    const int64_t slot = token * op.top_k + k;
    const int64_t row = row_idx.get(op.mode == 0 || op.mode == 1 ? k * tokens + token : slot);
    const float scale = scales ? scales->get(slot) : 1.0f;
    const Slot state = slot_state(op.mode, row, op.rows);
    if (state == Slot::Stale) {
      sum.assign(hidden, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    if (state == Slot::Dropped) {
      const bool added_as_zero = !on_950() && op.out.dtype != ACL_BF16 && k % 2 == 1;
      for (int64_t h = 0; added_as_zero && h < hidden; ++h) {
        sum[h] = rounded(sum[h] + rounded(0.0f * scale, dtype), dtype);
      }
      continue;
    }
    unchecked_index("MoeFinalizeRoutingV2", "expandedRowIdx", slot, row, op.rows);
    int64_t expert = 0;
    if (bias) {
      expert = unchecked_index("MoeFinalizeRoutingV2", "expertIdx", slot, expert_idx->get(slot), op.bias->dim(0));
    }
    for (int64_t h = 0; h < hidden; ++h) {
      float term = x.get(row * hidden + h);
      if (bias) {
        term = rounded(term + bias->get(expert * hidden + h), dtype);
      }
      sum[h] = rounded(sum[h] + rounded(term * scale, dtype), dtype);
    }
  }
}

void finalize(const Finalize& op) {
  const int64_t hidden = op.out.dim(1);
  const std::optional<Floats> x1 = view_of<Floats>(op.x1);
  const std::optional<Floats> x2 = view_of<Floats>(op.x2);
  const Floats out(op.out);
  const aclDataType dtype = arithmetic_dtype(op);
  std::vector<float> sum(hidden);
  for (int64_t token = 0; token < op.out.dim(0); ++token) {
    for (int64_t h = 0; h < hidden; ++h) {
      const int64_t at = token * hidden + h;
      sum[h] = x1 ? x1->get(at) : 0.0f;
      sum[h] = x2 ? rounded(sum[h] + x2->get(at), dtype) : sum[h];
    }
    add_slots(op, token, sum);
    for (int64_t h = 0; h < hidden; ++h) {
      out.set(token * hidden + h, sum[h]);
    }
  }
}

struct FinalizeGrad {
  aclTensor grad_y;
  aclTensor expanded_row_idx;
  std::optional<aclTensor> expanded_x;
  std::optional<aclTensor> scales;
  std::optional<aclTensor> expert_idx;
  std::optional<aclTensor> bias;
  aclTensor grad_expanded_x;
  aclTensor grad_scales;
  int64_t top_k;
  int64_t rows;
  bool clear;
};

float scale_grad(const FinalizeGrad& op, int64_t slot, int64_t row, bool valid) {
  const int64_t hidden = op.grad_y.dim(1);
  const Floats grad_y(op.grad_y);
  const Floats x(*op.expanded_x);
  const std::optional<Floats> bias = view_of<Floats>(op.bias);
  int64_t expert = 0;
  if (bias) {
    const Ints experts(*op.expert_idx);
    expert = unchecked_index("MoeFinalizeRoutingV2Grad", "expertIdx", slot, experts.get(slot), op.bias->dim(0));
  }
  float sum = 0.0f;
  for (int64_t h = 0; h < hidden; ++h) {
    const float value = (valid ? x.get(row * hidden + h) : 0.0f) + (bias ? bias->get(expert * hidden + h) : 0.0f);
    sum += value * grad_y.get(slot / op.top_k * hidden + h);
  }
  return sum;
}

void finalize_grad(const FinalizeGrad& op) {
  const int64_t hidden = op.grad_y.dim(1);
  const Floats grad_y(op.grad_y);
  const Floats grad_x(op.grad_expanded_x);
  const Ints row_idx(op.expanded_row_idx);
  const std::optional<Floats> scales = view_of<Floats>(op.scales);
  const std::optional<Floats> grad_scales = scales ? std::optional<Floats>(Floats(op.grad_scales)) : std::nullopt;
  if (op.clear) {
    fill(grad_x, 0.0f);
  }
  ScatterOrder order(op.rows);
  for (int64_t slot = 0; slot < row_idx.size(); ++slot) {
    const int64_t row = row_idx.get(slot);
    const bool valid = row >= 0 && row < op.rows;
    if (valid && order.may_write(row)) {
      const float scale = scales ? scales->get(slot) : 1.0f;
      for (int64_t h = 0; h < hidden; ++h) {
        grad_x.set(row * hidden + h, grad_y.get(slot / op.top_k * hidden + h) * scale);
      }
    }
    if (scales) {
      grad_scales->set(slot, scale_grad(op, slot, row, valid));
    }
  }
}

// A2 and A3 take scales of the tokens' dtype; forward also float32 beside bfloat16. 950 takes any.
void need_scales_dtype(const Plan& plan, const aclTensor& scales, const aclTensor& tokens, bool float32_too) {
  const bool mixed = float32_too && scales.dtype == ACL_FLOAT && tokens.dtype == ACL_BF16;
  plan.need(
      on_950() ? is_float(scales.dtype) : scales.dtype == tokens.dtype || mixed, kCode,
      "scales must have the dtype of the tokens on this product");
}

} // namespace

namespace standin::routing {

void plan_finalize_routing_v2(Plan& plan, const FinalizeRoutingV2& op) {
  const int64_t mode = op.drop_pad_mode;
  plan.need(mode >= 0 && mode <= 3, kCode, "dropPadMode must be from 0 to 3");
  const bool drop_pad = mode == 1 || mode == 3;
  need_rank(plan, kCode, "expandedRowIdx", op.expanded_row_idx, 1);
  need_rank(plan, kCode, "expandedX", op.expanded_x, drop_pad ? 3 : 2);
  need_elements(plan, kCode, "expandedRowIdx", op.expanded_row_idx);
  need_elements(plan, kCode, "expandedX", op.expanded_x);
  const int64_t slots = op.expanded_row_idx.dim(0);
  const int64_t hidden = op.expanded_x.dim(-1);
  const int64_t rows = op.expanded_x.numel() / hidden;
  int64_t top_k = 1;
  if (op.scales != nullptr) {
    need_rank(plan, kCode, "scales", *op.scales, 2);
    top_k = op.scales->dim(1);
    plan.need(top_k > 0, kCode, "K, dimension 1 of scales, must be positive");
    need_scales_dtype(plan, *op.scales, op.expanded_x, true);
  }
  plan.need(slots % top_k == 0, kCode, "expandedRowIdx must have N * K elements");
  const int64_t tokens = slots / top_k;
  if (!on_950() && !drop_pad) {
    plan.need(
        rows == slots, kCode,
        "expandedX must have exactly N * K = " + std::to_string(slots) + " rows in modes 0 and 2, got " +
            std::to_string(rows));
  }
  if (op.scales != nullptr) {
    need_shape(plan, kCode, "scales", *op.scales, {tokens, top_k});
  }
  if (op.x1 != nullptr) {
    need_shape(plan, kCode, "x1", *op.x1, {tokens, hidden});
  }
  if (op.x2 != nullptr) {
    plan.need(op.x1 != nullptr, kCode, "x1 must be given with x2");
    need_shape(plan, kCode, "x2", *op.x2, {tokens, hidden});
  }
  if (op.expert_idx != nullptr) {
    need_shape(plan, kCode, "expertIdx", *op.expert_idx, {tokens, top_k});
  }
  if (op.bias != nullptr) {
    plan.need(op.expert_idx != nullptr, kCode, "expertIdx must be given with bias");
    need_rank(plan, kCode, "bias", *op.bias, 2);
    plan.need(op.bias->dim(1) == hidden, kCode, "bias must have the row size of expandedX");
    plan.need(
        !drop_pad || op.bias->dim(0) == op.expanded_x.dim(0), kCode,
        "bias and expandedX must agree in the number of experts in modes 1 and 3");
    plan.need(op.bias->dim(0) >= top_k, kCode, "bias must have at least K experts");
  }
  need_shape(plan, kCode, "out", op.out, {tokens, hidden});

  plan.output(&op.out);
  plan.kernel([args = Finalize{
                   op.expanded_x, op.expanded_row_idx, copy_of(op.x1), copy_of(op.x2), copy_of(op.bias),
                   copy_of(op.scales), copy_of(op.expert_idx), mode, op.out, top_k, rows}] { finalize(args); });
}

void plan_finalize_routing_v2_grad(Plan& plan, const FinalizeRoutingV2Grad& op) {
  plan.need(op.drop_pad_mode == 0 || op.drop_pad_mode == 1, kCode, "dropPadMode must be 0 or 1");
  const bool drop_pad = op.drop_pad_mode == 1;
  plan.need(
      !drop_pad || (op.expert_num > 0 && op.expert_capacity > 0), kCode,
      "expertNum and expertCapacity must be positive in mode 1");
  need_rank(plan, kCode, "gradY", op.grad_y, 2);
  need_rank(plan, kCode, "expandedRowIdx", op.expanded_row_idx, 1);
  need_elements(plan, kCode, "gradY", op.grad_y);
  need_elements(plan, kCode, "expandedRowIdx", op.expanded_row_idx);
  const int64_t slots = op.expanded_row_idx.dim(0);
  const int64_t tokens = op.grad_y.dim(0);
  const int64_t hidden = op.grad_y.dim(1);
  const bool active = op.active_num > 0 && op.active_num < slots;
  const int64_t rows = drop_pad ? op.expert_num * op.expert_capacity : active ? op.active_num : slots;
  const Dims expanded = drop_pad ? Dims{op.expert_num, op.expert_capacity, hidden} : Dims{rows, hidden};
  need_shape(plan, kCode, "gradExpandedXOut", op.grad_expanded_x, expanded);
  if (op.expanded_x != nullptr) {
    need_shape(plan, kCode, "expandedX", *op.expanded_x, expanded);
  }
  int64_t top_k = 1;
  if (op.scales == nullptr) {
    plan.need(tokens == slots, kCode, "gradY must have one row for each slot without scales");
  } else {
    plan.need(op.expanded_x != nullptr, kCode, "expandedX must be given with scales");
    need_rank(plan, kCode, "scales", *op.scales, 2);
    top_k = op.scales->dim(1);
    need_shape(plan, kCode, "scales", *op.scales, {tokens, top_k});
    plan.need(tokens * top_k == slots, kCode, "scales must have as many elements as expandedRowIdx");
    need_scales_dtype(plan, *op.scales, op.grad_y, false);
    need_shape(plan, kCode, "gradScalesOut", op.grad_scales, op.scales->dims);
    need_dtype_of(plan, kCode, "gradScalesOut", op.grad_scales, "scales", *op.scales);
  }
  const aclTensor* bias = op.scales == nullptr ? nullptr : op.bias; // only looked at with scales
  if (bias != nullptr) {
    plan.need(op.expert_idx != nullptr, kCode, "expertIdx must be given with bias");
    need_shape(plan, kCode, "expertIdx", *op.expert_idx, {tokens, top_k});
    need_rank(plan, kCode, "bias", *bias, 2);
    plan.need(bias->dim(0) > 0, kCode, "bias must have experts");
    plan.need(!drop_pad || bias->dim(0) == op.expert_num, kCode, "bias must have expertNum rows in mode 1");
    plan.need(bias->dim(1) == hidden, kCode, "bias must have the row size of gradY");
  }

  if (drop_pad) {
    plan.output(&op.grad_expanded_x);
  } else {
    plan.partial_output(&op.grad_expanded_x);
  }
  plan.output(&op.grad_scales); // not written without scales
  plan.kernel([args = FinalizeGrad{
                   op.grad_y, op.expanded_row_idx, copy_of(op.expanded_x), copy_of(op.scales), copy_of(op.expert_idx),
                   copy_of(bias), op.grad_expanded_x, op.grad_scales, top_k, rows, drop_pad}] { finalize_grad(args); });
}

} // namespace standin::routing

STANDIN_API int aclnnMoeFinalizeRoutingV2GetWorkspaceSize(
    const aclTensor* expandedX,
    const aclTensor* expandedRowIdx,
    const aclTensor* x1Optional,
    const aclTensor* x2Optional,
    const aclTensor* biasOptional,
    const aclTensor* scalesOptional,
    const aclTensor* expertIdxOptional,
    int64_t dropPadMode,
    const aclTensor* out,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeFinalizeRoutingV2", workspaceSize, executor,
      [&](Plan& plan) {
        // The entry point looks at its arguments on 950 only; on A2 and A3 all is found out by the launch.
        const int null_code = on_950() ? kNullptr : kCode;
        const int dtype_code = on_950() ? kInvalid : kCode;
        plan.tensor(expandedX, "expandedX", null_code);
        plan.tensor(expandedRowIdx, "expandedRowIdx", null_code);
        plan.tensor(out, "out", null_code);
        need_float(plan, dtype_code, "expandedX", *expandedX);
        need_int32(plan, dtype_code, "expandedRowIdx", *expandedRowIdx);
        need_dtype_of(plan, dtype_code, "out", *out, "expandedX", *expandedX);
        for (const aclTensor* like_x : {x1Optional, x2Optional, biasOptional}) {
          if (like_x != nullptr) {
            need_dtype_of(plan, dtype_code, "x1, x2 and bias", *like_x, "expandedX", *expandedX);
          }
        }
        if (scalesOptional != nullptr) {
          need_float(plan, dtype_code, "scales", *scalesOptional);
        }
        if (expertIdxOptional != nullptr) {
          need_int32(plan, dtype_code, "expertIdx", *expertIdxOptional);
        }
        plan_finalize_routing_v2(
            plan, {*expandedX, *expandedRowIdx, x1Optional, x2Optional, biasOptional, scalesOptional, expertIdxOptional,
                   dropPadMode, *out});
      },
      expandedX, expandedRowIdx, x1Optional, x2Optional, biasOptional, scalesOptional, expertIdxOptional, dropPadMode,
      out);
}
STANDIN_PHASE2(aclnnMoeFinalizeRoutingV2)

STANDIN_API int aclnnMoeFinalizeRoutingV2GradGetWorkspaceSize(
    const aclTensor* gradY,
    const aclTensor* expandedRowIdx,
    const aclTensor* expandedXOptional,
    const aclTensor* scalesOptional,
    const aclTensor* expertIdxOptional,
    const aclTensor* biasOptional,
    int64_t dropPadMode,
    int64_t activeNum,
    int64_t expertNum,
    int64_t expertCapacity,
    const aclTensor* gradExpandedXOut,
    const aclTensor* gradScalesOut,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeFinalizeRoutingV2Grad", workspaceSize, executor,
      [&](Plan& plan) {
        plan.tensor(gradY, "gradY");
        plan.tensor(expandedRowIdx, "expandedRowIdx");
        plan.tensor(gradExpandedXOut, "gradExpandedXOut");
        plan.tensor(gradScalesOut, "gradScalesOut");
        need_float(plan, kInvalid, "gradY", *gradY);
        need_int32(plan, kInvalid, "expandedRowIdx", *expandedRowIdx);
        for (const aclTensor* like_y : {expandedXOptional, biasOptional, gradExpandedXOut}) {
          if (like_y != nullptr) {
            need_dtype_of(plan, kInvalid, "expandedX, bias and gradExpandedXOut", *like_y, "gradY", *gradY);
          }
        }
        if (scalesOptional != nullptr) {
          need_float(plan, kInvalid, "scales", *scalesOptional);
        }
        if (expertIdxOptional != nullptr) {
          need_int32(plan, kInvalid, "expertIdx", *expertIdxOptional);
        }
        need_float(plan, kInvalid, "gradScalesOut", *gradScalesOut);
        plan_finalize_routing_v2_grad(
            plan, {*gradY, *expandedRowIdx, expandedXOptional, scalesOptional, expertIdxOptional, biasOptional,
                   dropPadMode, activeNum, expertNum, expertCapacity, *gradExpandedXOut, *gradScalesOut});
      },
      gradY, expandedRowIdx, expandedXOptional, scalesOptional, expertIdxOptional, biasOptional, dropPadMode, activeNum,
      expertNum, expertCapacity, gradExpandedXOut, gradScalesOut);
}
STANDIN_PHASE2(aclnnMoeFinalizeRoutingV2Grad)
