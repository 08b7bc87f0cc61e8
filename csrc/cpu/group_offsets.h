// The group list of grouped_matmul, read on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/checks.h"

namespace moe::cpu {

// First row of each group, and one past the last row: E + 1 values. ValueError unless the groups use up `rows` exactly.
std::vector<int64_t> group_offsets(
    const ArgChecks& check, const Tensor& group_list, int64_t group_list_type, int64_t rows);

} // namespace moe::cpu
