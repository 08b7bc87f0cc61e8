// grouped_matmul and grouped_matmul_weight_grad on the NPU: aclnnGroupedMatmulV5, or V4 where CANN has no V5.
// Contract: ../grouped_matmul.h.
//
// The aclnn operator has no flag for transposition: a matrix whose last two strides are (1, rows) counts as transposed.
// With a size of 1 that is ambiguous, so such matrices get a second row or column of zeros; a single group, which
// releases treat differently, is a plain matrix product.
#include "../grouped_matmul.h"

#include <ATen/ops/mm.h>

#include <algorithm>

#include "../../common/registration.h"
#include "../../cpu/group_offsets.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kForward = "grouped_matmul";
constexpr const char* kWeightGrad = "grouped_matmul_weight_grad";

// Values of the parameters of the same names.
constexpr int64_t kOneOutput = 2;    // splitItem
constexpr int64_t kSplitRows = 0;    // groupType: every group has its rows of x and of the output
constexpr int64_t kSplitInner = 2;   // groupType: every group sums over its columns of x
constexpr int64_t kNoActivation = 0; // actType

struct GroupedProduct {
  const Tensor& x;
  const Tensor& weight;
  const Tensor& group_list;
  int64_t group_type;
  int64_t list_type;
  const Tensor& out;
};

template <typename Version, typename... Tuning>
void launch_version(const char* op, const GroupedProduct& product, const Tuning&... tuning) {
  const auto none = nullptr;
  launch<Version>(
      op, Tensors{product.x}, Tensors{product.weight}, none, none, none, none, none, none, product.group_list, none,
      none, none, kOneOutput, product.group_type, product.list_type, kNoActivation, tuning..., Tensors{product.out},
      none, none);
}

void launch_grouped_matmul(const char* op, const GroupedProduct& product) {
  static const bool kHasV5 = find_symbol(GroupedMatmulV5::kName) != nullptr;
  if (kHasV5) {
    launch_version<GroupedMatmulV5>(op, product, Ints());
  } else {
    launch_version<GroupedMatmulV4>(op, product);
  }
}

void check_limits(const ArgChecks& check, int64_t groups, int64_t in, int64_t out) {
  check_npu_limit(check, groups, "size of group_list in dimension 0", kMaxGroups);
  if (!is_950(check.op())) {
    check_npu_limit(check, in, "number of columns of x", kMaxColumns);
    check_npu_limit(check, out, "number of columns of the output", kMaxColumns);
  }
}

// int64, on the device. The kernels never look at the values; MOE_OPS_CHECK_INDICES=1 does.
Tensor npu_group_list(const ArgChecks& check, const Tensor& group_list, int64_t list_type, int64_t rows) {
  if (checks_indices()) {
    cpu::group_offsets(check, group_list.cpu(), list_type, rows);
  }
  return group_list.to(at::kLong).contiguous();
}

// (E, K, N) as the kernel sees it, from either storage order; sizes of 1 become 2.
Tensor npu_weight(const Tensor& weight, bool trans_weight) {
  const int64_t rows = std::max<int64_t>(weight.size(1), 2);
  const int64_t columns = std::max<int64_t>(weight.size(2), 2);
  const Tensor dense = packed(padded(padded(weight, 1, rows), 2, columns));
  return trans_weight ? dense.transpose(1, 2) : dense;
}

Tensor grouped_matmul(
    const Tensor& x, const Tensor& weight, const Tensor& group_list, bool trans_weight, int64_t group_list_type) {
  Tensor y = grouped_matmul_output(x, weight, group_list, trans_weight, group_list_type);
  constexpr ArgChecks check(kForward);
  check_npu_float(check, x, "x");
  const int64_t groups = weight.size(0);
  const int64_t in = x.size(1);
  const int64_t out = y.size(1);
  if (groups > 1) {
    check_limits(check, groups, in, out);
  }
  const Tensor list = npu_group_list(check, group_list, group_list_type, x.size(0));
  if (y.numel() == 0 || in == 0 || groups == 0) {
    return y.zero_();
  }
  if (groups == 1) {
    return at::mm(x, trans_weight ? weight[0].t() : weight[0]);
  }
  const Tensor product = out == 1 ? at::empty({x.size(0), 2}, x.options()) : y;
  launch_grouped_matmul(
      kForward, {packed(padded(x, 1, std::max<int64_t>(in, 2))), npu_weight(weight, trans_weight), list, kSplitRows,
                 group_list_type, product});
  return out == 1 ? y.copy_(product.narrow(1, 0, 1)) : y;
}

// left^T right for each group of rows: (E, columns of left, columns of right).
Tensor grouped_outer(const Tensor& left, const Tensor& right, const Tensor& list, int64_t list_type, Tensor grad) {
  const int64_t rows = std::max<int64_t>(left.size(1), 2);
  const int64_t columns = std::max<int64_t>(right.size(1), 2);
  const int64_t inner = std::max<int64_t>(left.size(0), 2); // the group list leaves an added row out
  const bool widened = rows != grad.size(1) || columns != grad.size(2);
  const Tensor product = widened ? at::empty({grad.size(0), rows, columns}, grad.options()) : grad;
  launch_grouped_matmul(
      kWeightGrad, {packed(padded(padded(left, 0, inner), 1, rows)).t(),
                    packed(padded(padded(right, 0, inner), 1, columns)), list, kSplitInner, list_type, product});
  return widened ? grad.copy_(product.narrow(1, 0, grad.size(1)).narrow(2, 0, grad.size(2))) : grad;
}

Tensor grouped_matmul_weight_grad(
    const Tensor& x, const Tensor& grad_y, const Tensor& group_list, bool trans_weight, int64_t group_list_type) {
  Tensor grad = grouped_matmul_weight_grad_output(x, grad_y, group_list, trans_weight, group_list_type);
  constexpr ArgChecks check(kWeightGrad);
  check_npu_float(check, x, "x");
  const int64_t groups = grad.size(0);
  if (groups > 1) {
    check_limits(check, groups, x.size(1), grad_y.size(1));
  }
  const Tensor list = npu_group_list(check, group_list, group_list_type, x.size(0));
  if (grad.numel() == 0 || x.size(0) == 0) {
    return grad.zero_();
  }
  const Tensor& left = trans_weight ? grad_y : x;
  const Tensor& right = trans_weight ? x : grad_y;
  if (groups == 1) {
    return at::mm(left.t(), right).unsqueeze(0);
  }
  return grouped_outer(left, right, list, group_list_type, grad);
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("grouped_matmul", TORCH_FN(moe::npu::grouped_matmul));
  m.impl("grouped_matmul_weight_grad", TORCH_FN(moe::npu::grouped_matmul_weight_grad));
}
