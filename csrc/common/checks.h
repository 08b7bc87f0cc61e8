// Argument checks shared by every kernel (CPU, Meta, NPU), so that no way of calling an operator goes round them.
//
// Every message reads `moe::<op>: <argument> must <condition>, got <value>`. Sizes are SymInt: the same code checks
// real sizes and the symbolic ones of torch.compile. Nothing here reads tensor data.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <initializer_list>
#include <optional>

namespace moe {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using SymSizes = c10::SmallVector<SymInt, 6>;
using OptionalTensor = std::optional<Tensor>;

class ArgChecks {
 public:
  explicit constexpr ArgChecks(const char* op) : op_(op) {}

  const char* op() const {
    return op_;
  }

  void rank(const Tensor& tensor, const char* arg, int64_t rank) const;
  void min_rank(const Tensor& tensor, const char* arg, int64_t rank) const;
  void rank_between(const Tensor& tensor, const char* arg, int64_t low, int64_t high) const;
  void floating(const Tensor& tensor, const char* arg) const;
  void integer(const Tensor& tensor, const char* arg) const;
  void same_dtype(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const;
  void same_device(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const;
  void shape(const Tensor& tensor, const char* arg, SymIntArrayRef expected) const;
  // A dimension of `tensor`, checked against the value it has to have.
  void size(const Tensor& tensor, const char* arg, int64_t dim, const SymInt& expected) const;

  void is_false(bool value, const char* arg) const;
  void one_of(int64_t value, const char* arg, std::initializer_list<int64_t> allowed) const;
  void at_least(const SymInt& value, const char* arg, const SymInt& low) const;
  void at_most(const SymInt& value, const char* arg, const SymInt& high, const char* meaning) const;
  void multiple_of(const SymInt& value, const char* arg, const SymInt& divisor, const char* divisor_arg) const;
  void even(const SymInt& value, const char* arg) const;
  // `tensor` has one element for each of the `count` elements of `other_arg`.
  void element_count(const Tensor& tensor, const char* arg, const SymInt& count, const char* other_arg) const;
  // `arg` is given whenever `because` is.
  void present(const OptionalTensor& tensor, const char* arg, const char* because) const;

  // A floating tensor of the dtype and on the device of `other`.
  void floating_like(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const;
  // An int32 or int64 tensor on the device of `other`.
  void integer_beside(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const;
  // One number of rows, of at most int32 size, for each of `length` (peer rank, expert) pairs.
  void counts(SymIntArrayRef counts, const char* arg, const SymInt& length) const;
  // `sum` of the elements of `arg` is the number of rows of `rows_arg`.
  void total(const SymInt& sum, const char* arg, const SymInt& rows, const char* rows_arg) const;
  // The number of slots: it must fit the int32 row maps.
  void slot_count(const SymInt& slots, const char* arg) const;
  // (experts, capacity, H): each factor and the number of rows must fit int32, so that products cannot overflow.
  void padded_rows(const SymInt& experts, const SymInt& capacity, const char* arg) const;

 private:
  void defined(const Tensor& tensor, const char* arg) const;

  const char* op_;
};

// `rows` sizes with another first dimension.
SymSizes with_rows(const Tensor& rows, const SymInt& count);

inline bool given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

} // namespace moe
