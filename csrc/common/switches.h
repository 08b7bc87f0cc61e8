// Switches in the environment: 1 is on, 0 is off, anything else is the default.
#pragma once

#include <cstdlib>
#include <cstring>

namespace moe {

inline bool is_set_to(const char* variable, const char* wanted) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, wanted) == 0;
}

inline bool switched_on(const char* variable) {
  return is_set_to(variable, "1");
}

inline bool switched_off(const char* variable) {
  return is_set_to(variable, "0");
}

} // namespace moe
