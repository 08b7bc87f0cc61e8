// swiglu and swiglu_grad on the CPU: one pass over stretches of rows. Contract: ../swiglu.h.
#include "../swiglu.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../../common/registration.h"
#include "../../cpu/dispatch.h"
#include "../../cpu/large_outputs.h"
#include "../../cpu/row_ops.h"

namespace moe::cpu {
namespace {

// Calls body(row, begin, count) for stretches of rows of `width`. Threads share out the stretches, not the rows: one
// long row is work for all of them too. Stores are ordinary ones: streamed past the caches they took longer, since
// there is arithmetic to do while lines of the output are read.
template <typename Body>
void for_each_stretch(int64_t rows, int64_t width, int64_t tensors, const Body& body) {
  constexpr int64_t kStretch = 1024;
  const int64_t per_row = (width + kStretch - 1) / kStretch;
  parallel_rows(rows * per_row, std::min(width, kStretch) * tensors, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % per_row * kStretch;
      body(i / per_row, begin, std::min(kStretch, width - begin));
    }
  });
}

template <typename T, typename A>
void forward(const Tensor& x, const Tensor& output, int64_t width) {
  const RowOps<T, A>& ops = row_ops<T, A>();
  const T* from = x.const_data_ptr<T>();
  T* to = output.mutable_data_ptr<T>();
  for_each_stretch(output.numel() / width, width, 3, [&](int64_t row, int64_t begin, int64_t n) {
    const T* gate = from + row * 2 * width + begin;
    ops.swiglu(to + row * width + begin, gate, gate + width, n);
  });
}

template <typename T, typename A>
void backward(const Tensor& grad_output, const Tensor& x, const Tensor& x_grad, int64_t width) {
  const RowOps<T, A>& ops = row_ops<T, A>();
  const T* from = x.const_data_ptr<T>();
  const T* grads = grad_output.const_data_ptr<T>();
  T* to = x_grad.mutable_data_ptr<T>();
  for_each_stretch(grad_output.numel() / width, width, 5, [&](int64_t row, int64_t begin, int64_t n) {
    const int64_t place = row * 2 * width + begin;
    const T* gate = from + place;
    ops.swiglu_grad(to + place, to + place + width, grads + row * width + begin, gate, gate + width, n);
  });
}

Tensor swiglu(const Tensor& x) {
  Tensor output = swiglu_output(x);
  if (output.numel() == 0) {
    return output;
  }
  use_huge_pages(output);
  const Tensor dense = x.contiguous();
  dispatch_rows_and_sums(x.scalar_type(), accumulation_dtype(x, std::nullopt), [&](auto row_tag, auto sum_tag) {
    forward<typename decltype(row_tag)::type, typename decltype(sum_tag)::type>(dense, output, output.size(-1));
  });
  return output;
}

Tensor swiglu_grad(const Tensor& grad_output, const Tensor& x) {
  Tensor x_grad = swiglu_grad_output(grad_output, x);
  if (x_grad.numel() == 0) {
    return x_grad;
  }
  use_huge_pages(x_grad);
  const Tensor dense_grad = grad_output.contiguous();
  const Tensor dense = x.contiguous();
  dispatch_rows_and_sums(x.scalar_type(), accumulation_dtype(x, std::nullopt), [&](auto row_tag, auto sum_tag) {
    backward<typename decltype(row_tag)::type, typename decltype(sum_tag)::type>(
        dense_grad, dense, x_grad, grad_output.size(-1));
  });
  return x_grad;
}

} // namespace
} // namespace moe::cpu

MOE_KERNELS(CPU, m) {
  m.impl("swiglu", TORCH_FN(moe::cpu::swiglu));
  m.impl("swiglu_grad", TORCH_FN(moe::cpu::swiglu_grad));
}
