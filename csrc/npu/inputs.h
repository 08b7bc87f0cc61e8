// What the NPU wrappers do to arguments, so that the aclnn kernels, which check little, compute what the operators of
// this package promise (docs/npu.md has the table of corrections).
#pragma once

#include "../common/checks.h"
#include "../cpu/slots.h"
#include "device.h"

namespace moe::npu {

using cpu::IndexRange;

// NotImplementedError for float64, which no aclnn operator here takes.
void check_npu_float(const ArgChecks& check, const Tensor& tensor, const char* arg);
void check_npu_float(const ArgChecks& check, const OptionalTensor& tensor, const char* arg);

// NotImplementedError if `value` is beyond what the kernel can do. `limit` is the largest value that works.
void check_npu_limit(const ArgChecks& check, int64_t value, const char* arg, int64_t limit);

// Ids and positions are sorted as float32: from here on, two of them could be taken for one.
constexpr int64_t kSortLimit = int64_t{1} << 24;
constexpr int64_t kMaxSlots = kSortLimit - 2;
// Choices per token in the token (un)permute kernels.
constexpr int64_t kMaxTopK = 512;
// Groups of one grouped matmul, and the last dimension of its matrices on A2 and A3.
constexpr int64_t kMaxGroups = 1024;
constexpr int64_t kMaxColumns = 65535;

// The same numbers as int32, without a look at them.
Tensor as_int32(const Tensor& index);

// An index as int32, values from outside the range moved to the nearest end: nothing that a kernel does with it
// leaves its buffers. check_range comes first.
Tensor clamped(const Tensor& index, IndexRange range);

// An int32 row map for the kernels that skip rows past the end and know no -1: negative rows become `end`.
Tensor skip_negative(const Tensor& row_map, int64_t end);

// True for the slots without a row: negative ones, and rows from `rows` on if the map may name such, which it does up
// to `limit` (exclusive).
Tensor missing_slots(const Tensor& row_map, int64_t rows, int64_t limit);

// With MOE_OPS_CHECK_INDICES=1 an IndexError for the first value outside the range. Otherwise only if no value at all
// is allowed.
void check_range(const ArgChecks& check, const Tensor& index, const char* arg, IndexRange range);

// The same for ids that only must not be negative.
void check_not_negative(const ArgChecks& check, const Tensor& ids, const char* arg);

// The same for two slots that name the same one of `rows` rows, where the kernels would keep either.
void check_named_once(const ArgChecks& check, const Tensor& index, const char* arg, int64_t rows);

// (rows, everything else): the kernels want matrices.
Tensor as_matrix(const Tensor& rows);

// `tensor` with `value` after its end in dimension `dim`, so that it has `size` there. The tensor itself if it has
// already.
Tensor padded(const Tensor& tensor, int64_t dim, int64_t size, int64_t value = 0);
OptionalTensor padded(const OptionalTensor& tensor, int64_t dim, int64_t size);

// A contiguous tensor whose strides are exactly those of its sizes, also where a size of 1 would allow others: grouped
// matmul reads off the strides whether a matrix is transposed.
Tensor packed(const Tensor& tensor);

} // namespace moe::npu
