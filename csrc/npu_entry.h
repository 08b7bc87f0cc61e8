// What the operators do with an NPU tensor while the NPU kernels (torch_moe_ops._C_npu) are not loaded.
//
// The first call loads them, in whatever order torch_npu and this package were imported. If they cannot be used, the
// call fails and says why: torch_npu's general fallback would run the CPU kernel instead without a word.
// MOE_OPS_ALLOW_CPU_FALLBACK=1 allows just that, with a warning once for each operator.
#pragma once

namespace moe {

void install_npu_entry();

} // namespace moe
