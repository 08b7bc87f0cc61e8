#include "block_matmul.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "block_pack.h"
#include "dispatch.h"
#include "large_outputs.h"
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

enum class Instructions { kNone, kFloat, kFloatAndBFloat16 };

Instructions instructions() {
#ifdef __x86_64__
  static const bool has_float = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool has_bfloat16 =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  if (has_float && at::globalContext().userEnabledMkldnn()) {
    return has_bfloat16 ? Instructions::kFloatAndBFloat16 : Instructions::kFloat;
  }
#endif
  return Instructions::kNone;
}

// MKL runs at its full speed on the processors of its maker, and only there.
bool has_fast_blas() {
#ifdef __x86_64__
  static const bool is_intel = __builtin_cpu_is("intel");
  return is_intel;
#else
  return true;
#endif
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

// sums (rows, cols) = left @ right, or += . Each size of the kernel is compiled once in each thread: the sizes are kept
// to a few, so that groups of all sizes do not fill the memory with kernels.
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
      const Matrix<T> strip = left_.block(row, 0, rows, left_.cols);
      if (!reads_left_) {
        pack_rows(strip, buffer(buffers().left, rows * padded_depth_), padded_depth_);
      }
      for (int64_t col = 0; col < right_.cols; col += kCols) {
        multiply_strip(strip, row, col, std::min(kCols, right_.cols - col));
      }
    }
    stream_end();
  }

 private:
  static constexpr bool kPairs = std::is_same_v<C, BFloat16>;

  static Buffers<C>& buffers() {
    static thread_local Buffers<C> memory;
    return memory;
  }

  void multiply_strip(const Matrix<T>& strip, int64_t row, int64_t col, int64_t cols) {
    float* sums = nullptr;
    int64_t sums_stride = cols;
    if constexpr (std::is_same_v<T, float>) {
      if (!turned_ && strip.rows <= kFewRows) {
        sums = out_ + row * out_stride_ + col;
        sums_stride = out_stride_;
      }
    }
    const bool rounds = sums == nullptr;
    if (rounds) {
      sums = buffer(buffers().sums, strip.rows * cols);
    }
    for (int64_t start = 0; start < left_.cols; start += kDepth<C>) {
      const int64_t depth = std::min(kDepth<C>, left_.cols - start);
      const C* left = left_block(strip, start);
      const auto [right, right_stride] = right_block(start, depth, col, cols);
      multiply_block(
          strip.rows, cols, kPairs ? depth + depth % 2 : depth, left, reads_left_ ? left_.row_stride : padded_depth_,
          right, right_stride, sums, sums_stride, start > 0);
    }
    if (rounds) {
      store(sums, row, strip.rows, col, cols);
    }
  }

  const C* left_block(const Matrix<T>& strip, int64_t start) const {
    if constexpr (std::is_same_v<T, C>) {
      if (reads_left_) {
        return strip.data + start;
      }
    }
    return buffers().left.data() + start;
  }

  std::pair<const C*, int64_t> right_block(int64_t start, int64_t depth, int64_t col, int64_t cols) const {
    const Matrix<T> block = right_.block(start, col, depth, cols);
    if constexpr (kPairs) {
      BFloat16* pairs = buffer(buffers().right, (depth + 1) / 2 * 2 * cols);
      pack_row_pairs(block, pairs);
      return {pairs, cols};
    } else {
      if constexpr (std::is_same_v<T, C>) {
        if (block.has_separate_rows() && left_.rows <= kFewRows) {
          return {block.data, block.row_stride};
        }
      }
      C* packed = buffer(buffers().right, depth * cols);
      pack_rows(block, packed, cols);
      return {packed, cols};
    }
  }

  void store(const float* sums, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    if (!turned_) {
      for (int64_t i = 0; i < rows; ++i) {
        store_line(sums + i * cols, out_ + (row + i) * out_stride_ + col, cols);
      }
      return;
    }
    float* lines = buffer(buffers().lines, cols * rows);
    transpose(sums, cols, rows, cols, lines, rows);
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
  int64_t padded_depth_ = kPairs ? left_.cols + left_.cols % 2 : left_.cols;
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
  if (instructions() == Instructions::kNone || left.size(1) == 0 || !has_dense_dimensions) {
    return false;
  }
  switch (out.scalar_type()) {
    case at::kFloat:
      return !has_fast_blas() || std::min(out.size(0), left.size(1)) <= kFewRows;
    case at::kBFloat16:
      // oneDNN's own product is as fast where it finds the pairs, along the depth, side by side in the right factor.
      return instructions() == Instructions::kFloat || (left.stride(1) == 1 && right.stride(1) == 1);
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
      return instructions() == Instructions::kFloatAndBFloat16 ? multiply<BFloat16, BFloat16>(left, right, out)
                                                               : multiply<BFloat16, float>(left, right, out);
    default:
      TORCH_INTERNAL_ASSERT(false, "multiplies_in_blocks comes first");
  }
}

} // namespace moe::cpu
