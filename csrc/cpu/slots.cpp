#include "slots.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "../common/parallel.h"

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

// Counting sort of ids in [low, low + span]. Slots are cut into parts, each with its own count of every id: part after
// part then knows where its first slot of an id goes, and the result does not depend on the cut.
template <typename Id>
void count_rows(const Id* ids, int64_t count, Id low, int64_t span, int32_t* row_of_slot) {
  constexpr int64_t kSlotsPerPart = 16384;
  constexpr int64_t kMostParts = 32;
  const int64_t values = span + 1;
  // All counts together are fewer than the slots, unless there is one part.
  const int64_t parts = std::clamp(std::min(count / kSlotsPerPart, count / values), int64_t{1}, kMostParts);
  std::vector<int32_t> next_row(parts * values, 0);
  const auto each_slot = [&](int64_t part, const auto& body) {
    int32_t* own = next_row.data() + part * values;
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) {
      body(i, own[ids[i] - low]);
    }
  };
  parallel_tasks(parts, [&](int64_t part) { each_slot(part, [](int64_t, int32_t& slots) { ++slots; }); });
  int32_t row = 0;
  for (int64_t value = 0; value < values; ++value) {
    for (int64_t part = 0; part < parts; ++part) {
      row += std::exchange(next_row[part * values + value], row);
    }
  }
  parallel_tasks(
      parts, [&](int64_t part) { each_slot(part, [&](int64_t i, int32_t& next) { row_of_slot[i] = next++; }); });
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
    count_rows(ids, count, low, static_cast<int64_t>(span), row_of_slot);
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
