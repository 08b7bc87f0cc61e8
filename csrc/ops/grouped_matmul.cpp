// Schemas of grouped_matmul and grouped_matmul_weight_grad, and their shape functions (Meta kernels).
#include "grouped_matmul.h"

#include "../common/registration.h"

MOE_SCHEMAS(m) {
  m.def(
      "grouped_matmul(Tensor x, Tensor weight, Tensor group_list, *, bool trans_weight=False,"
      " int group_list_type=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "grouped_matmul_weight_grad(Tensor x, Tensor grad_y, Tensor group_list, *, bool trans_weight=False,"
      " int group_list_type=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

MOE_KERNELS(Meta, m) {
  m.impl("grouped_matmul", TORCH_FN(moe::grouped_matmul_output));
  m.impl("grouped_matmul_weight_grad", TORCH_FN(moe::grouped_matmul_weight_grad_output));
}
