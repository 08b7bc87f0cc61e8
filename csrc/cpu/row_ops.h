// Arithmetic on one row, the only code that touches elements: T is the dtype of the rows, A the dtype of the sums
// (float, or double where the rows or their weights are double).
//
// The functions exist once for each instruction set and are chosen at run time (row_ops.cpp). All of them do the same
// operations in the same order, without fused multiply-add, so that results are the same bits on every machine:
// a scalar product is 32 interleaved partial sums (lanes), added up in order.
#pragma once

#include <cstdint>

namespace moe::cpu {

// The part [begin, end) of rows of `size` elements.
struct Stretch {
  int64_t begin;
  int64_t end;
  int64_t size;
};

// What one row adds to a sum: weight * row, or weight * (row + bias) where there is a bias. A weight of 1 changes
// nothing.
template <typename T, typename A>
struct Term {
  const T* row;
  const T* bias;
  A weight;
  // The row that is read after this one, or null. Rows lie anywhere, which no processor foresees: the end of one row is
  // the time to ask for the beginning of the next.
  const T* next;
};

constexpr int64_t kLanes = 32;

template <typename T, typename A>
struct RowOps {
  void (*convert)(A* out, const T* row, int64_t n); // out = row
  void (*round)(T* out, const A* row, int64_t n);   // out = row
  // out = the sum of `count` terms, in their order; out is the place of the stretch.
  void (*combine)(T* out, const Term<T, A>* terms, int64_t count, Stretch stretch);
  // out = weight * grad, and lanes[i % kLanes] += (row + bias) * grad, for the gradient of the weight.
  void (*scatter)(T* out, A* lanes, const Term<T, A>& term, const T* grad, Stretch stretch);
  // out = silu(gate) * up
  void (*swiglu)(T* out, const T* gate, const T* up, int64_t n);
  // gate_grad = grad * up * silu'(gate), up_grad = grad * silu(gate)
  void (*swiglu_grad)(T* gate_grad, T* up_grad, const T* grad, const T* gate, const T* up, int64_t n);
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
