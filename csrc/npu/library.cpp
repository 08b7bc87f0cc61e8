// The Python module torch_moe_ops._C_npu: registers the NPU kernels when it is loaded, tells what of CANN was found,
// and exposes each aclnn operator as it is, for debugging and tests.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <utility>

#include "../common/registration.h"
#include "device.h"
#include "expert_comm.h"
#include "launch.h"

namespace moe {

bool is_first_copy() {
  // Asked for the first time by this copy's first registration: none of its kernels is in the dispatcher yet.
  static const bool kFirst = [] {
    const auto op = c10::Dispatcher::singleton().findSchema({"moe::token_permute", ""});
    return op.has_value() && !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
  }();
  return kFirst;
}

namespace npu {
namespace {

namespace py = pybind11;

// What Python passes for a C parameter: Tensor or None, a list of tensors or None, a list of ints or None, str, int,
// bool.
template <typename Parameter>
struct Python {
  using type = Parameter;
};
template <>
struct Python<aclTensor*> {
  using type = std::optional<at::Tensor>;
};
template <>
struct Python<aclTensorList*> {
  using type = std::optional<Tensors>;
};
template <>
struct Python<aclIntArray*> {
  using type = std::optional<Ints>;
};
template <>
struct Python<const char*> {
  using type = std::string;
};
template <typename Handle>
struct Python<const Handle*> : Python<Handle*> {};

template <typename Operator, typename... Parameters, size_t... Places>
void define(py::module_& m, AclnnOperator<Parameters...>, std::index_sequence<Places...>) {
  m.def(
      Operator::kName,
      [](const typename Python<Parameters>::type&... arguments) { launch<Operator>(Operator::kName, arguments...); },
      // No conversion: 1.5 is no bool, as it would be none in C.
      py::arg(Operator::kArguments[Places]).noconvert()..., py::call_guard<py::gil_scoped_release>(),
      "The arguments of the C function, in its order; outputs are written.");
}

// Library of each aclnn operator, empty where CANN has none.
std::map<std::string, std::string> operators() {
  std::map<std::string, std::string> found;
  for_each_operator([&](auto op) { found[op.kName] = library_of(op.kName); });
  return found;
}

template <typename Operator>
void define_operator(py::module_& m, Operator op) {
  define<Operator>(m, op, std::make_index_sequence<Operator::kNumArguments>());
}

} // namespace
} // namespace npu
} // namespace moe

PYBIND11_MODULE(_C_npu, m) {
  m.doc() = "NPU kernels of torch_moe_ops: what of CANN was found, and the bare aclnn operators.";
  m.def("operators", &moe::npu::operators, "Library of each aclnn operator, empty where CANN has none.");
  m.def("searched_libraries", &moe::npu::searched_libraries, "The operator libraries, in the order of search.");
  m.def("soc_name", &moe::npu::soc_name, "Name of the chip, as CANN's runtime has it.");
  m.def("cann_version", &moe::npu::cann_version_text, "The release of CANN.");
  m.def(
      "with_agreed_path",
      [](const std::string& group, const moe::comm::CountMatrix& send_counts) {
        return moe::comm::with_path(group, moe::npu::agreed_path("exchange_counts", send_counts));
      },
      "The group's name with the way that all its ranks take, from the send counts of all of them.");
  moe::npu::for_each_operator([&m](auto op) { moe::npu::define_operator(m, op); });
}
