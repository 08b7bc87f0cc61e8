#include "move.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "../common/parallel.h"
#include "dispatch.h"
#include "large_outputs.h"
#include "row_ops.h"

namespace moe::cpu {
namespace {

// What is streamed is put together in the first-level cache, a stretch of a row at a time.
constexpr int64_t kStretch = 1024;

int64_t elements_per_row(const Tensor& rows) {
  int64_t elements = 1;
  for (int64_t i = 1; i < rows.dim(); ++i) {
    elements *= rows.size(i);
  }
  return elements;
}

template <typename T>
const T* data_or_null(const OptionalTensor& tensor) {
  return given(tensor) ? tensor->const_data_ptr<T>() : nullptr;
}

OptionalTensor dense(const OptionalTensor& tensor) {
  return given(tensor) ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// The weights in the dtype of the sums: exact, since that dtype holds every weight dtype in use.
OptionalTensor dense_weights(const OptionalTensor& weights, at::ScalarType dtype) {
  return given(weights) ? OptionalTensor(weights->to(dtype).contiguous()) : std::nullopt;
}

void copy_row(void* to, const void* from, int64_t bytes, bool streamed) {
  if (streamed) {
    stream_copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Calls body(place, stretch) for the parts of a row at `out`; what body writes at `place` ends up in the row.
template <typename T, typename Body>
void write_row(T* out, int64_t row_size, bool streamed, const Body& body) {
  if (!streamed) {
    body(out, Stretch{0, row_size, row_size});
    return;
  }
  alignas(kStreamAlignment) T buffer[kStretch];
  for (int64_t begin = 0; begin < row_size; begin += kStretch) {
    const int64_t end = std::min(row_size, begin + kStretch);
    body(buffer, Stretch{begin, end, row_size});
    stream_copy(out + begin, buffer, (end - begin) * sizeof(T));
  }
}

template <typename T, typename A>
class Combiner {
 public:
  Combiner(const CombineArgs& args, int64_t num_tokens, int64_t row_size, bool streamed)
      : rows_(args.rows.const_data_ptr<T>()),
        num_rows_(args.rows.numel() / std::max<int64_t>(row_size, 1)),
        row_of_slot_(args.row_of_slot.const_data_ptr<int32_t>()),
        weights_(data_or_null<A>(args.weights)),
        x1_(data_or_null<T>(args.x1)),
        x2_(data_or_null<T>(args.x2)),
        bias_(data_or_null<T>(args.bias)),
        expert_idx_(data_or_null<int32_t>(args.expert_idx)),
        skip_zero_weights_(args.skip_zero_weights),
        num_tokens_(num_tokens),
        top_k_(args.top_k),
        token_stride_(args.k_major ? 1 : args.top_k),
        choice_stride_(args.k_major ? num_tokens : 1),
        row_size_(row_size),
        streamed_(streamed) {}

  using Terms = std::vector<Term<T, A>>;

  // `terms` is memory to work in.
  void token(int64_t t, T* out, Terms& terms) const {
    terms.clear();
    for (const T* skip : {x1_, x2_}) {
      if (skip != nullptr) {
        terms.push_back(plain(skip + t * row_size_));
      }
    }
    for (int64_t k = 0; k < top_k_; ++k) {
      append_choice(t, k, terms);
    }
    write_row(out, row_size_, streamed_, [&](T* place, Stretch stretch) {
      ops_.combine(place, terms.data(), static_cast<int64_t>(terms.size()), stretch);
    });
  }

 private:
  static Term<T, A> plain(const T* row) {
    return {row, nullptr, A(1), nullptr};
  }

  // Null where the slot has no row.
  const T* row_of(int64_t t, int64_t k) const {
    const int64_t row = t < num_tokens_ ? row_of_slot_[t * token_stride_ + k * choice_stride_] : kNoRow;
    return row < 0 || row >= num_rows_ ? nullptr : rows_ + row * row_size_;
  }

  void append_choice(int64_t t, int64_t k, Terms& terms) const {
    const T* row = row_of(t, k);
    if (row == nullptr) {
      return;
    }
    const T* bias = bias_ == nullptr ? nullptr : bias_ + expert_idx_[t * top_k_ + k] * row_size_;
    if (weights_ == nullptr) {
      terms.push_back(plain(row));
      terms.back().next = row_of(t + 1, k);
      if (bias != nullptr) {
        terms.push_back(plain(bias));
      }
      return;
    }
    const A weight = weights_[t * top_k_ + k];
    if (!skip_zero_weights_ || weight != A(0)) {
      terms.push_back({row, bias, weight, row_of(t + 1, k)});
    }
  }

  const RowOps<T, A>& ops_ = row_ops<T, A>();
  const T* rows_;
  int64_t num_rows_;
  const int32_t* row_of_slot_;
  const A* weights_;
  const T* x1_;
  const T* x2_;
  const T* bias_;
  const int32_t* expert_idx_;
  bool skip_zero_weights_;
  int64_t num_tokens_;
  int64_t top_k_;
  int64_t token_stride_;
  int64_t choice_stride_;
  int64_t row_size_;
  bool streamed_;
};

template <typename T, typename A>
class Scatterer {
 public:
  Scatterer(const ScatterArgs& args, int64_t num_rows, int64_t row_size, T* rows_grad, bool streamed)
      : grad_(args.grad.const_data_ptr<T>()),
        row_of_slot_(args.row_of_slot.const_data_ptr<int32_t>()),
        num_slots_(args.row_of_slot.numel()),
        weights_(data_or_null<A>(args.weights)),
        rows_(data_or_null<T>(args.rows)),
        bias_(data_or_null<T>(args.bias)),
        expert_idx_(data_or_null<int32_t>(args.expert_idx)),
        num_rows_(num_rows),
        top_k_(args.top_k),
        row_size_(row_size),
        rows_grad_(rows_grad),
        streamed_(streamed) {}

  // Returns the gradient of the slot's weight (0 for a slot without a row).
  A slot(int64_t t, int64_t k) const {
    const int64_t i = t * top_k_ + k;
    const int64_t row = row_of(i);
    if (row == kNoRow) {
      return A(0);
    }
    const T* grad = grad_ + t * row_size_;
    T* target = rows_grad_ + row * row_size_;
    if (weights_ == nullptr) {
      copy_row(target, grad, row_size_ * sizeof(T), streamed_);
      return A(0);
    }
    const int64_t next = row_of(i + 1);
    const Term<T, A> term{
        rows_ + row * row_size_, bias_ == nullptr ? nullptr : bias_ + expert_idx_[i] * row_size_, weights_[i],
        next == kNoRow ? nullptr : rows_ + next * row_size_};
    A lanes[kLanes] = {};
    write_row(target, row_size_, streamed_, [&](T* place, Stretch stretch) {
      ops_.scatter(place, lanes, term, grad, stretch);
    });
    return std::accumulate(lanes, lanes + kLanes, A(0));
  }

 private:
  int64_t row_of(int64_t slot) const {
    const int64_t row = slot < num_slots_ ? row_of_slot_[slot] : kNoRow;
    return row < 0 || row >= num_rows_ ? kNoRow : row;
  }

  const RowOps<T, A>& ops_ = row_ops<T, A>();
  const T* grad_;
  const int32_t* row_of_slot_;
  int64_t num_slots_;
  const A* weights_;
  const T* rows_;
  const T* bias_;
  const int32_t* expert_idx_;
  int64_t num_rows_;
  int64_t top_k_;
  int64_t row_size_;
  T* rows_grad_;
  bool streamed_;
};

} // namespace

void copy_to_rows(const Tensor& tokens, const int32_t* row_of_slot, int64_t top_k, Tensor& rows, int64_t num_rows) {
  const Tensor source = tokens.contiguous();
  const int64_t row_bytes = elements_per_row(source) * source.element_size();
  if (row_bytes == 0) {
    return;
  }
  const char* from = static_cast<const char*>(source.const_data_ptr());
  use_huge_pages(rows);
  const bool streamed = streams(rows, row_bytes);
  char* to = static_cast<char*>(rows.mutable_data_ptr());
  parallel_rows(source.size(0), elements_per_row(source) * top_k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t row = row_of_slot[t * top_k + k];
        if (row >= 0 && row < num_rows) {
          copy_row(to + row * row_bytes, from + t * row_bytes, row_bytes, streamed);
        }
      }
    }
    stream_end();
  });
}

void zero_unnamed_rows(const Tensor& slot_of_row, Tensor& rows) {
  const int64_t num_rows = slot_of_row.numel();
  const int64_t row_bytes = num_rows == 0 ? 0 : rows.numel() / num_rows * rows.element_size();
  if (row_bytes == 0) {
    return;
  }
  const int32_t* slot = slot_of_row.const_data_ptr<int32_t>();
  char* to = static_cast<char*>(rows.mutable_data_ptr());
  parallel_rows(num_rows, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (slot[row] == kNoRow) {
        std::memset(to + row * row_bytes, 0, row_bytes);
      }
    }
  });
}

void combine_rows(const CombineArgs& args, Tensor& output) {
  const auto sums = accumulation_dtype(args.rows, args.weights);
  CombineArgs ready = args;
  ready.rows = args.rows.contiguous();
  ready.weights = dense_weights(args.weights, sums);
  ready.x1 = dense(args.x1);
  ready.x2 = dense(args.x2);
  ready.bias = dense(args.bias);
  const int64_t num_tokens = output.size(0);
  const int64_t row_size = elements_per_row(output);
  use_huge_pages(output);
  dispatch_rows_and_sums(output.scalar_type(), sums, [&](auto row_tag, auto sum_tag) {
    using T = typename decltype(row_tag)::type;
    const bool streamed = streams(output, row_size * static_cast<int64_t>(sizeof(T)));
    const Combiner<T, typename decltype(sum_tag)::type> combiner(ready, num_tokens, row_size, streamed);
    T* out = output.mutable_data_ptr<T>();
    parallel_rows(num_tokens, row_size * (args.top_k + 1), [&](int64_t begin, int64_t end) {
      typename decltype(combiner)::Terms terms;
      for (int64_t t = begin; t < end; ++t) {
        combiner.token(t, out + t * row_size, terms);
      }
      stream_end();
    });
  });
}

void scatter_rows(
    const ArgChecks& check, const char* arg, const ScatterArgs& args, Tensor& rows_grad, Tensor& weights_grad) {
  const int64_t row_size = elements_per_row(args.grad);
  const int64_t num_rows =
      rows_grad.dim() == 3 && args.grad.dim() == 2 ? rows_grad.size(0) * rows_grad.size(1) : rows_grad.size(0);
  const Tensor slots = slot_of_row(check, arg, args.row_of_slot, num_rows);
  use_huge_pages(rows_grad);
  zero_unnamed_rows(slots, rows_grad);

  const auto sums = accumulation_dtype(args.grad, args.weights);
  ScatterArgs ready = args;
  ready.grad = args.grad.contiguous();
  ready.weights = dense_weights(args.weights, sums);
  const bool weighted = given(args.weights);
  // The rows are read for the gradient of the weights alone.
  ready.rows = weighted ? dense(args.rows) : std::nullopt;
  ready.bias = dense(args.bias);
  const int64_t num_tokens = args.grad.size(0);
  const bool rounded = weighted && weights_grad.scalar_type() != sums;
  Tensor products = rounded ? at::empty(weights_grad.sizes(), args.grad.options().dtype(sums)) : weights_grad;
  dispatch_rows_and_sums(args.grad.scalar_type(), sums, [&](auto row_tag, auto sum_tag) {
    using T = typename decltype(row_tag)::type;
    using A = typename decltype(sum_tag)::type;
    const bool streamed = streams(rows_grad, row_size * static_cast<int64_t>(sizeof(T)));
    const Scatterer<T, A> scatterer(ready, num_rows, row_size, rows_grad.mutable_data_ptr<T>(), streamed);
    A* product = weighted ? products.mutable_data_ptr<A>() : nullptr;
    parallel_rows(num_tokens, row_size * (2 * args.top_k + 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t k = 0; k < args.top_k; ++k) {
          const A weight_grad = scatterer.slot(t, k);
          if (product != nullptr) {
            product[t * args.top_k + k] = weight_grad;
          }
        }
      }
      stream_end();
    });
  });
  if (rounded) {
    weights_grad.copy_(products);
  }
}

} // namespace moe::cpu
