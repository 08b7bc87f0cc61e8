// Chooses the row functions for this machine, once.
#include "row_ops.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

#include "row_ops_levels.h"

namespace moe::cpu {
namespace {

struct Level {
  const char* name;
  bool supported;
  const RowOpsTable& (*table)();
};

Level choose_level() {
  // From the plainest to the widest.
  const Level levels[] = {
      {"default", true, row_ops_default},
#ifdef MOE_ROW_OPS_X86_LEVELS
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"), row_ops_avx2},
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c"),
       row_ops_avx512},
#endif
  };
  const char* value = std::getenv("MOE_OPS_CPU_CAPABILITY");
  const std::string wanted = value == nullptr ? "" : value;
  const Level* chosen = nullptr;
  for (const Level& level : levels) {
    if (level.supported && (wanted.empty() || wanted == level.name)) {
      chosen = &level;
    }
  }
  TORCH_CHECK_VALUE(
      chosen != nullptr, "MOE_OPS_CPU_CAPABILITY must be default, avx2 or avx512 and supported by this processor, got ",
      wanted);
  return *chosen;
}

const Level& level() {
  static const Level kLevel = choose_level();
  return kLevel;
}

} // namespace

template <typename T, typename A>
const RowOps<T, A>& row_ops() {
  return std::get<RowOps<T, A>>(level().table());
}

template const RowOps<float, float>& row_ops();
template const RowOps<float, double>& row_ops();
template const RowOps<double, double>& row_ops();
template const RowOps<c10::BFloat16, float>& row_ops();
template const RowOps<c10::BFloat16, double>& row_ops();
template const RowOps<c10::Half, float>& row_ops();
template const RowOps<c10::Half, double>& row_ops();

PairRows pair_rows() {
  return std::get<PairRows>(level().table());
}

const char* cpu_capability() {
  return level().name;
}

} // namespace moe::cpu
