// Switches in the environment: on if the variable is 1.
#pragma once

#include <cstdlib>
#include <cstring>

namespace moe {

inline bool switched_on(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "1") == 0;
}

} // namespace moe
