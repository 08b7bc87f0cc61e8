#include "groups.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "../common/parallel.h"
#include "block_matmul.h"
#include "processor.h"
#include "serial_blas.h"

namespace moe::cpu {
namespace {

bool multiplies_faster_in_float32(at::ScalarType dtype) {
  return (dtype == at::kBFloat16 && !processor().blas_takes_bfloat16) ||
         (dtype == at::kHalf && !processor().blas_takes_float16);
}

// oneDNN takes bfloat16 in pairs along the depth; where that is odd, the last pair of a row reaches into the next one,
// and on some processors NaN comes with it. A copy of `matrix` with a zero more at the end of `dim`, in the same order.
Tensor with_even_depth(const Tensor& matrix, int64_t dim) {
  const bool by_columns = matrix.stride(0) == 1;
  const Tensor rows = by_columns ? matrix.t() : matrix;
  const int64_t depth_dim = by_columns ? 1 - dim : dim;
  auto sizes = rows.sizes().vec();
  ++sizes[depth_dim];
  Tensor padded = at::zeros(sizes, rows.options());
  padded.narrow(depth_dim, 0, rows.size(depth_dim)).copy_(rows);
  return by_columns ? padded.t() : padded;
}

} // namespace

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
  if (multiplies_in_blocks(left, right, out)) {
    block_matmul(left, right, out);
  } else if (multiplies_faster_in_float32(out.scalar_type())) {
    out.copy_(at::mm(left.to(at::kFloat), right.to(at::kFloat)));
  } else if (out.scalar_type() == at::kBFloat16 && left.size(1) % 2 != 0) {
    at::mm_out(out, with_even_depth(left, 1), with_even_depth(right, 0));
  } else {
    at::mm_out(out, left, right);
  }
}

} // namespace moe::cpu
