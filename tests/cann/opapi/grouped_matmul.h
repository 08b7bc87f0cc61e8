// aclnnGroupedMatmulV4 and V5: one implementation. V5 adds tuningConfig, which changes nothing in the result.
//
// Groups of one x, one weight, one out; float32, float16 or bfloat16, accumulated in float32, rounded once:
//   groupType 0: out[rows of e] = x[rows of e] @ weight[e]        x (M, K), weight (E, K, N), out (M, N)
//   groupType 2: out[e] = x[:, columns of e] @ weight[rows of e]  x (M, T), weight (T, N), out (E, M, N)
// groupList, int64 on the device: running totals (groupListType 0) or counts (1). Its values are never checked: rows
// beyond its end are not written (groupType 0), groups that run past the operands are out of bounds.
//
// There is no flag for transposition: a matrix is transposed if its last two strides are exactly (1, rows) with packed
// batches. groupType 0 takes such a weight, but no such x; groupType 2 needs such an x, and no such weight. Other
// strides are copied to dense ones. Sizes of 1 make this ambiguous: what would be read as transposed although it is
// row-major as well is refused (1 x 1 excepted, which reads the same).
//
// Refused as real ones do: lists of less than 2 groups (by the strictest of the documents) or more than 1024, inner
// dimensions above 65535 on A2 and A3, K = 0 with an output to fill, optional lists where there is no quantisation.
// Refused because this stand-in has no need of them: lists of several tensors, groupType -1, groupListType 2, bias.
#pragma once

#include "standin.h"

namespace standin {

struct GroupedMatmul {
  const aclTensorList* x;
  const aclTensorList* weight;
  const aclTensorList* bias;
  const aclTensorList* scale;
  const aclTensorList* offset;
  const aclTensorList* antiquant_scale;
  const aclTensorList* antiquant_offset;
  const aclTensorList* per_token_scale;
  const aclTensor* group_list;
  const aclTensorList* activation_input;
  const aclTensorList* activation_quant_scale;
  const aclTensorList* activation_quant_offset;
  int64_t split_item;
  int64_t group_type;
  int64_t group_list_type;
  int64_t act_type;
  const aclTensorList* out;
  const aclTensorList* activation_feature_out;
  const aclTensorList* dyn_quant_scale_out;
};

void plan_grouped_matmul(Plan& plan, const GroupedMatmul& op);

} // namespace standin
