// Looks up the functions of CANN at run time, so that nothing of CANN is needed to build or to import this package.
//
// Order of search, the first library that has a symbol wins:
//   1. $ASCEND_CUSTOM_OPP_PATH: <each entry>/op_api/lib/libcust_opapi.so
//   2. $ASCEND_OPP_PATH/vendors: the vendors that config.ini names, in its order
//   3. $ASCEND_HOME_PATH/lib64/libopapi_*.so, by name (packages that split the operators)
//   4. libopapi.so, wherever the dynamic loader finds it
#pragma once

#include <string>
#include <vector>

namespace moe::npu {

// Address of an aclnn or acl function of the operator libraries, or null.
void* find_symbol(const std::string& name);

// The same; the error for a missing one names `op`, the symbol, what was searched, the CANN release, and what to do.
void* require_symbol(const char* op, const std::string& name);

// A function of the runtime library libascendcl.so (which torch_npu has loaded), or null.
void* find_runtime_symbol(const char* name);

// File of the library that has the symbol; empty if none has.
std::string library_of(const std::string& name);

// One line for each library of the search: its path, and why it could not be opened where that is so.
std::vector<std::string> searched_libraries();

} // namespace moe::npu
