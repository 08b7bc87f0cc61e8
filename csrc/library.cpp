// The Python module torch_moe_ops._C: what this library is, for the loader and for `python -m torch_moe_ops.info`. The
// operators themselves are reached through torch.ops.moe; nothing here is on their call path.
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "autograd_entry.h"
#include "comm/group.h"
#include "common/registration.h"
#include "cpu/row_ops.h"
#include "npu_entry.h"

namespace moe {

bool is_first_copy() {
  // Asked for the first time by this copy's first registration: nothing of this copy is in the dispatcher yet.
  static const bool kFirst = !c10::Dispatcher::singleton().findSchema({"moe::token_permute", ""}).has_value();
  return kFirst;
}

namespace {

std::string library_path() {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(&library_path), &info) != 0 ? info.dli_fname : "an unknown file";
}

std::string compiler() {
#ifdef __clang__
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

bool has_openmp() {
#ifdef _OPENMP
  return true;
#else
  return false;
#endif
}

} // namespace
} // namespace moe

MOE_SCHEMAS(m) {
  // Lets a second copy of the library name the first one.
  m.def("_library_path() -> str", &moe::library_path);
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts of torch_moe_ops. The operators are in torch.ops.moe.";
  m.def(
      "cpu_capability", [] { return std::string(moe::cpu::cpu_capability()); }, "Instruction set of the row kernels.");
  m.def("install_autograd_entry", &moe::install_autograd_entry, "Keeps unrecorded calls out of Python.");
  m.def("install_npu_entry", &moe::install_npu_entry, "Makes calls on NPU tensors load the NPU kernels.");
  m.def(
      "exchange_counts",
      // Its errors are those of operators: ValueError and so on.
      torch::wrap_pybind_function_no_gil([](const at::Tensor& send_counts, const std::string& group) {
        return moe::comm::exchange_counts(send_counts, group);
      }),
      "This rank, and the send counts of every rank. Collective.");
  m.attr("compiler") = moe::compiler();
  m.attr("cxx_standard") = __cplusplus;
  m.attr("openmp") = moe::has_openmp();
}
