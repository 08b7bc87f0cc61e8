#include "expert_rows.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <numeric>
#include <optional>
#include <vector>

namespace moe::comm {
namespace {

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& rows, bool trans_weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("moe::grouped_matmul", "")
                             .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, bool, int64_t)>();
  return op.call(x, weight, at::tensor(rows, at::kLong).to(x.device()), trans_weight, 1);
}

// As one group, not at::mm: its bits do not depend on the number of threads.
Tensor shared_expert(const ExpertMatmulArgs& args) {
  if (!given(args.mm_x)) {
    return no_output(args.gmm_x);
  }
  return grouped_matmul(*args.mm_x, args.mm_weight->unsqueeze(0), {args.mm_x->size(0)}, args.trans_mm_weight);
}

enum class Order { kRankMajor, kExpertMajor };

// The blocks of (rank, expert) pairs, each in its place of the order that is wanted. counts[rank * experts + expert]
// rows belong to a pair.
Tensor reordered(const Tensor& rows, const Counts& counts, const std::vector<int64_t>& rows_of_pair, Order wanted) {
  if (counts.ranks == 1 || counts.experts <= 1) {
    return rows; // the same order
  }
  // As a matrix of blocks, the source is (outer, inner) and the result its transpose.
  const bool from_ranks = wanted == Order::kExpertMajor;
  const int64_t outer = from_ranks ? counts.ranks : counts.experts;
  const int64_t inner = from_ranks ? counts.experts : counts.ranks;
  std::vector<Tensor> blocks(outer * inner);
  int64_t first = 0;
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) {
      const int64_t size = rows_of_pair[from_ranks ? i * counts.experts + j : j * counts.experts + i];
      blocks[j * outer + i] = rows.narrow(0, first, size);
      first += size;
    }
  }
  return at::cat(blocks);
}

// Sends rank-major rows and returns those received; `meanwhile` runs while they are on their way.
Tensor exchanged(
    const ArgChecks& check,
    const Group& group,
    const Counts& counts,
    const Tensor& rows,
    const std::function<void()>& meanwhile = {}) {
  std::optional<RowExchange> exchange;
  Tensor received = rows;
  if (group.size > 1) {
    const int64_t num_received = std::accumulate(counts.recv.begin(), counts.recv.end(), int64_t{0});
    received = at::empty({num_received, rows.size(1)}, rows.options());
    // Without columns there is nothing to send, and every rank knows.
    if (rows.size(1) > 0) {
      exchange.emplace(check, group, counts, rows.contiguous(), received);
    }
  }
  if (meanwhile) {
    meanwhile();
  }
  if (exchange.has_value()) {
    exchange->finish();
  }
  return received;
}

// Outputs never share memory with an input.
Tensor unshared(const Tensor& output, const Tensor& input) {
  return output.is_alias_of(input) ? input.clone(at::MemoryFormat::Contiguous) : output;
}

// Autograd and autocast have been dealt with above the kernels.
struct BelowAutograd {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

} // namespace

Tensor exchange_expert_rows(
    const ArgChecks& check, const Group& group, const Counts& counts, const Tensor& rows, bool to_experts) {
  const BelowAutograd guards;
  Tensor moved;
  if (to_experts) {
    moved = reordered(exchanged(check, group, counts, rows), counts, counts.recv, Order::kExpertMajor);
  } else {
    moved = exchanged(check, group, counts, reordered(rows, counts, counts.send, Order::kRankMajor));
  }
  return unshared(moved, rows);
}

std::tuple<Tensor, Tensor, Tensor> alltoallv_grouped_matmul(
    const ArgChecks& check,
    const Group& group,
    const Counts& counts,
    const ExpertMatmulArgs& args,
    bool permute_out_flag) {
  const BelowAutograd guards;
  Tensor mm_y;
  Tensor rows = exchanged(check, group, counts, args.gmm_x, [&] { mm_y = shared_expert(args); });
  rows = reordered(rows, counts, counts.recv, Order::kExpertMajor);
  const Tensor gmm_y = grouped_matmul(rows, args.gmm_weight, counts.rows_by_expert(counts.recv), args.trans_gmm_weight);
  return {gmm_y, mm_y, permute_out_flag ? unshared(rows, args.gmm_x) : no_output(args.gmm_x)};
}

std::tuple<Tensor, Tensor> grouped_matmul_alltoallv(
    const ArgChecks& check, const Group& group, const Counts& counts, const ExpertMatmulArgs& args) {
  const BelowAutograd guards;
  const Tensor products =
      grouped_matmul(args.gmm_x, args.gmm_weight, counts.rows_by_expert(counts.send), args.trans_gmm_weight);
  Tensor mm_y;
  const Tensor y = exchanged(check, group, counts, reordered(products, counts, counts.send, Order::kRankMajor), [&] {
    mm_y = shared_expert(args);
  });
  return {y, mm_y};
}

} // namespace moe::comm
