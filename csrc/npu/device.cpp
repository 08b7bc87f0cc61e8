// Which NPU and which CANN this process has. Contract: device.h.
#include "device.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <optional>
#include <utility>

#include "../common/switches.h"
#include "symbols.h"

// Exported by libtorch_npu.so; declared here because its header is not in the wheel.
std::string GetCANNVersion(const std::string& module);

namespace moe::npu {
namespace {

const std::string& cann_version() {
  static const std::string kVersion = GetCANNVersion("CANN");
  return kVersion;
}

std::pair<int, int> cann_major_minor() {
  int major = 0;
  int minor = 0;
  if (std::sscanf(cann_version().c_str(), "%d.%d", &major, &minor) != 2) {
    return {0, 0};
  }
  return {major, minor};
}

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

std::optional<Product> known_product(const std::string& name) {
  if (starts_with(name, "Ascend910_93")) {
    return Product::A3;
  }
  if (starts_with(name, "Ascend910B")) {
    return Product::A2;
  }
  if (starts_with(name, "Ascend950")) {
    return Product::Ascend950;
  }
  return std::nullopt;
}

} // namespace

std::string soc_name() {
  using GetSocName = const char* (*)();
  static const std::string kName = [] {
    const auto get = reinterpret_cast<GetSocName>(find_runtime_symbol("aclrtGetSocName"));
    const char* name = get != nullptr ? get() : nullptr;
    return std::string(name != nullptr ? name : "unknown");
  }();
  return kName;
}

Product product(const char* op) {
  static const std::optional<Product> kProduct = known_product(soc_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      kProduct.has_value(), "moe::", op, ": the NPU must be an Ascend910B (A2), Ascend910_93 (A3) or Ascend950, got ",
      soc_name());
  return *kProduct;
}

std::string cann_version_text() {
  return cann_version().empty() ? "CANN of unknown release" : "CANN " + cann_version();
}

bool cann_at_least(int major, int minor) {
  static const std::pair<int, int> kFound = cann_major_minor();
  return kFound >= std::pair(major, minor);
}

bool checks_indices() {
  static const bool kChecks = switched_on("MOE_OPS_CHECK_INDICES");
  return kChecks;
}

} // namespace moe::npu
