// finalize_routing_v2 and finalize_routing_v2_grad on the NPU: aclnnMoeFinalizeRoutingV2,
// aclnnMoeFinalizeRoutingV2Grad. Contract: ../finalize_routing_v2.h.
#include "../finalize_routing_v2.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../../common/registration.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kFinalize = "finalize_routing_v2";
constexpr const char* kFinalizeGrad = "finalize_routing_v2_grad";

OptionalTensor cast(const OptionalTensor& tensor, at::ScalarType dtype) {
  return given(tensor) ? OptionalTensor(tensor->to(dtype)) : std::nullopt;
}

struct Dtypes {
  at::ScalarType rows;
  at::ScalarType scales;
};

// A2 and A3 add up float16 in float16, and take float32 scales with bfloat16 rows but no other mix: what they would
// round on the way, or refuse, is computed in float32. Ascend 950 computes in float32 and takes any mix.
Dtypes forward_dtypes(at::ScalarType rows, at::ScalarType scales) {
  if (is_950(kFinalize)) {
    return {rows, scales};
  }
  if (rows == at::kHalf) {
    return {at::kFloat, at::kFloat};
  }
  return {rows, scales == rows ? rows : at::kFloat};
}

// The gradient kernel of A2 and A3 takes scales of the dtype of the rows only. It computes in float32 itself.
Dtypes grad_dtypes(at::ScalarType rows, at::ScalarType scales) {
  if (is_950(kFinalizeGrad) || rows == scales) {
    return {rows, scales};
  }
  return {at::kFloat, at::kFloat};
}

at::ScalarType scales_dtype(const OptionalTensor& scales, const Tensor& rows) {
  return given(scales) ? scales->scalar_type() : rows.scalar_type();
}

// expert_idx is read for the rows of bias alone.
OptionalTensor clamped_experts(const OptionalTensor& expert_idx, const OptionalTensor& bias) {
  return given(bias) ? OptionalTensor(clamped(*expert_idx, {0, bias->size(0)})) : std::nullopt;
}

// expanded_x and all that goes with its rows, as one launch takes them.
struct FinalizeInputs {
  Tensor expanded_x;
  Tensor row_idx;
  OptionalTensor bias;
  OptionalTensor scales;
  OptionalTensor expert_idx;
};

// A mask of slots as the (T, K) tensors have them, from one in the order of the row map.
Tensor by_token(const Tensor& missing, int64_t top_k, bool k_major) {
  return k_major ? missing.view({top_k, -1}).t() : missing.view({-1, top_k});
}

// Drop/pad modes: the kernels leave out slots of -1, but for 0 * scale at odd k on A2 and A3, where a NaN scale shows.
void prepare_drop_pad(FinalizeInputs& inputs, int64_t top_k, bool k_major) {
  const int64_t experts = inputs.expanded_x.size(0);
  const int64_t rows = experts * inputs.expanded_x.size(1);
  if (given(inputs.scales) && !is_950(kFinalize)) {
    const Tensor missing = missing_slots(inputs.row_idx, rows, rows);
    inputs.scales = inputs.scales->masked_fill(by_token(missing, top_k, k_major), 0);
  }
  if (given(inputs.bias)) {
    // The kernels want at least as many experts as choices. More experts than there are change no row's number.
    const int64_t wanted = std::max(experts, top_k);
    inputs.expanded_x = padded(inputs.expanded_x, 0, wanted);
    inputs.bias = padded(inputs.bias, 0, wanted);
  }
}

// Dropless modes with rows cut off: Ascend 950 leaves out slots without a row; A2 and A3 want a row for every slot, so
// the missing ones are zeros, with weight 0 and a bias of zeros.
void prepare_cut_off(FinalizeInputs& inputs, int64_t top_k, bool k_major, int64_t slots) {
  const Tensor missing = by_token(missing_slots(inputs.row_idx, inputs.expanded_x.size(0), slots), top_k, k_major);
  inputs.expanded_x = padded(inputs.expanded_x, 0, slots);
  if (given(inputs.scales)) {
    inputs.scales = inputs.scales->masked_fill(missing, 0);
  }
  if (given(inputs.bias)) {
    const int64_t experts = inputs.bias->size(0);
    inputs.bias = padded(inputs.bias, 0, experts + 1);
    inputs.expert_idx = inputs.expert_idx->masked_fill(missing, experts);
  }
}

void prepare_dropless(FinalizeInputs& inputs, int64_t top_k, bool k_major) {
  const int64_t slots = inputs.row_idx.numel();
  if (inputs.expanded_x.size(0) < slots && !is_950(kFinalize)) {
    prepare_cut_off(inputs, top_k, k_major, slots);
  }
  if (given(inputs.bias)) {
    inputs.bias = padded(inputs.bias, 0, std::max(inputs.bias->size(0), top_k));
  }
}

Tensor sum_of_skips(const OptionalTensor& x1, const OptionalTensor& x2, Tensor y) {
  y.zero_();
  if (given(x1)) {
    y.add_(*x1);
  }
  if (given(x2)) {
    y.add_(*x2);
  }
  return y;
}

Tensor finalize_routing_v2(
    const Tensor& expanded_x,
    const Tensor& expanded_row_idx,
    const OptionalTensor& x1,
    const OptionalTensor& x2,
    const OptionalTensor& bias,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    int64_t drop_pad_mode) {
  Tensor y = finalize_routing_v2_output(expanded_x, expanded_row_idx, x1, x2, bias, scales, expert_idx, drop_pad_mode);
  constexpr ArgChecks check(kFinalize);
  check_npu_float(check, expanded_x, "expanded_x");
  check_npu_float(check, scales, "scales");
  const bool drop_pad = drop_pad_mode % 2 == 1;
  const IndexRange range = cpu::expanded_rows(expanded_row_idx, expanded_x, drop_pad);
  check_range(check, expanded_row_idx, "expanded_row_idx", range);
  if (given(bias)) {
    check_range(check, *expert_idx, "expert_idx", {0, bias->size(0)});
  }
  if (expanded_x.numel() == 0) {
    return sum_of_skips(x1, x2, y);
  }
  if (y.numel() == 0) {
    return y;
  }
  const Dtypes dtypes = forward_dtypes(expanded_x.scalar_type(), scales_dtype(scales, expanded_x));
  FinalizeInputs inputs{
      expanded_x.to(dtypes.rows), clamped(expanded_row_idx, range), cast(bias, dtypes.rows),
      cast(scales, dtypes.scales), clamped_experts(expert_idx, bias)};
  const int64_t top_k = given(scales) ? scales->size(1) : 1;
  const bool k_major = drop_pad_mode < 2;
  if (drop_pad) {
    prepare_drop_pad(inputs, top_k, k_major);
  } else {
    prepare_dropless(inputs, top_k, k_major);
  }
  const Tensor out = dtypes.rows == y.scalar_type() ? y : at::empty(y.sizes(), y.options().dtype(dtypes.rows));
  launch<MoeFinalizeRoutingV2>(
      kFinalize, inputs.expanded_x, inputs.row_idx, cast(x1, dtypes.rows), cast(x2, dtypes.rows), inputs.bias,
      inputs.scales, inputs.expert_idx, drop_pad_mode, out);
  return out.to(y.scalar_type());
}

std::tuple<Tensor, Tensor> finalize_routing_v2_grad(
    const Tensor& grad_y,
    const Tensor& expanded_row_idx,
    const OptionalTensor& expanded_x,
    const OptionalTensor& scales,
    const OptionalTensor& expert_idx,
    const OptionalTensor& bias,
    int64_t drop_pad_mode,
    SymInt active_num,
    SymInt expert_num,
    SymInt expert_capacity) {
  auto [rows_grad, scales_grad] = finalize_routing_v2_grad_outputs(
      grad_y, expanded_row_idx, expanded_x, scales, expert_idx, bias,
      {drop_pad_mode, active_num, expert_num, expert_capacity});
  constexpr ArgChecks check(kFinalizeGrad);
  check_npu_float(check, grad_y, "grad_y");
  check_npu_float(check, scales, "scales");
  const bool drop_pad = drop_pad_mode == 1;
  const int64_t rows = drop_pad ? rows_grad.size(0) * rows_grad.size(1) : rows_grad.size(0);
  const IndexRange range = cpu::expanded_rows(expanded_row_idx, rows_grad, drop_pad);
  check_range(check, expanded_row_idx, "expanded_row_idx", range);
  check_named_once(check, expanded_row_idx, "expanded_row_idx", rows);
  if (given(bias)) {
    check_range(check, *expert_idx, "expert_idx", {0, bias->size(0)});
  }
  if (rows_grad.numel() == 0 || grad_y.numel() == 0) {
    return {rows_grad.zero_(), scales_grad.zero_()};
  }
  const Dtypes dtypes = grad_dtypes(grad_y.scalar_type(), scales_dtype(scales, grad_y));
  // Rows that no slot names: the kernel clears them in the drop/pad mode, and leaves them as they are in the other.
  Tensor out = rows_grad;
  if (dtypes.rows != rows_grad.scalar_type()) {
    out = at::empty(rows_grad.sizes(), rows_grad.options().dtype(dtypes.rows));
  }
  if (!drop_pad) {
    out.zero_();
  }
  // A tensor that is not written stands in for the gradient of absent scales: null is refused.
  const Tensor weights_grad = given(scales) ? at::empty(scales->sizes(), scales->options().dtype(dtypes.scales))
                                            : at::empty({1}, grad_y.options());
  const Tensor index = clamped(expanded_row_idx, {-1, range.high + 1}); // the kernel skips both ends
  const OptionalTensor used_bias = given(scales) ? bias : std::nullopt; // without scales the kernel has no use for it
  launch<MoeFinalizeRoutingV2Grad>(
      kFinalizeGrad, grad_y.to(dtypes.rows), index, given(scales) ? cast(expanded_x, dtypes.rows) : std::nullopt,
      cast(scales, dtypes.scales), clamped_experts(expert_idx, used_bias), cast(used_bias, dtypes.rows), drop_pad_mode,
      drop_pad ? int64_t{0} : rows, expert_num.expect_int(), expert_capacity.expect_int(), out, weights_grad);
  if (given(scales)) {
    // The kernel gives a slot without a row the part of the bias, which the forward has left out.
    const Tensor missing = missing_slots(index, rows, range.high);
    scales_grad = weights_grad.masked_fill(missing.view_as(weights_grad), 0).to(scales_grad.scalar_type());
  }
  return {out.to(rows_grad.scalar_type()), scales_grad};
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("finalize_routing_v2", TORCH_FN(moe::npu::finalize_routing_v2));
  m.impl("finalize_routing_v2_grad", TORCH_FN(moe::npu::finalize_routing_v2_grad));
}
