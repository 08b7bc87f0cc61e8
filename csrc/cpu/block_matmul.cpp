#include "block_matmul.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "block_pack.h"
#include "large_outputs.h"
#include "processor.h"
#include "row_ops.h"

namespace moe::cpu {
namespace {

using c10::BFloat16;

// The block of the right factor (kDepth x kCols) stays in the second-level cache while the rows of the left one go by.
constexpr int64_t kCols = 256;
template <typename C>
constexpr int64_t kDepth = 1024 / sizeof(C);
// Rows of the left factor that are taken at a time: fewer if they are copied, so that the copy stays small.
constexpr int64_t kRows = 512;
constexpr int64_t kCopiedRows = 128;
// With so few rows, a block of the right factor is not used often enough to be worth a copy. With more it is: rows that
// lie a power of two apart fall on the same places in a cache and push each other out, in the right factor and in
// `out`.
constexpr int64_t kFewRows = 64;
constexpr int64_t kLine = 16; // float32 numbers in a cache line

// Whether blocks of bfloat16 are worth it. With tile registers they have not been measured: there oneDNN's product
// serves.
bool multiplies_pairs() {
  return processor().has_bfloat16 && !processor().has_tiles;
}

template <typename T>
Matrix<T> matrix_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

// Memory of one thread, kept from call to call: fresh pages would cost as much as a small product.
template <typename V>
V* buffer(std::vector<V>& memory, int64_t count) {
  if (memory.size() < static_cast<size_t>(count)) {
    memory.resize(count);
  }
  return memory.data();
}

template <typename C>
struct Buffers {
  std::vector<C> left;
  std::vector<C> right;
  std::vector<float> sums;
  std::vector<float> lines;
};

// sums (rows, cols) = left @ right, or += . The kernel is compiled once in each thread for every set of sizes and
// strides, and never forgotten: of those that come from the size of a group there may be only a few, or training would
// fill the memory with kernels.
template <typename C>
void multiply_block(
    int64_t rows,
    int64_t cols,
    int64_t depth,
    const C* left,
    int64_t left_stride,
    const C* right,
    int64_t right_stride,
    float* sums,
    int64_t sums_stride,
    bool add) {
  constexpr bool kPairs = std::is_same_v<C, BFloat16>;
  constexpr int64_t kMany = 64;
  constexpr int64_t kSome = 16;
  for (int64_t row = 0; row < rows;) {
    const int64_t left_over = rows - row;
    const int64_t taken = left_over >= kMany ? kMany : left_over >= kSome ? left_over / kSome * kSome : left_over;
    for (int64_t next = row + taken; next < std::min(rows, row + 2 * taken); ++next) {
      prefetch(left + next * left_stride, depth * sizeof(C));
    }
    at::native::cpublas::brgemm(
        taken, cols, depth, left_stride, right_stride, sums_stride, add, left + row * left_stride, right,
        sums + row * sums_stride, kPairs);
    row += taken;
  }
}

// T: the dtype of the factors and the result; C: that of the kernel.
template <typename T, typename C>
class BlockProduct {
 public:
  // out^T is written where `turned`.
  BlockProduct(const Matrix<T>& left, const Matrix<T>& right, T* out, int64_t out_stride, bool streamed, bool turned)
      : left_(left), right_(right), out_(out), out_stride_(out_stride), streamed_(streamed), turned_(turned) {}

  void run() {
    const int64_t most = reads_left_ ? kRows : kCopiedRows;
    for (int64_t row = 0; row < left_.rows; row += most) {
      const int64_t rows = std::min(most, left_.rows - row);
      if (!reads_left_) {
        pack_left(row, rows);
      }
      for (int64_t col = 0; col < right_.cols; col += kCols) {
        multiply_strip(row, rows, col, std::min(kCols, right_.cols - col));
      }
    }
    stream_end();
    at::native::cpublas::brgemm_release(kPairs); // the tile registers of processors with AMX
  }

 private:
  static constexpr bool kPairs = std::is_same_v<C, BFloat16>;

  // A factor as the kernel reads it.
  struct Block {
    const C* data;
    int64_t stride;
  };

  static Buffers<C>& buffers() {
    static thread_local Buffers<C> memory;
    return memory;
  }

  static int64_t round_up(int64_t size, int64_t step) {
    return (size + step - 1) / step * step;
  }

  // The depth of a block that starts at `start`, and with zeros at its end where both factors are copies.
  int64_t depth(int64_t start) const {
    return std::min(kDepth<C>, left_.cols - start);
  }

  int64_t padded_depth(int64_t start) const {
    return reads_left_ ? depth(start) : round_up(depth(start), kLine);
  }

  // Block after block of the depth, padded_depth(0) elements from row to row.
  void pack_left(int64_t row, int64_t rows) const {
    C* to = buffer(buffers().left, rows * round_up(left_.cols, padded_depth(0)));
    for (int64_t start = 0; start < left_.cols; start += kDepth<C>) {
      pack_rows(left_.block(row, start, rows, depth(start)), to + rows * start, padded_depth(0), padded_depth(start));
    }
  }

  void multiply_strip(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    const bool copies_right =
        kPairs || !std::is_same_v<T, C> || !reads_left_ || left_.rows > kFewRows || !right_.has_separate_rows();
    const int64_t padded_cols = copies_right && !kPairs ? round_up(cols, kLine) : cols;
    float* sums = nullptr;
    int64_t sums_stride = padded_cols;
    if constexpr (std::is_same_v<T, float>) {
      if (!turned_ && !copies_right) {
        sums = out_ + row * out_stride_ + col;
        sums_stride = out_stride_;
      }
    }
    const bool rounds = sums == nullptr;
    if (rounds) {
      sums = buffer(buffers().sums, rows * padded_cols);
    }
    for (int64_t start = 0; start < left_.cols; start += kDepth<C>) {
      const Block left = left_block(row, rows, start);
      const Block right = copies_right ? copied_right(start, col, cols, padded_cols) : right_block(start, col);
      multiply_block(
          rows, padded_cols, padded_depth(start), left.data, left.stride, right.data, right.stride, sums, sums_stride,
          start > 0);
    }
    if (rounds) {
      store(sums, sums_stride, row, rows, col, cols);
    }
  }

  Block left_block(int64_t row, int64_t rows, int64_t start) const {
    if constexpr (std::is_same_v<T, C>) {
      if (reads_left_) {
        return {left_.block(row, start, 1, 1).data, left_.row_stride};
      }
    }
    return {buffers().left.data() + rows * start, padded_depth(0)};
  }

  Block right_block(int64_t start, int64_t col) const {
    if constexpr (std::is_same_v<T, C>) {
      return {right_.block(start, col, 1, 1).data, right_.row_stride};
    }
    return {};
  }

  Block copied_right(int64_t start, int64_t col, int64_t cols, int64_t padded_cols) const {
    const Matrix<T> block = right_.block(start, col, depth(start), cols);
    const int64_t rows = padded_depth(start);
    C* to = buffer(buffers().right, rows * padded_cols);
    if constexpr (kPairs) {
      pack_row_pairs(block, to);
    } else {
      pack_rows(block, to, padded_cols, padded_cols);
    }
    const int64_t packed = kPairs ? round_up(block.rows, 2) : block.rows;
    std::fill(to + packed * padded_cols, to + rows * padded_cols, C(0));
    return {to, padded_cols};
  }

  void store(const float* sums, int64_t sums_stride, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    if (!turned_) {
      for (int64_t i = 0; i < rows; ++i) {
        store_line(sums + i * sums_stride, out_ + (row + i) * out_stride_ + col, cols);
      }
      return;
    }
    float* lines = buffer(buffers().lines, cols * rows);
    transpose(sums, sums_stride, rows, cols, lines, rows);
    for (int64_t i = 0; i < cols; ++i) {
      store_line(lines + i * rows, out_ + (col + i) * out_stride_ + row, rows);
    }
  }

  void store_line(const float* sums, T* to, int64_t count) const {
    const auto& ops = row_ops<T, float>();
    if (!streamed_ || count * sizeof(T) % kStreamAlignment != 0 ||
        reinterpret_cast<uintptr_t>(to) % kStreamAlignment != 0) {
      ops.round(to, sums, count);
      return;
    }
    alignas(kStreamAlignment) T rounded[kRows];
    ops.round(rounded, sums, count);
    stream_copy(to, rounded, count * sizeof(T));
  }

  Matrix<T> left_;
  Matrix<T> right_;
  T* out_;
  int64_t out_stride_;
  bool streamed_;
  bool turned_;
  // The kernel reads pairs along the depth: where it is odd, rows are copied with a zero at their end.
  bool reads_left_ = std::is_same_v<T, C> && left_.has_separate_rows() && !(kPairs && left_.cols % 2 != 0);
};

template <typename T, typename C>
void multiply(const Tensor& left, const Tensor& right, Tensor& out) {
  const auto a = matrix_of<T>(left);
  const auto b = matrix_of<T>(right);
  T* target = out.mutable_data_ptr<T>();
  const bool streamed = outgrows_caches(out);
  // The kernel reads the right factor row by row. One that lies by columns is the left factor of the transposed
  // product.
  if (b.has_dense_rows()) {
    BlockProduct<T, C>(a, b, target, out.stride(0), streamed, false).run();
  } else {
    BlockProduct<T, C>(b.transposed(), a.transposed(), target, out.stride(0), streamed, true).run();
  }
}

} // namespace

bool multiplies_in_blocks(const Tensor& left, const Tensor& right, const Tensor& out) {
  const bool has_dense_dimensions =
      (left.stride(0) == 1 || left.stride(1) == 1) && (right.stride(0) == 1 || right.stride(1) == 1);
  if (!processor().has_blocks || !at::globalContext().userEnabledMkldnn() || left.size(1) == 0 ||
      !has_dense_dimensions) {
    return false;
  }
  switch (out.scalar_type()) {
    case at::kFloat:
      return !processor().blas_is_fast || std::min(out.size(0), left.size(1)) <= kFewRows;
    case at::kBFloat16:
      // oneDNN's own product is as fast where it finds the pairs, along the depth, side by side in the right factor.
      return !processor().has_bfloat16 || (multiplies_pairs() && left.stride(1) == 1 && right.stride(1) == 1);
    case at::kHalf:
      return true;
    default:
      return false;
  }
}

void block_matmul(const Tensor& left, const Tensor& right, Tensor& out) {
  switch (out.scalar_type()) {
    case at::kFloat:
      return multiply<float, float>(left, right, out);
    case at::kHalf:
      return multiply<c10::Half, float>(left, right, out);
    case at::kBFloat16:
      return multiplies_pairs() ? multiply<BFloat16, BFloat16>(left, right, out)
                                : multiply<BFloat16, float>(left, right, out);
    default:
      TORCH_INTERNAL_ASSERT(false, "multiplies_in_blocks comes first");
  }
}

} // namespace moe::cpu
