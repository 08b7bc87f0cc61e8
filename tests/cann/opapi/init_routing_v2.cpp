// aclnnMoeInitRoutingV2 and aclnnMoeInitRoutingV2Grad (A2, A3, 950; hand-written entry points).
//
//   order = stable argsort of expertIdx, position = its inverse
//   mode 0: expandedX = x[order[:M] / K], expandedRowIdx = position, never truncated; M = activeNum capped at n, 0 = n
//           (950: values <= 0 count from n); counts per expert over all n slots: cumulative (flag 1) or plain (flag 2)
//   mode 1: the first expertCapacity slots of each expert, in token order, go to expandedX[e, c], the rest of it is 0;
//           expandedRowIdx = e * C + c, -1 for dropped slots; beforeCapacity = slots per expert before dropping
//   grad:   out[t] = sum over k of gradExpandedX[expandedRowIdx[t * K + k]], float32, a tree over neighbouring k
//
// Unchecked: expert ids, where they index a counter or a row. Row indices of the grad, as the kernels have it:
//   mode 0, activeNum 0: A2/A3 nothing, 950 skips < 0 and >= n
//   mode 0, activeNum:   A2/A3 skips >= activeNum only, 950 also negatives
//   mode 1:              A2/A3 skips -1 only, 950 negatives; >= E * C never checked
#include <algorithm>

#include "routing.h"

using namespace standin;
using namespace standin::routing;

namespace {

constexpr int kCode = kInnerNullptr; // what tiling refuses

struct Copies { // the operator as the kernel keeps it
  aclTensor x;
  aclTensor expert_idx;
  aclTensor expanded_x;
  aclTensor expanded_row_idx;
  std::optional<aclTensor> counts;
  std::optional<aclTensor> before_capacity;
  int64_t top_k;
  int64_t experts;
  int64_t capacity;
};

std::vector<int64_t> count_slots(const Ints& ids, int64_t experts) {
  std::vector<int64_t> counts(experts, 0);
  for (int64_t slot = 0; slot < ids.size(); ++slot) {
    ++counts[unchecked_index("MoeInitRoutingV2", "expertIdx", slot, ids.get(slot), experts)];
  }
  return counts;
}

void set_all(const aclTensor& tensor, const std::vector<int64_t>& values) {
  const Ints to(tensor);
  for (int64_t i = 0; i < to.size(); ++i) {
    to.set(i, values[i]);
  }
}

void init_dropless(const Copies& op, int64_t count_flag) {
  const Ints ids(op.expert_idx);
  const SortedSlots sorted = sort_slots(ids);
  for (int64_t place = 0; place < op.expanded_x.dim(0); ++place) {
    copy_row(op.x, sorted.order[place] / op.top_k, op.expanded_x, place, op.x.dim(1));
  }
  set_all(op.expanded_row_idx, sorted.position);
  if (count_flag == 0) {
    return;
  }
  std::vector<int64_t> counts = count_slots(ids, op.experts);
  for (int64_t expert = 1; count_flag == 1 && expert < op.experts; ++expert) {
    counts[expert] += counts[expert - 1];
  }
  set_all(*op.counts, counts);
}

void init_drop_pad(const Copies& op, bool before_capacity_flag) {
  const Ints ids(op.expert_idx);
  const Ints row_idx(op.expanded_row_idx);
  const std::vector<int64_t> counts = count_slots(ids, op.experts);
  std::vector<int64_t> seen(op.experts, 0);
  fill(Floats(op.expanded_x), 0.0f);
  fill(row_idx, -1);
  for (const int64_t slot : sort_slots(ids).order) {
    const int64_t expert = ids.get(slot);
    const int64_t place = seen[expert]++;
    if (place < op.capacity) {
      const int64_t row = expert * op.capacity + place;
      copy_row(op.x, slot / op.top_k, op.expanded_x, row, op.x.dim(1));
      row_idx.set(slot, row);
    }
  }
  if (before_capacity_flag) {
    set_all(*op.before_capacity, counts);
  }
}

int64_t rows_kept(int64_t active_num, int64_t slots) {
  if (on_950()) {
    return std::clamp<int64_t>(active_num <= 0 ? active_num + slots : active_num, 0, slots);
  }
  return active_num == 0 ? slots : std::min(active_num, slots);
}

void need_counts(const Plan& plan, const char* name, const aclTensor* counts, int64_t experts) {
  plan.tensor(counts, name, kCode);
  need_int32(plan, kCode, name, *counts);
  need_shape(plan, kCode, name, *counts, {experts});
}

// Rows that the grad kernel passes over. `limit`: activeNum, or n without.
bool grad_skips(const InitRoutingV2Grad& op, int64_t row, int64_t limit) {
  if (op.drop_pad_mode == 1) {
    return on_950() ? row < 0 : row == -1;
  }
  if (on_950()) {
    return row < 0 || row >= limit;
  }
  return op.active_num > 0 && row >= limit;
}

// (v0 + v1) + (v2 + v3) + ..., in float32.
float tree_sum(std::vector<float>& values) {
  for (size_t stride = 1; stride < values.size(); stride *= 2) {
    for (size_t i = stride; i < values.size(); i += 2 * stride) {
      values[i - stride] += values[i];
    }
  }
  return values[0];
}

} // namespace

namespace standin::routing {

void plan_init_routing_v2(Plan& plan, const InitRoutingV2& op) {
  need_rank(plan, kCode, "x", op.x, 2);
  plan.need(
      op.expert_idx.rank() == 2 || (on_950() && op.expert_idx.rank() == 1), kCode,
      "expertIdx must have 2 dimensions, or 1 on Ascend 950");
  plan.need(op.x.dim(0) == op.expert_idx.dim(0), kCode, "x and expertIdx must agree in dimension 0");
  need_elements(plan, kCode, "x", op.x);
  need_elements(plan, kCode, "expertIdx", op.expert_idx);
  plan.need(op.expert_capacity >= 0, kCode, "expertCapacity must not be negative");
  plan.need(op.expert_num >= 0, kCode, "expertNum must not be negative");
  plan.need(op.drop_pad_mode == 0 || op.drop_pad_mode == 1, kCode, "dropPadMode must be 0 or 1");
  plan.need(op.count_flag >= 0 && op.count_flag <= 2, kCode, "expertTokensCountOrCumsumFlag must be 0, 1 or 2");
  plan.need(op.count_flag == 0 || op.expert_num > 0, kCode, "counts need expertNum > 0");
  plan.need(on_950() || op.active_num >= 0, kCode, "activeNum must not be negative");
  const int64_t slots = op.expert_idx.numel();
  const int64_t hidden = op.x.dim(1);
  if (op.drop_pad_mode == 1) {
    plan.need(op.expert_num > 0, kCode, "expertNum must be positive in mode 1");
    plan.need(
        op.expert_capacity > 0 && op.expert_capacity <= op.x.dim(0), kCode,
        "expertCapacity must be from 1 to the number of tokens in mode 1");
    need_shape(plan, kCode, "expandedXOut", op.expanded_x, {op.expert_num, op.expert_capacity, hidden});
  } else {
    need_shape(plan, kCode, "expandedXOut", op.expanded_x, {rows_kept(op.active_num, slots), hidden});
  }
  need_shape(plan, kCode, "expandedRowIdxOut", op.expanded_row_idx, {slots});
  if (op.drop_pad_mode == 0 && op.count_flag != 0) {
    need_counts(plan, "expertTokensCountOrCumsumOut", op.counts, op.expert_num);
  }
  if (op.drop_pad_mode == 1 && op.before_capacity_flag) {
    need_counts(plan, "expertTokensBeforeCapacityOut", op.before_capacity, op.expert_num);
  }

  plan.output(&op.expanded_x);
  plan.output(&op.expanded_row_idx);
  if (op.counts != nullptr) {
    plan.output(op.counts); // not written unless asked for
  }
  if (op.before_capacity != nullptr) {
    plan.output(op.before_capacity);
  }
  const Copies copies{
      op.x,
      op.expert_idx,
      op.expanded_x,
      op.expanded_row_idx,
      copy_of(op.counts),
      copy_of(op.before_capacity),
      op.expert_idx.rank() == 1 ? 1 : op.expert_idx.dim(1),
      op.expert_num,
      op.expert_capacity};
  if (op.drop_pad_mode == 1) {
    plan.kernel([copies, flag = op.before_capacity_flag] { init_drop_pad(copies, flag); });
  } else {
    plan.kernel([copies, flag = op.count_flag] { init_dropless(copies, flag); });
  }
}

void plan_init_routing_v2_grad(Plan& plan, const InitRoutingV2Grad& op) {
  plan.need(op.drop_pad_mode == 0 || op.drop_pad_mode == 1, kCode, "dropPadMode must be 0 or 1");
  plan.need(op.top_k > 0, kCode, "topK must be positive");
  plan.need(op.active_num >= 0, kCode, "activeNum must not be negative");
  need_rank(plan, kCode, "gradExpandedX", op.grad_expanded_x, op.drop_pad_mode == 0 ? 2 : 3);
  need_rank(plan, kCode, "expandedRowIdx", op.expanded_row_idx, 1);
  const int64_t slots = op.expanded_row_idx.dim(0);
  const int64_t rows = op.grad_expanded_x.dim(0) * (op.drop_pad_mode == 0 ? 1 : op.grad_expanded_x.dim(1));
  if (op.drop_pad_mode == 0) {
    const int64_t wanted = op.active_num == 0 ? slots : op.active_num;
    plan.need(
        rows == wanted, kCode,
        "gradExpandedX must have exactly " + std::to_string(wanted) + " rows (activeNum, or one for each slot), got " +
            std::to_string(rows));
  }
  plan.need(slots % op.top_k == 0, kCode, "expandedRowIdx must have N * topK elements");
  need_shape(plan, kCode, "out", op.grad_x, {slots / op.top_k, op.grad_expanded_x.dim(-1)});
  need_elements(plan, kCode, "expandedRowIdx", op.expanded_row_idx);
  need_elements(plan, kCode, "out", op.grad_x);
  if (!on_950() || op.drop_pad_mode == 0) { // 950 takes E * C = 0 with every index -1
    need_elements(plan, kCode, "gradExpandedX", op.grad_expanded_x);
  }

  plan.output(&op.grad_x);
  const int64_t limit = op.active_num > 0 ? op.active_num : slots;
  plan.kernel([grad = op.grad_expanded_x, row_idx = op.expanded_row_idx, out = op.grad_x, top_k = op.top_k,
               mode = op.drop_pad_mode, active_num = op.active_num, rows, limit] {
    const InitRoutingV2Grad op{grad, row_idx, top_k, mode, active_num, out};
    const int64_t hidden = out.dim(1);
    const Floats from(grad);
    const Floats to(out);
    const Ints index(row_idx);
    std::vector<float> terms(top_k);
    for (int64_t i = 0; i < to.size(); ++i) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t slot = i / hidden * top_k + k;
        const int64_t row = index.get(slot);
        terms[k] = 0.0f;
        if (!grad_skips(op, row, limit)) {
          unchecked_index("MoeInitRoutingV2Grad", "expandedRowIdx", slot, row, rows);
          terms[k] = from.get(row * hidden + i % hidden);
        }
      }
      to.set(i, tree_sum(terms));
    }
  });
}

} // namespace standin::routing

STANDIN_API int aclnnMoeInitRoutingV2GetWorkspaceSize(
    const aclTensor* x,
    const aclTensor* expertIdx,
    int64_t activeNumOptional,
    int64_t expertCapacityOptional,
    int64_t expertNumOptional,
    int64_t dropPadModeOptional,
    int64_t expertTokensCountOrCumsumFlagOptional,
    bool expertTokensBeforeCapacityFlagOptional,
    const aclTensor* expandedXOut,
    const aclTensor* expandedRowIdxOut,
    const aclTensor* expertTokensCountOrCumsumOutOptional,
    const aclTensor* expertTokensBeforeCapacityOutOptional,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeInitRoutingV2", workspaceSize, executor,
      [&](Plan& plan) {
        plan.tensor(x, "x");
        plan.tensor(expertIdx, "expertIdx");
        plan.tensor(expandedXOut, "expandedXOut");
        plan.tensor(expandedRowIdxOut, "expandedRowIdxOut");
        need_float(plan, kInvalid, "x", *x);
        plan.need(
            expertIdx->dtype == ACL_INT32 || (on_950() && expertIdx->dtype == ACL_INT64), kInvalid,
            "expertIdx must be int32, or int64 on Ascend 950");
        need_dtype_of(plan, kInvalid, "expandedXOut", *expandedXOut, "x", *x);
        need_int32(plan, kInvalid, "expandedRowIdxOut", *expandedRowIdxOut);
        if (expertTokensCountOrCumsumOutOptional != nullptr) {
          need_int32(plan, kInvalid, "expertTokensCountOrCumsumOut", *expertTokensCountOrCumsumOutOptional);
        }
        if (expertTokensBeforeCapacityOutOptional != nullptr) {
          need_int32(plan, kInvalid, "expertTokensBeforeCapacityOut", *expertTokensBeforeCapacityOutOptional);
        }
        plan_init_routing_v2(
            plan, {*x, *expertIdx, activeNumOptional, expertCapacityOptional, expertNumOptional, dropPadModeOptional,
                   expertTokensCountOrCumsumFlagOptional, expertTokensBeforeCapacityFlagOptional, *expandedXOut,
                   *expandedRowIdxOut, expertTokensCountOrCumsumOutOptional, expertTokensBeforeCapacityOutOptional});
      },
      x, expertIdx, activeNumOptional, expertCapacityOptional, expertNumOptional, dropPadModeOptional,
      expertTokensCountOrCumsumFlagOptional, expertTokensBeforeCapacityFlagOptional, expandedXOut, expandedRowIdxOut,
      expertTokensCountOrCumsumOutOptional, expertTokensBeforeCapacityOutOptional);
}
STANDIN_PHASE2(aclnnMoeInitRoutingV2)

STANDIN_API int aclnnMoeInitRoutingV2GradGetWorkspaceSize(
    const aclTensor* gradExpandedX,
    const aclTensor* expandedRowIdx,
    int64_t topK,
    int64_t dropPadMode,
    int64_t activeNum,
    const aclTensor* out,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnMoeInitRoutingV2Grad", workspaceSize, executor,
      [&](Plan& plan) {
        plan.tensor(gradExpandedX, "gradExpandedX");
        plan.tensor(expandedRowIdx, "expandedRowIdx");
        plan.tensor(out, "out");
        need_float(plan, kInvalid, "gradExpandedX", *gradExpandedX);
        need_int32(plan, kInvalid, "expandedRowIdx", *expandedRowIdx);
        need_dtype_of(plan, kInvalid, "out", *out, "gradExpandedX", *gradExpandedX);
        plan_init_routing_v2_grad(plan, {*gradExpandedX, *expandedRowIdx, topK, dropPadMode, activeNum, *out});
      },
      gradExpandedX, expandedRowIdx, topK, dropPadMode, activeNum, out);
}
STANDIN_PHASE2(aclnnMoeInitRoutingV2Grad)
