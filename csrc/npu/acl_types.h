// The C types of CANN's aclnn interface. CANN's own headers for them are not in the torch_npu wheel, and a build must
// not need CANN, so the opaque ones are declared here; aclDataType, aclFormat and aclrtStream come from the wheel.
#pragma once

#include <acl/acl_base.h>

#include <cstdint>

extern "C" {
struct aclTensor;
struct aclTensorList;
struct aclIntArray;
struct aclOpExecutor;
}

namespace moe::npu {

using Status = int;
constexpr Status kSuccess = 0;

// Second phase, the same for every operator: workspace, its size, the executor that phase 1 made, the stream.
using Phase2 = Status (*)(void*, uint64_t, aclOpExecutor*, aclrtStream);

} // namespace moe::npu
