// The three movements of rows that every routing operator on the CPU is made of. Row maps have been range-checked
// before.
//
//   copy_to_rows: rows[map[i]] = tokens[i / K]
//       token_permute, init_routing_v2
//
//   combine_rows: out[t] = skips + sum over k of weight * rows[map[t, k]]
//       token_unpermute, finalize_routing_v2, gradients of token_permute and init_routing_v2
//
//   scatter_rows: rows[map[i]] = weight * grad[i / K], and <row, grad> beside it
//       gradients of token_unpermute and finalize_routing_v2
//
// A slot whose map entry is negative or past the end of the rows takes no part. Work is split by token (copy, combine,
// scatter) so that each output row has one writer: results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "../common/checks.h"
#include "slots.h"

namespace moe::cpu {

// tokens (T, row bytes), contiguous. row_of_slot has T * top_k entries.
void copy_to_rows(const Tensor& tokens, const int32_t* row_of_slot, int64_t top_k, Tensor& rows, int64_t num_rows);

// Fills the rows that no slot names with zeros.
void zero_unnamed_rows(const Tensor& slot_of_row, Tensor& rows);

struct CombineArgs {
  Tensor rows;        // num_rows rows
  Tensor row_of_slot; // int32, T * top_k
  int64_t top_k = 1;
  bool k_major = false;   // slot of (t, k): k * T + t, else t * top_k + k
  OptionalTensor weights; // (T, top_k)
  bool skip_zero_weights = false;
  OptionalTensor x1; // like the output
  OptionalTensor x2;
  OptionalTensor bias;       // (E, H), added to the row of each slot before the weight
  OptionalTensor expert_idx; // int32 (T, top_k)
};

// `output` (T, ...) is written whole.
void combine_rows(const CombineArgs& args, Tensor& output);

struct ScatterArgs {
  Tensor grad;        // (T, ...)
  Tensor row_of_slot; // int32, T * top_k
  int64_t top_k = 1;
  OptionalTensor weights; // (T, top_k)
  OptionalTensor rows;    // forward rows, for the gradient of the weights
  OptionalTensor bias;
  OptionalTensor expert_idx;
};

// rows_grad and weights_grad are written whole; weights_grad is left alone without weights. IndexError with the name
// `arg` if two slots name one row.
void scatter_rows(
    const ArgChecks& check, const char* arg, const ScatterArgs& args, Tensor& rows_grad, Tensor& weights_grad);

} // namespace moe::cpu
