// Row maps and expert ids on the CPU: range checks, stable sorting.
#pragma once

#include <cstdint>

#include "../common/checks.h"

namespace moe::cpu {

constexpr int32_t kNoRow = -1;

// The values that an index may have: low up to high, exclusive.
struct IndexRange {
  int64_t low;
  int64_t high;
};

// `sorted_indices` of token_permute and token_unpermute: -1, or a row; rows that were cut off can still be named.
IndexRange sorted_rows(const Tensor& sorted_indices, const Tensor& permuted_tokens);
// `expanded_row_idx` of init_routing_v2 and finalize_routing_v2: dropless rows are in [0, n), those of the drop/pad
// tensor `expanded` (E, C, H) in [-1, E * C).
IndexRange expanded_rows(const Tensor& expanded_row_idx, const Tensor& expanded, bool drop_pad);

// `index` as a contiguous int32 tensor, each value in the range; an IndexError names the first that is not, its
// position and the range. A copy is made only where dtype or strides ask for it.
Tensor checked_index(const ArgChecks& check, const Tensor& index, const char* arg, IndexRange range);

// Raises for the first id below zero.
void check_not_negative(const ArgChecks& check, const Tensor& ids, const char* arg);

// Row of each slot when the slots are sorted by expert id, equal ids in slot order: int32, as long as `expert_ids`.
// Linear in the number of slots where the ids span a range not much larger than it, else n log n.
void stable_rows(const Tensor& expert_ids, int32_t* row_of_slot);

// The slot that names each of `num_rows` rows, kNoRow for a row that no slot names. Slots without a row, or with one
// past the end, are left out. IndexError if two slots name the same row.
Tensor slot_of_row(const ArgChecks& check, const char* arg, const Tensor& row_of_slot, int64_t num_rows);

} // namespace moe::cpu
