// What the NPU wrappers do to arguments. Contract: inputs.h.
#include "inputs.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/masked_fill.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "../common/dtypes.h"

namespace moe::npu {

void check_npu_float(const ArgChecks& check, const Tensor& tensor, const char* arg) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.scalar_type() != at::kDouble, "moe::", check.op(), ": ", arg,
      " must be float32, bfloat16 or float16 on an NPU, got ", dtype_name(tensor.scalar_type()));
}

void check_npu_float(const ArgChecks& check, const OptionalTensor& tensor, const char* arg) {
  if (given(tensor)) {
    check_npu_float(check, *tensor, arg);
  }
}

void check_npu_limit(const ArgChecks& check, int64_t value, const char* arg, int64_t limit) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      value <= limit, "moe::", check.op(), ": ", arg, " must be at most ", limit, " on this NPU, got ", value);
}

Tensor as_int32(const Tensor& index) {
  return index.to(at::kInt);
}

void check_range(const ArgChecks& check, const Tensor& index, const char* arg, IndexRange range) {
  if (index.numel() == 0 || (range.low < range.high && !checks_indices())) {
    return;
  }
  const Tensor wrong = at::logical_or(at::lt(index, range.low), at::ge(index, range.high));
  if (wrong.any().item<bool>()) {
    cpu::checked_index(check, index.cpu(), arg, range); // says which, in the words of the CPU kernel
  }
}

void check_not_negative(const ArgChecks& check, const Tensor& ids, const char* arg) {
  if (checks_indices()) {
    cpu::check_not_negative(check, ids.cpu(), arg);
  }
}

void check_named_once(const ArgChecks& check, const Tensor& index, const char* arg, int64_t rows) {
  if (checks_indices()) {
    cpu::slot_of_row(check, arg, as_int32(index.cpu()).contiguous(), rows);
  }
}

Tensor clamped(const Tensor& index, IndexRange range) {
  return as_int32(
      at::clamp(index, range.low, range.high - 1)); // in the dtype of the index: int64 values may not fit an int32
}

Tensor skip_negative(const Tensor& row_map, int64_t end) {
  return at::masked_fill(row_map, at::lt(row_map, 0), end);
}

Tensor missing_slots(const Tensor& row_map, int64_t rows, int64_t limit) {
  const Tensor negative = at::lt(row_map, 0);
  return rows < limit ? at::logical_or(negative, at::ge(row_map, rows)) : negative;
}

Tensor as_matrix(const Tensor& rows) {
  return rows.dim() == 2 ? rows : rows.flatten(1);
}

Tensor padded(const Tensor& tensor, int64_t dim, int64_t size, int64_t value) {
  if (tensor.size(dim) == size) {
    return tensor;
  }
  // at::constant_pad_nd counts pairs from the last dimension.
  std::vector<int64_t> pad(2 * (tensor.dim() - dim), 0);
  pad.back() = size - tensor.size(dim);
  return at::constant_pad_nd(tensor, pad, value);
}

OptionalTensor padded(const OptionalTensor& tensor, int64_t dim, int64_t size) {
  return given(tensor) ? OptionalTensor(padded(*tensor, dim, size)) : std::nullopt;
}

Tensor packed(const Tensor& tensor) {
  const Tensor dense = tensor.contiguous();
  at::DimVector strides(dense.dim());
  int64_t stride = 1;
  for (int64_t d = dense.dim() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(dense.size(d), 1);
  }
  return dense.strides() == at::IntArrayRef(strides) ? dense : dense.as_strided(dense.sizes(), strides);
}

} // namespace moe::npu
