// The group list of grouped_matmul, read on the CPU. Contract: group_offsets.h.
#include "group_offsets.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

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

} // namespace moe::cpu
