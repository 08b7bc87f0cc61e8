#include "expert_comm.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "signatures.h"
#include "symbols.h"

namespace moe::npu {
namespace {

namespace py = pybind11;

const std::vector<FusedLimits>& all_limits() {
  static const std::vector<FusedLimits> kLimits = {
      {Product::A3, 9, 1, {8, 16, 32, 64, 128}},
      {Product::Ascend950, 9, 1, {2, 4, 8, 16, 32, 64}},
  };
  return kLimits;
}

bool has_kernels() {
  static const bool kHas =
      find_symbol(AlltoAllvGroupedMatMul::kName) != nullptr && find_symbol(GroupedMatMulAlltoAllv::kName) != nullptr;
  return kHas;
}

template <typename Values, typename Value>
bool contains(const Values& values, const Value& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

std::vector<int64_t> rows_sent(const comm::CountMatrix& send_counts) {
  std::vector<int64_t> rows;
  for (const auto& counts : send_counts) {
    rows.push_back(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  }
  return rows;
}

std::vector<int64_t> rows_received(const comm::CountMatrix& send_counts) {
  const size_t experts = send_counts.front().size() / send_counts.size();
  std::vector<int64_t> rows(send_counts.size(), 0);
  for (const auto& counts : send_counts) {
    for (size_t i = 0; i < counts.size(); ++i) {
      rows[i / experts] += counts[i];
    }
  }
  return rows;
}

bool all_within(const std::vector<int64_t>& rows, int64_t max_rows) {
  return std::all_of(rows.begin(), rows.end(), [&](int64_t count) { return 1 <= count && count <= max_rows; });
}

bool all_equal(const std::vector<int64_t>& rows) {
  return std::all_of(rows.begin(), rows.end(), [&](int64_t count) { return count == rows.front(); });
}

} // namespace

const FusedLimits* fused_limits(const char* op) {
  for (const FusedLimits& limits : all_limits()) {
    if (limits.product == product(op) && cann_at_least(limits.major, limits.minor) && has_kernels()) {
      return &limits;
    }
  }
  return nullptr;
}

comm::Path agreed_path(const char* op, const comm::CountMatrix& send_counts) {
  const FusedLimits* limits = fused_limits(op);
  const auto ranks = static_cast<int64_t>(send_counts.size());
  const auto pairs = static_cast<int64_t>(send_counts.front().size());
  if (limits == nullptr || !contains(limits->group_sizes, ranks) || pairs == 0 || pairs > limits->max_pairs ||
      pairs / ranks > limits->max_experts) {
    return comm::Path::kComposed;
  }
  // Both operators are meant, so each sum is the rows of an input and of an output.
  const auto sent = rows_sent(send_counts);
  const auto received = rows_received(send_counts);
  const bool few_experts = pairs / ranks <= limits->max_experts_with_any_rows;
  const bool fits = all_within(sent, limits->max_rows) && all_within(received, limits->max_rows) &&
                    (few_experts || (all_equal(sent) && all_equal(received)));
  return fits ? comm::Path::kFused : comm::Path::kComposed;
}

std::string communicator_name(const char* op, const comm::Group& group) {
  const py::gil_scoped_acquire gil;
  const auto name = py::module_::import("torch_moe_ops._npu").attr("communicator_name")(group.name).cast<std::string>();
  TORCH_CHECK(
      !name.empty() && name.size() < 128, "moe::", op, ": the HCCL communicator of group \"", group.name,
      "\" must have a name of 1 to 127 characters, got \"", name, "\"");
  return name;
}

} // namespace moe::npu
