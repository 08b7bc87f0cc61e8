// Registration macros of this package.
//
// A process can meet two copies of the library (an installed one and a build tree, say). Defining a schema twice throws
// inside a static initializer, which ends the process. So only the first copy registers anything; a later one stays
// silent and lets Python report both files (torch_moe_ops/_loader.py).
#pragma once

#include <torch/library.h>

namespace moe {

// True if this copy of the library is the first in the process to register the moe operators.
bool is_first_copy();

} // namespace moe

// Schemas and kernels for all backends: MOE_SCHEMAS(m) { m.def("..."); }
#define MOE_SCHEMAS(m)                               \
  static void define_moe_schemas(torch::Library& m); \
  TORCH_LIBRARY_FRAGMENT(moe, library) {             \
    if (moe::is_first_copy()) {                      \
      define_moe_schemas(library);                   \
    }                                                \
  }                                                  \
  static void define_moe_schemas(torch::Library& m)

// Kernels of one dispatch key: MOE_KERNELS(CPU, m) { m.impl("...", TORCH_FN(...)); }
#define MOE_KERNELS(KEY, m)                                  \
  static void register_moe_kernels_##KEY(torch::Library& m); \
  TORCH_LIBRARY_IMPL(moe, KEY, library) {                    \
    if (moe::is_first_copy()) {                              \
      register_moe_kernels_##KEY(library);                   \
    }                                                        \
  }                                                          \
  static void register_moe_kernels_##KEY(torch::Library& m)
