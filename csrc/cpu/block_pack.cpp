#include "block_pack.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "row_ops.h"

namespace moe::cpu {
namespace {

// Rows that are turned together: they fill one cache line of the result at a time.
constexpr int64_t kTurned = 16;

// Short runs that lie far apart are read no faster than one at a time unless they are asked for ahead.
constexpr int64_t kAhead = 8;

template <typename T, typename C>
void convert(const T* from, C* to, int64_t count) {
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(to, from, count * sizeof(T));
  } else {
    row_ops<T, C>().convert(to, from, count);
  }
}

template <typename T, typename C>
void pack_turned(const Matrix<T>& from, C* to, int64_t stride) {
  if constexpr (std::is_same_v<T, C>) {
    transpose(from.data, from.col_stride, from.cols, from.rows, to, stride);
  } else {
    constexpr int64_t kLength = 256;
    C lines[kTurned * kLength];
    for (int64_t row = 0; row < from.rows; row += kLength) {
      const int64_t length = std::min(kLength, from.rows - row);
      for (int64_t col = 0; col < from.cols; col += kTurned) {
        const int64_t count = std::min(kTurned, from.cols - col);
        for (int64_t i = 0; i < count; ++i) {
          convert(from.block(row, col + i, length, 1).data, lines + i * kLength, length);
        }
        transpose(lines, kLength, count, length, to + row * stride + col, stride);
      }
    }
  }
}

} // namespace

template <typename T>
void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t cols, T* to, int64_t to_stride) {
  for (int64_t row = 0; row < rows; row += kTurned) {
    const int64_t count = std::min(kTurned, rows - row);
    for (int64_t col = 0; col < cols; ++col) {
      for (int64_t i = 0; i < count; ++i) {
        to[col * to_stride + row + i] = from[(row + i) * from_stride + col];
      }
    }
  }
}

template <typename T, typename C>
void pack_rows(const Matrix<T>& from, C* to, int64_t stride, int64_t padded_cols) {
  if (from.has_dense_rows()) {
    for (int64_t row = 0; row < from.rows; ++row) {
      convert(from.data + row * from.row_stride, to + row * stride, from.cols);
    }
  } else {
    pack_turned(from, to, stride);
  }
  for (int64_t row = 0; row < from.rows; ++row) {
    std::fill(to + row * stride + from.cols, to + row * stride + padded_cols, C(0));
  }
}

void pack_row_pairs(const Matrix<c10::BFloat16>& from, c10::BFloat16* to) {
  const PairRows pair = pair_rows();
  const std::vector<uint16_t> zeros(from.rows % 2 == 0 ? 0 : from.cols);
  const auto* bits = reinterpret_cast<const uint16_t*>(from.data);
  auto* units = reinterpret_cast<uint32_t*>(to);
  for (int64_t row = 0; row < from.rows; row += 2) {
    for (int64_t ahead = row + kAhead; ahead < std::min(row + kAhead + 2, from.rows); ++ahead) {
      prefetch(bits + ahead * from.row_stride, from.cols * sizeof(uint16_t));
    }
    const uint16_t* first = bits + row * from.row_stride;
    pair(units + row / 2 * from.cols, first, row + 1 < from.rows ? first + from.row_stride : zeros.data(), from.cols);
  }
}

template void transpose(const float*, int64_t, int64_t, int64_t, float*, int64_t);
template void pack_rows(const Matrix<float>&, float*, int64_t, int64_t);
template void pack_rows(const Matrix<c10::BFloat16>&, float*, int64_t, int64_t);
template void pack_rows(const Matrix<c10::BFloat16>&, c10::BFloat16*, int64_t, int64_t);
template void pack_rows(const Matrix<c10::Half>&, float*, int64_t, int64_t);

} // namespace moe::cpu
