// The operators composed of an exchange of rows and a grouped matrix product, on any device.
#pragma once

#include <tuple>

#include "../ops/alltoallv_grouped_matmul.h"
#include "group.h"

namespace moe::comm {

// Rows to the ranks of their experts, expert-major there (`to_experts`), or back from expert-major to rank-major.
Tensor exchange_expert_rows(
    const ArgChecks& check, const Group& group, const Counts& counts, const Tensor& rows, bool to_experts);

// gmm_y, mm_y, permute_out.
std::tuple<Tensor, Tensor, Tensor> alltoallv_grouped_matmul(
    const ArgChecks& check,
    const Group& group,
    const Counts& counts,
    const ExpertMatmulArgs& args,
    bool permute_out_flag);

// y, mm_y.
std::tuple<Tensor, Tensor> grouped_matmul_alltoallv(
    const ArgChecks& check, const Group& group, const Counts& counts, const ExpertMatmulArgs& args);

} // namespace moe::comm
