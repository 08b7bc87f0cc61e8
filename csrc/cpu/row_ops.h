// Arithmetic on one row, the only code that touches elements: T is the dtype of the rows, A the dtype of the sums
// (float, or double where the rows or their weights are double).
//
// The functions exist once for each instruction set and are chosen at run time (row_ops.cpp). All of them do the same
// operations in the same order, without fused multiply-add, so that results are the same bits on every machine:
// dot() sums 32 interleaved partial sums, then the partial sums in order.
#pragma once

#include <cstdint>

namespace moe::cpu {

template <typename T, typename A>
struct RowOps {
  void (*set)(A* sum, const T* row, int64_t n);                                      // sum = row
  void (*add)(A* sum, const T* row, int64_t n);                                      // sum += row
  void (*add_scaled)(A* sum, const T* row, A weight, int64_t n);                     // sum += weight * row
  void (*add_scaled_pair)(A* sum, const T* row, const T* bias, A weight, int64_t n); // sum += weight * (row + bias)
  void (*round)(T* out, const A* sum, int64_t n);                                    // out = sum
  void (*scale)(T* out, const T* row, A weight, int64_t n);                          // out = weight * row
  A (*dot)(const T* left, const T* right, int64_t n);
  A (*dot_pair)(const T* left, const T* bias, const T* right, int64_t n); // <left + bias, right>
};

// out[i] = first[i] below second[i]: two rows of 16-bit elements, element by element.
using PairRows = void (*)(uint32_t* out, const uint16_t* first, const uint16_t* second, int64_t n);

// The functions for this machine. MOE_OPS_CPU_CAPABILITY=default|avx2|avx512 forces a lower level.
template <typename T, typename A>
const RowOps<T, A>& row_ops();
PairRows pair_rows();

// The name of the level in use.
const char* cpu_capability();

} // namespace moe::cpu
