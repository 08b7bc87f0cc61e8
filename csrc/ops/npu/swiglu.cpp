// swiglu and swiglu_grad on the NPU: aclnnSwiGlu, aclnnSwiGluGrad. Contract: ../swiglu.h.
//
// Both compute in float32 whatever the dtype and round once, on every product: nothing is corrected.
#include "../swiglu.h"

#include "../../common/registration.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kSwiglu = "swiglu";
constexpr const char* kSwigluGrad = "swiglu_grad";
constexpr int64_t kLastDim = -1;

// The documents allow no strided inputs, and at most 8 dimensions.
Tensor as_documented(const Tensor& tensor) {
  constexpr int64_t kMaxRank = 8;
  const Tensor dense = tensor.contiguous();
  return dense.dim() <= kMaxRank ? dense : dense.flatten(0, -2);
}

Tensor swiglu(const Tensor& x) {
  Tensor output = swiglu_output(x);
  constexpr ArgChecks check(kSwiglu);
  check_npu_float(check, x, "x");
  if (output.numel() > 0) {
    launch<SwiGlu>(kSwiglu, as_documented(x), kLastDim, as_documented(output));
  }
  return output;
}

Tensor swiglu_grad(const Tensor& grad_output, const Tensor& x) {
  Tensor x_grad = swiglu_grad_output(grad_output, x);
  constexpr ArgChecks check(kSwigluGrad);
  check_npu_float(check, x, "x");
  if (x_grad.numel() > 0) {
    launch<SwiGluGrad>(kSwigluGrad, as_documented(grad_output), as_documented(x), kLastDim, as_documented(x_grad));
  }
  return x_grad;
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("swiglu", TORCH_FN(moe::npu::swiglu));
  m.impl("swiglu_grad", TORCH_FN(moe::npu::swiglu_grad));
}
