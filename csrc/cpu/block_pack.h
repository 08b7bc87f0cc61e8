// Copies of matrix blocks in the forms that block_matmul's kernel reads.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace moe::cpu {

inline void prefetch(const void* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(static_cast<const char*>(from) + i);
  }
}

// A matrix in memory. One of the strides is 1.
template <typename T>
struct Matrix {
  const T* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;

  bool has_dense_rows() const {
    return col_stride == 1;
  }

  // Rows that lie one after the other, as a kernel wants them; those of an expanded tensor may all be one.
  bool has_separate_rows() const {
    return has_dense_rows() && row_stride >= cols;
  }

  Matrix transposed() const {
    return {data, cols, rows, col_stride, row_stride};
  }

  Matrix block(int64_t row, int64_t col, int64_t num_rows, int64_t num_cols) const {
    return {data + row * row_stride + col * col_stride, num_rows, num_cols, row_stride, col_stride};
  }
};

// Writes the rows of `from` `stride` elements apart, converted to C, each with zeros up to `padded_cols`.
template <typename T, typename C>
void pack_rows(const Matrix<T>& from, C* to, int64_t stride, int64_t padded_cols);

// Writes (ceil(rows / 2), cols, 2): two rows at a time, element by element; beside a last single row stand zeros. The
// rows of `from` are dense.
void pack_row_pairs(const Matrix<c10::BFloat16>& from, c10::BFloat16* to);

// to[c][r] = from[r][c]; the strides are the steps from row to row, in elements.
template <typename T>
void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t cols, T* to, int64_t to_stride);

} // namespace moe::cpu
