// Which NPU and which CANN this process has.
#pragma once

#include <string>

namespace moe::npu {

// Generations whose kernels differ. A2: Ascend910B. A3: Ascend910_93. Ascend950: 950PR and 950DT.
enum class Product { A2, A3, Ascend950 };

// Error that names `op` and the chip if it is none of them.
Product product(const char* op);

inline bool is_950(const char* op) {
  return product(op) == Product::Ascend950;
}

// As the runtime names the chip, "Ascend910B2" for example; "unknown" without a runtime.
std::string soc_name();

// "CANN 9.1.0", or "CANN of unknown release".
std::string cann_version_text();

// True if the CANN release is known and at least this.
bool cann_at_least(int major, int minor);

// MOE_OPS_CHECK_INDICES=1: look at the values of index tensors before each launch, which waits for the device.
bool checks_indices();

} // namespace moe::npu
