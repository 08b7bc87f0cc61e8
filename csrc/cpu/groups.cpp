#include "groups.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "../common/parallel.h"
#include "serial_blas.h"

namespace moe::cpu {
namespace {

void check_counts(const ArgChecks& check, const std::vector<int64_t>& counts, int64_t rows) {
  for (size_t g = 0; g < counts.size(); ++g) {
    TORCH_CHECK_VALUE(
        counts[g] >= 0, "moe::", check.op(), ": group_list must be at least 0, got ", counts[g], " at position ", g);
    TORCH_CHECK_VALUE(
        counts[g] <= rows, "moe::", check.op(), ": group_list must be at most the number of rows of x (", rows,
        "), got ", counts[g], " at position ", g);
  }
}

void check_totals(const ArgChecks& check, const std::vector<int64_t>& totals) {
  for (size_t g = 0; g < totals.size(); ++g) {
    const int64_t before = g == 0 ? 0 : totals[g - 1];
    TORCH_CHECK_VALUE(
        totals[g] >= before, "moe::", check.op(), ": group_list must not fall with group_list_type 0, got ", totals[g],
        " after ", before, " at position ", g);
  }
}

// Without instructions for it, torch multiplies float16 on the CPU 7 to 500 times slower than float32, and bfloat16 by
// a plain loop.
bool multiplies_faster_in_float32(at::ScalarType dtype) {
#ifdef __x86_64__
  if (dtype == at::kBFloat16) {
    return !__builtin_cpu_supports("avx512bw");
  }
  if (dtype == at::kHalf) {
    return !__builtin_cpu_supports("avx512fp16");
  }
#endif
  return dtype == at::kHalf;
}

} // namespace

std::vector<int64_t> group_offsets(
    const ArgChecks& check, const Tensor& group_list, int64_t group_list_type, int64_t rows) {
  const Tensor list = group_list.to(at::kLong).contiguous();
  const int64_t* values = list.const_data_ptr<int64_t>();
  const std::vector<int64_t> given(values, values + list.numel());
  std::vector<int64_t> offsets(given.size() + 1, 0);
  if (group_list_type == 1) {
    check_counts(check, given, rows);
    for (size_t g = 0; g < given.size(); ++g) {
      // Saturates: what overflows int64 is refused below like any other excess.
      offsets[g + 1] = offsets[g] + std::min(given[g], std::numeric_limits<int64_t>::max() - offsets[g]);
    }
  } else {
    check_totals(check, given);
    std::copy(given.begin(), given.end(), offsets.begin() + 1);
  }
  TORCH_CHECK_VALUE(
      offsets.back() == rows, "moe::", check.op(), ": group_list must use up the ", rows, " rows of x, got a total of ",
      offsets.back());
  return offsets;
}

std::vector<GroupTask> split_groups(const std::vector<int64_t>& rows, const std::vector<int64_t>& cost_per_row) {
  // Large enough for a BLAS to run at full speed and to hide the packing of its right side, small enough to spread over
  // cores: about 16 stretches in all, where that many rows are there.
  constexpr int64_t kMinRows = 256;
  constexpr int64_t kMinCost = 1 << 23;
  const int64_t share = std::accumulate(rows.begin(), rows.end(), int64_t{0}) / 16;
  const int64_t min_rows = std::max(kMinRows, share);
  std::vector<GroupTask> tasks;
  for (size_t g = 0; g < rows.size(); ++g) {
    const int64_t stretch = std::max(min_rows, kMinCost / std::max<int64_t>(1, cost_per_row[g]));
    const int64_t parts = std::max<int64_t>(1, rows[g] / stretch);
    for (int64_t part = 0; part < parts && rows[g] > 0; ++part) {
      tasks.push_back({static_cast<int64_t>(g), rows[g] * part / parts, rows[g] * (part + 1) / parts});
    }
  }
  return tasks;
}

void run_group_tasks(const std::vector<GroupTask>& tasks, const std::function<void(const GroupTask&)>& body) {
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const SerialBlas serial;
    // Threads of a parallel loop do not inherit the caller's dispatch state: autograd and autocast have been dealt with
    // above this kernel, and must not start again on any of them.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    body(tasks[i]);
  });
}

void matmul_into(const Tensor& left, const Tensor& right, Tensor& out) {
  if (multiplies_faster_in_float32(out.scalar_type())) {
    out.copy_(at::mm(left.to(at::kFloat), right.to(at::kFloat)));
  } else {
    at::mm_out(out, left, right);
  }
}

} // namespace moe::cpu
