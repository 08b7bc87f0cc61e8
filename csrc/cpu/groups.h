// The work of grouped_matmul on the CPU: its split into tasks, and the product that each of them is.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "../common/checks.h"

namespace moe::cpu {

// A stretch [begin, end) of the output rows of one group.
struct GroupTask {
  int64_t group;
  int64_t begin;
  int64_t end;
};

// Cuts the `rows[g]` output rows of every group into stretches. The cut depends on the sizes alone, never on the number
// of threads. `cost_per_row`: multiply-adds for one output row.
std::vector<GroupTask> split_groups(const std::vector<int64_t>& rows, const std::vector<int64_t>& cost_per_row);

// Calls body(task) for every task, in parallel, each wholly on one thread and below autograd and autocast.
void run_group_tasks(const std::vector<GroupTask>& tasks, const std::function<void(const GroupTask&)>& body);

// out = left @ right, all 2-D, in one rounding to the dtype of `out`.
void matmul_into(const Tensor& left, const Tensor& right, Tensor& out);

} // namespace moe::cpu
