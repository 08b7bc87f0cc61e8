// The dtypes that the operators take.
#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

namespace moe {

// The name as users write it: float32, int64.
inline std::string_view dtype_name(c10::ScalarType dtype) {
  return c10::getDtypeNames(dtype).first;
}

inline bool is_supported_float(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double || dtype == c10::ScalarType::BFloat16 ||
         dtype == c10::ScalarType::Half;
}

} // namespace moe
