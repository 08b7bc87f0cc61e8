// grouped_matmul and grouped_matmul_weight_grad on the CPU. Contract: ../grouped_matmul.h.
#include "../grouped_matmul.h"

#include "../../common/registration.h"
#include "../../cpu/group_offsets.h"
#include "../../cpu/groups.h"
#include "../../cpu/large_outputs.h"

namespace moe::cpu {
namespace {

std::vector<int64_t> group_rows(const std::vector<int64_t>& offsets) {
  std::vector<int64_t> rows;
  for (size_t g = 0; g + 1 < offsets.size(); ++g) {
    rows.push_back(offsets[g + 1] - offsets[g]);
  }
  return rows;
}

Tensor grouped_matmul(
    const Tensor& x, const Tensor& weight, const Tensor& group_list, bool trans_weight, int64_t group_list_type) {
  Tensor y = grouped_matmul_output(x, weight, group_list, trans_weight, group_list_type);
  constexpr ArgChecks check("grouped_matmul");
  const auto offsets = group_offsets(check, group_list, group_list_type, x.size(0));
  if (y.numel() == 0) {
    return y; // rows without elements can be far too many to walk through
  }
  use_huge_pages(y);
  const auto rows = group_rows(offsets);
  const Tensor dense_x = x.contiguous();
  const Tensor weight_ekn = trans_weight ? weight.transpose(1, 2) : weight;
  const auto tasks = split_groups(rows, std::vector<int64_t>(rows.size(), x.size(1) * y.size(1)));
  run_group_tasks(tasks, [&](const GroupTask& task) {
    const int64_t first = offsets[task.group] + task.begin;
    Tensor out = y.narrow(0, first, task.end - task.begin);
    matmul_into(dense_x.narrow(0, first, task.end - task.begin), weight_ekn.select(0, task.group), out);
  });
  return y;
}

Tensor grouped_matmul_weight_grad(
    const Tensor& x, const Tensor& grad_y, const Tensor& group_list, bool trans_weight, int64_t group_list_type) {
  Tensor weight_grad = grouped_matmul_weight_grad_output(x, grad_y, group_list, trans_weight, group_list_type);
  constexpr ArgChecks check("grouped_matmul_weight_grad");
  const auto offsets = group_offsets(check, group_list, group_list_type, x.size(0));
  if (weight_grad.numel() == 0) {
    return weight_grad;
  }
  use_huge_pages(weight_grad);
  // weight_grad[e] = left[rows of e]^T @ right[rows of e]: its rows are columns of `left`.
  const Tensor left = (trans_weight ? grad_y : x).contiguous();
  const Tensor right = (trans_weight ? x : grad_y).contiguous();
  std::vector<int64_t> costs = group_rows(offsets);
  for (int64_t& cost : costs) {
    cost *= weight_grad.size(2);
  }
  const auto tasks = split_groups(std::vector<int64_t>(costs.size(), weight_grad.size(1)), costs);
  run_group_tasks(tasks, [&](const GroupTask& task) {
    const int64_t first = offsets[task.group];
    const int64_t rows = offsets[task.group + 1] - first;
    const Tensor columns = left.narrow(0, first, rows).narrow(1, task.begin, task.end - task.begin);
    Tensor out = weight_grad.select(0, task.group).narrow(0, task.begin, task.end - task.begin);
    if (rows == 0) {
      out.zero_();
    } else {
      matmul_into(columns.t(), right.narrow(0, first, rows), out);
    }
  });
  return weight_grad;
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("grouped_matmul", TORCH_FN(moe::cpu::grouped_matmul));
  m.impl("grouped_matmul_weight_grad", TORCH_FN(moe::cpu::grouped_matmul_weight_grad));
}
