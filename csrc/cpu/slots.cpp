#include "slots.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace moe::cpu {
namespace {

// The first position whose value is bad, or `count`. The whole array is read branch-free first: bad values are rare.
template <typename Index, typename Bad>
int64_t first_bad(const Index* values, int64_t count, const Bad& bad) {
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    any |= bad(values[i]);
  }
  return any ? std::find_if(values, values + count, bad) - values : count;
}

template <typename Index>
void check_range(const ArgChecks& check, const Tensor& index, const char* arg, IndexRange range) {
  const Index* values = index.const_data_ptr<Index>();
  const int64_t bad = first_bad(
      values, index.numel(), [low = range.low, high = range.high](Index v) { return (v < low) | (v >= high); });
  TORCH_CHECK_INDEX(
      bad == index.numel(), "moe::", check.op(), ": ", arg, " must be in [", range.low, ", ", range.high, "), got ",
      values[bad], " at position ", bad);
}

template <typename Id>
void stable_rows_impl(const Id* ids, int64_t count, int32_t* row_of_slot) {
  if (count == 0) {
    return;
  }
  const auto [lowest, highest] = std::minmax_element(ids, ids + count);
  const Id low = *lowest;
  // Unsigned, since the span of two int64 may not fit an int64.
  const uint64_t span =
      static_cast<uint64_t>(static_cast<int64_t>(*highest)) - static_cast<uint64_t>(static_cast<int64_t>(low));
  if (span <= 4 * static_cast<uint64_t>(count) + 1024) {
    std::vector<int32_t> next_row(span + 2, 0);
    for (int64_t i = 0; i < count; ++i) {
      ++next_row[ids[i] - low + 1];
    }
    std::partial_sum(next_row.begin(), next_row.end(), next_row.begin());
    for (int64_t i = 0; i < count; ++i) {
      row_of_slot[i] = next_row[ids[i] - low]++;
    }
    return;
  }
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [ids](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  for (int64_t row = 0; row < count; ++row) {
    row_of_slot[order[row]] = static_cast<int32_t>(row);
  }
}

} // namespace

IndexRange sorted_rows(const Tensor& sorted_indices, const Tensor& permuted_tokens) {
  return {kNoRow, std::max(permuted_tokens.size(0), sorted_indices.numel())};
}

IndexRange expanded_rows(const Tensor& expanded_row_idx, const Tensor& expanded, bool drop_pad) {
  return drop_pad ? IndexRange{kNoRow, expanded.size(0) * expanded.size(1)} : IndexRange{0, expanded_row_idx.numel()};
}

Tensor checked_index(const ArgChecks& check, const Tensor& index, const char* arg, IndexRange range) {
  const Tensor dense = index.contiguous();
  range.high = std::min(range.high, int64_t{1} << 31); // what an int32 can name
  if (dense.scalar_type() == at::kInt) {
    check_range<int32_t>(check, dense, arg, range);
    return dense;
  }
  check_range<int64_t>(check, dense, arg, range);
  return dense.to(at::kInt);
}

void check_not_negative(const ArgChecks& check, const Tensor& ids, const char* arg) {
  const Tensor dense = ids.contiguous().view(-1).to(at::kLong);
  const int64_t* values = dense.const_data_ptr<int64_t>();
  const int64_t bad = first_bad(values, dense.numel(), [](int64_t v) { return v < 0; });
  TORCH_CHECK_INDEX(
      bad == dense.numel(), "moe::", check.op(), ": ", arg, " must be at least 0, got ", values[bad], " at position ",
      bad);
}

void stable_rows(const Tensor& expert_ids, int32_t* row_of_slot) {
  const Tensor dense = expert_ids.contiguous();
  if (dense.scalar_type() == at::kInt) {
    stable_rows_impl(dense.const_data_ptr<int32_t>(), dense.numel(), row_of_slot);
  } else {
    stable_rows_impl(dense.const_data_ptr<int64_t>(), dense.numel(), row_of_slot);
  }
}

Tensor slot_of_row(const ArgChecks& check, const char* arg, const Tensor& row_of_slot, int64_t num_rows) {
  Tensor slots = at::full({num_rows}, kNoRow, row_of_slot.options());
  int32_t* slot = slots.mutable_data_ptr<int32_t>();
  const int32_t* row = row_of_slot.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < row_of_slot.numel(); ++i) {
    if (row[i] < 0 || row[i] >= num_rows) {
      continue;
    }
    int32_t& owner = slot[row[i]];
    TORCH_CHECK_INDEX(
        owner == kNoRow, "moe::", check.op(), ": ", arg, " must name each row at most once, got row ", row[i],
        " at positions ", owner, " and ", i);
    owner = static_cast<int32_t>(i);
  }
  return slots;
}

} // namespace moe::cpu
