// Schemas of swiglu and swiglu_grad, and their shape functions (Meta kernels).
#include "swiglu.h"

#include "../common/registration.h"

MOE_SCHEMAS(m) {
  m.def("swiglu(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("swiglu_grad(Tensor grad_output, Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("swiglu", TORCH_FN(moe::swiglu_output));
  m.impl("swiglu_grad", TORCH_FN(moe::swiglu_grad_output));
}
