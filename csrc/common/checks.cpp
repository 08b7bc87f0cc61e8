#include "checks.h"

#include <c10/util/Exception.h>

#include <limits>

#include "dtypes.h"

namespace moe {

// Lazily builds the message, so that the good path pays for the condition alone.
#define MOE_CHECK_WITH(MACRO, cond, arg, ...) MACRO(cond, "moe::", op_, ": ", arg, " must ", __VA_ARGS__)

void ArgChecks::defined(const Tensor& tensor, const char* arg) const {
  MOE_CHECK_WITH(TORCH_CHECK_TYPE, tensor.defined(), arg, "be a tensor, got None");
}

void ArgChecks::rank(const Tensor& tensor, const char* arg, int64_t rank) const {
  defined(tensor, arg);
  MOE_CHECK_WITH(TORCH_CHECK_VALUE, tensor.dim() == rank, arg, "be ", rank, "-D, got shape ", tensor.sym_sizes());
}

void ArgChecks::min_rank(const Tensor& tensor, const char* arg, int64_t rank) const {
  defined(tensor, arg);
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, tensor.dim() >= rank, arg, "be at least ", rank, "-D, got shape ", tensor.sym_sizes());
}

void ArgChecks::rank_between(const Tensor& tensor, const char* arg, int64_t low, int64_t high) const {
  defined(tensor, arg);
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, low <= tensor.dim() && tensor.dim() <= high, arg, "be ", low, "-D or ", high, "-D, got shape ",
      tensor.sym_sizes());
}

void ArgChecks::floating(const Tensor& tensor, const char* arg) const {
  defined(tensor, arg);
  MOE_CHECK_WITH(
      TORCH_CHECK_TYPE, is_supported_float(tensor.scalar_type()), arg, "be float32, float64, bfloat16 or float16, got ",
      dtype_name(tensor.scalar_type()));
}

void ArgChecks::integer(const Tensor& tensor, const char* arg) const {
  const auto dtype = tensor.scalar_type();
  MOE_CHECK_WITH(
      TORCH_CHECK_TYPE, dtype == at::kInt || dtype == at::kLong, arg, "be int32 or int64, got ", dtype_name(dtype));
}

void ArgChecks::same_dtype(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_TYPE, tensor.scalar_type() == other.scalar_type(), arg, "have the dtype of ", other_arg, " (",
      dtype_name(other.scalar_type()), "), got ", dtype_name(tensor.scalar_type()));
}

void ArgChecks::same_device(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const {
  MOE_CHECK_WITH(
      TORCH_CHECK, tensor.device() == other.device(), arg, "be on the device of ", other_arg, " (", other.device(),
      "), got ", tensor.device());
}

void ArgChecks::shape(const Tensor& tensor, const char* arg, SymIntArrayRef expected) const {
  bool equal = tensor.dim() == static_cast<int64_t>(expected.size());
  for (size_t i = 0; equal && i < expected.size(); ++i) {
    equal = tensor.sym_size(static_cast<int64_t>(i)).sym_eq(expected[i]).expect_true(__FILE__, __LINE__);
  }
  MOE_CHECK_WITH(TORCH_CHECK_VALUE, equal, arg, "have shape ", expected, ", got ", tensor.sym_sizes());
}

void ArgChecks::size(const Tensor& tensor, const char* arg, int64_t dim, const SymInt& expected) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, tensor.sym_size(dim).sym_eq(expected).expect_true(__FILE__, __LINE__), arg, "have size ",
      expected, " in dimension ", dim, ", got shape ", tensor.sym_sizes());
}

void ArgChecks::is_false(bool value, const char* arg) const {
  MOE_CHECK_WITH(TORCH_CHECK_NOT_IMPLEMENTED, !value, arg, "be False, got True");
}

void ArgChecks::one_of(int64_t value, const char* arg, std::initializer_list<int64_t> allowed) const {
  for (const int64_t candidate : allowed) {
    if (value == candidate) {
      return;
    }
  }
  MOE_CHECK_WITH(TORCH_CHECK_VALUE, false, arg, "be one of ", at::IntArrayRef(allowed), ", got ", value);
}

void ArgChecks::at_least(const SymInt& value, const char* arg, const SymInt& low) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, value.sym_ge(low).expect_true(__FILE__, __LINE__), arg, "be at least ", low, ", got ", value);
}

void ArgChecks::at_most(const SymInt& value, const char* arg, const SymInt& high, const char* meaning) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, value.sym_le(high).expect_true(__FILE__, __LINE__), arg, "be at most ", meaning, " (", high,
      "), got ", value);
}

void ArgChecks::multiple_of(
    const SymInt& value, const char* arg, const SymInt& divisor, const char* divisor_arg) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, (value % divisor).sym_eq(0).expect_true(__FILE__, __LINE__), arg, "be a multiple of ",
      divisor_arg, " (", divisor, "), got ", value);
}

void ArgChecks::even(const SymInt& value, const char* arg) const {
  MOE_CHECK_WITH(TORCH_CHECK_VALUE, (value % 2).sym_eq(0).expect_true(__FILE__, __LINE__), arg, "be even, got ", value);
}

void ArgChecks::element_count(const Tensor& tensor, const char* arg, const SymInt& count, const char* other_arg) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, tensor.sym_numel().sym_eq(count).expect_true(__FILE__, __LINE__), arg,
      "have as many elements as ", other_arg, " (", count, "), got shape ", tensor.sym_sizes());
}

void ArgChecks::present(const OptionalTensor& tensor, const char* arg, const char* because) const {
  MOE_CHECK_WITH(TORCH_CHECK_VALUE, given(tensor), arg, "be given when ", because, " is, got None");
}

void ArgChecks::floating_like(const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const {
  floating(tensor, arg);
  same_dtype(tensor, arg, other, other_arg);
  same_device(tensor, arg, other, other_arg);
}

void ArgChecks::integer_beside(
    const Tensor& tensor, const char* arg, const Tensor& other, const char* other_arg) const {
  integer(tensor, arg);
  same_device(tensor, arg, other, other_arg);
}

void ArgChecks::counts(SymIntArrayRef counts, const char* arg, const SymInt& length) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, length.sym_eq(static_cast<int64_t>(counts.size())).expect_true(__FILE__, __LINE__), arg,
      "have ep_world_size * experts (", length, ") elements, got ", counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    // Small enough for any sum of them to be right.
    const auto fits = counts[i].sym_ge(0).sym_and(counts[i].sym_le(std::numeric_limits<int32_t>::max()));
    MOE_CHECK_WITH(
        TORCH_CHECK_VALUE, fits.expect_true(__FILE__, __LINE__), arg, "be between 0 and 2147483647, got ", counts[i],
        " at position ", i);
  }
}

void ArgChecks::total(const SymInt& sum, const char* arg, const SymInt& rows, const char* rows_arg) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, sum.sym_eq(rows).expect_true(__FILE__, __LINE__), arg, "sum to the number of rows of ",
      rows_arg, " (", rows, "), got ", sum);
}

void ArgChecks::slot_count(const SymInt& slots, const char* arg) const {
  MOE_CHECK_WITH(
      TORCH_CHECK_VALUE, slots.sym_le(std::numeric_limits<int32_t>::max()).expect_true(__FILE__, __LINE__), arg,
      "have at most 2147483647 elements, got ", slots);
}

void ArgChecks::padded_rows(const SymInt& experts, const SymInt& capacity, const char* arg) const {
  slot_count(experts, arg);
  slot_count(capacity, arg);
  slot_count(experts * capacity, arg);
}

#undef MOE_CHECK_WITH

SymSizes with_rows(const Tensor& rows, const SymInt& count) {
  SymSizes sizes(rows.sym_sizes().begin(), rows.sym_sizes().end());
  sizes[0] = count;
  return sizes;
}

} // namespace moe
