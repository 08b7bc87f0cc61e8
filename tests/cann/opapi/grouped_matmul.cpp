// aclnnGroupedMatmulV4, and the implementation that V5 shares. The contract is in grouped_matmul.h.
#include "grouped_matmul.h"

#include <algorithm>
#include <utility>

#include "routing.h"

namespace standin {

using routing::need_rank;
using routing::need_shape;

namespace {

constexpr int64_t kMaxGroups = 1024;
constexpr int64_t kMaxInnerSize = 65535;

bool absent(const aclTensorList* list) {
  if (list == nullptr || list->tensors.empty() || list->tensors[0] == nullptr) {
    return true;
  }
  const aclTensor& first = *list->tensors[0];
  return list->tensors.size() == 1 && first.rank() == 1 && first.dim(0) == 0;
}

const aclTensor& only_tensor(const Plan& plan, const aclTensorList* list, const std::string& name) {
  plan.need(list != nullptr, kNullptr, name + " must not be null");
  plan.need(list->tensors.size() == 1, kInvalid, name + " must be a list of one tensor in this stand-in");
  plan.need(list->tensors[0] != nullptr, kInvalid, name + "[0] must not be null");
  return *list->tensors[0];
}

bool one_by_one(const aclTensor& matrix) {
  return matrix.dim(-1) == 1 && matrix.dim(-2) == 1;
}

// Packed strides, as the host reads them: last two (1, rows), batches packed behind.
bool reads_transposed(const aclTensor& matrix) {
  const int64_t rank = matrix.rank();
  if (one_by_one(matrix) || matrix.strides[rank - 2] != 1 || matrix.strides[rank - 1] != matrix.dim(-2)) {
    return false;
  }
  int64_t packed = matrix.dim(-1) * matrix.dim(-2);
  for (int64_t batch = rank - 3; batch >= 0; packed *= matrix.dim(batch--)) {
    if (matrix.strides[batch] != packed) {
      return false;
    }
  }
  return true;
}

void need_unambiguous(const Plan& plan, const char* name, const aclTensor& matrix) {
  const bool row_major_too = matrix.dim(-1) == 1 || matrix.dim(-2) == 1;
  plan.need(
      !(reads_transposed(matrix) && row_major_too), kInvalid,
      std::string(name) + " with a size of 1 reads as transposed by its strides, shape " +
          routing::shape_text(matrix.dims));
}

void need_inner_size(const Plan& plan, const char* name, int64_t size) {
  plan.need(
      on_950() || size <= kMaxInnerSize, kInvalid,
      std::string("inner dimension of ") + name + " must be at most 65535, got " + std::to_string(size));
}

// First and one past last row of each group. Ends the process where a group runs past `rows`.
std::vector<std::pair<int64_t, int64_t>> groups_of(const aclTensor& group_list, int64_t list_type, int64_t rows) {
  const Ints list(group_list);
  std::vector<std::pair<int64_t, int64_t>> groups;
  int64_t begin = 0;
  for (int64_t group = 0; group < list.size(); ++group) {
    const int64_t end = list_type == 0 ? list.get(group) : begin + list.get(group);
    if (end < begin || end > rows) {
      die("GroupedMatmul: groupList makes group " + std::to_string(group) + " the rows from " + std::to_string(begin) +
          " to " + std::to_string(end) + " of " + std::to_string(rows) + ", and the kernel does not check it");
    }
    groups.emplace_back(begin, end);
    begin = end;
  }
  return groups;
}

void plan_split_m(Plan& plan, const GroupedMatmul& op, const aclTensor& x, const aclTensor& w, const aclTensor& out) {
  need_rank(plan, kInvalid, "x", x, 2);
  need_rank(plan, kInvalid, "weight", w, 3);
  need_unambiguous(plan, "x", x);
  need_unambiguous(plan, "weight", w);
  plan.need(!reads_transposed(x), kInvalid, "x must not be transposed with groupType 0");
  const int64_t experts = w.dim(0);
  const int64_t inner = x.dim(1);
  const int64_t columns = w.dim(2);
  plan.need(w.dim(1) == inner, kInvalid, "x and weight must agree in K");
  need_inner_size(plan, "x", inner);
  need_inner_size(plan, "weight", reads_transposed(w) ? inner : columns);
  need_shape(plan, kInvalid, "out", out, {x.dim(0), columns});
  need_shape(plan, kInvalid, "groupList", *op.group_list, {experts});
  if (out.numel() == 0) {
    plan.nothing_to_do();
    return;
  }
  plan.need(inner > 0, kInvalid, "K must not be 0 with an output to fill");

  plan.partial_output(&out); // rows beyond the end of groupList stay unwritten
  plan.kernel([x, w, out, list = *op.group_list, type = op.group_list_type, inner, columns] {
    const Floats left(x);
    const Floats right(w);
    const Floats result(out);
    const auto groups = groups_of(list, type, x.dim(0));
    for (int64_t group = 0; group < static_cast<int64_t>(groups.size()); ++group) {
      for (int64_t row = groups[group].first; row < groups[group].second; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          float sum = 0.0f;
          for (int64_t k = 0; k < inner; ++k) {
            sum += left.get(row * inner + k) * right.get((group * inner + k) * columns + column);
          }
          result.set(row * columns + column, sum);
        }
      }
    }
  });
}

void plan_split_k(Plan& plan, const GroupedMatmul& op, const aclTensor& x, const aclTensor& w, const aclTensor& out) {
  need_rank(plan, kInvalid, "x", x, 2);
  need_rank(plan, kInvalid, "weight", w, 2);
  need_rank(plan, kInvalid, "out", out, 3);
  need_unambiguous(plan, "x", x);
  need_unambiguous(plan, "weight", w);
  plan.need(
      reads_transposed(x) || one_by_one(x), kInvalid,
      "x must be a packed transposed view with groupType 2, strides (1, M), got strides " +
          routing::shape_text(x.strides));
  plan.need(!reads_transposed(w), kInvalid, "weight must not be transposed with groupType 2");
  const int64_t rows = x.dim(0);
  const int64_t total = x.dim(1);
  const int64_t columns = w.dim(1);
  plan.need(w.dim(0) == total, kInvalid, "x and weight must agree in the dimension that is split");
  need_inner_size(plan, "x", rows);
  need_inner_size(plan, "weight", columns);
  need_shape(plan, kInvalid, "out", out, {out.dim(0), rows, columns});
  need_shape(plan, kInvalid, "groupList", *op.group_list, {out.dim(0)});
  if (out.numel() == 0) {
    plan.nothing_to_do();
    return;
  }

  plan.output(&out); // empty groups are filled with 0
  plan.kernel([x, w, out, list = *op.group_list, type = op.group_list_type, rows, total, columns] {
    const Floats left(x);
    const Floats right(w);
    const Floats result(out);
    const auto groups = groups_of(list, type, total);
    for (int64_t i = 0; i < result.size(); ++i) {
      const auto [begin, end] = groups[i / (rows * columns)];
      const int64_t row = i / columns % rows;
      float sum = 0.0f;
      for (int64_t k = begin; k < end; ++k) {
        sum += left.get(row * total + k) * right.get(k * columns + i % columns);
      }
      result.set(i, sum);
    }
  });
}

} // namespace

void plan_grouped_matmul(Plan& plan, const GroupedMatmul& op) {
  const aclTensor& x = only_tensor(plan, op.x, "x");
  const aclTensor& weight = only_tensor(plan, op.weight, "weight");
  const aclTensor& out = only_tensor(plan, op.out, "out");
  plan.need(op.group_type == 0 || op.group_type == 2, kInvalid, "groupType must be 0 or 2 in this stand-in");
  plan.need(op.split_item == 2 || op.split_item == 3, kInvalid, "splitItem must be 2 or 3 for one output");
  plan.need(op.group_list_type == 0 || op.group_list_type == 1, kInvalid, "groupListType must be 0 or 1");
  plan.need(op.act_type == 0, kInvalid, "actType must be 0 without quantisation");
  plan.need(absent(op.bias), kInvalid, "bias must be absent in this stand-in");
  plan.need(absent(op.scale) && absent(op.offset), kInvalid, "scale and offset must be absent");
  plan.need(absent(op.antiquant_scale) && absent(op.antiquant_offset), kInvalid, "antiquant lists must be absent");
  plan.need(absent(op.per_token_scale), kInvalid, "perTokenScale must be absent");
  plan.need(
      absent(op.activation_input) && absent(op.activation_quant_scale) && absent(op.activation_quant_offset), kInvalid,
      "activation lists must be absent");
  plan.need(absent(op.activation_feature_out), kInvalid, "activationFeatureOut must be absent");
  plan.need(absent(op.dyn_quant_scale_out), kInvalid, "dynQuantScaleOut must be absent");
  routing::need_float(plan, kInvalid, "x", x);
  plan.need(weight.dtype == x.dtype && out.dtype == x.dtype, kInvalid, "x, weight and out must have one dtype");

  plan.need(op.group_list != nullptr, kInvalid, "groupList must not be null");
  const aclTensor& list = *op.group_list;
  plan.need(list.dtype == ACL_INT64, kInvalid, "groupList must be int64");
  need_rank(plan, kInvalid, "groupList", list, 1);
  plan.need(list.dim(0) >= 2, kInvalid, "groupList must have at least 2 groups");
  plan.need(list.dim(0) <= kMaxGroups, kInvalid, "groupList must have at most 1024 groups");

  if (op.group_type == 0) {
    plan_split_m(plan, op, x, weight, out);
  } else {
    plan_split_k(plan, op, x, weight, out);
  }
}

} // namespace standin

STANDIN_API int aclnnGroupedMatmulV4GetWorkspaceSize(
    const aclTensorList* x,
    const aclTensorList* weight,
    const aclTensorList* biasOptional,
    const aclTensorList* scaleOptional,
    const aclTensorList* offsetOptional,
    const aclTensorList* antiquantScaleOptional,
    const aclTensorList* antiquantOffsetOptional,
    const aclTensorList* perTokenScaleOptional,
    const aclTensor* groupListOptional,
    const aclTensorList* activationInputOptional,
    const aclTensorList* activationQuantScaleOptional,
    const aclTensorList* activationQuantOffsetOptional,
    int64_t splitItem,
    int64_t groupType,
    int64_t groupListType,
    int64_t actType,
    aclTensorList* out,
    aclTensorList* activationFeatureOutOptional,
    aclTensorList* dynQuantScaleOutOptional,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return standin::phase1(
      "aclnnGroupedMatmulV4", workspaceSize, executor,
      [&](standin::Plan& plan) {
        standin::plan_grouped_matmul(
            plan, {x, weight, biasOptional, scaleOptional, offsetOptional, antiquantScaleOptional,
                   antiquantOffsetOptional, perTokenScaleOptional, groupListOptional, activationInputOptional,
                   activationQuantScaleOptional, activationQuantOffsetOptional, splitItem, groupType, groupListType,
                   actType, out, activationFeatureOutOptional, dynQuantScaleOutOptional});
      },
      x, weight, biasOptional, scaleOptional, offsetOptional, antiquantScaleOptional, antiquantOffsetOptional,
      perTokenScaleOptional, groupListOptional, activationInputOptional, activationQuantScaleOptional,
      activationQuantOffsetOptional, splitItem, groupType, groupListType, actType, out, activationFeatureOutOptional,
      dynQuantScaleOutOptional);
}
STANDIN_PHASE2(aclnnGroupedMatmulV4)
