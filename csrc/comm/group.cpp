#include "group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "../common/dtypes.h"

namespace moe::comm {

struct Processes {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

struct PendingWork {
  c10::intrusive_ptr<c10d::Work> work;
};

namespace {

constexpr std::array<std::pair<Path, std::string_view>, 2> kSuffixes = {{
    {Path::kFused, "@fused"},
    {Path::kComposed, "@composed"},
}};

// What a record starts with, which must be the same on every rank.
enum Field { kOperator, kExperts, kDtype, kColumns, kNumFields };

constexpr std::array<const char*, 4> kOperators = {
    "alltoallv_grouped_matmul", "grouped_matmul_alltoallv", "_exchange_expert_rows", "exchange_counts"};

int64_t operator_number(std::string_view name) {
  return std::find(kOperators.begin(), kOperators.end(), name) - kOperators.begin();
}

std::string describe(int64_t field, int64_t value) {
  switch (field) {
    case kOperator:
      return std::string("the operator ") + kOperators.at(value);
    case kExperts:
      return std::to_string(value) + " experts per rank";
    case kDtype:
      return "dtype " + std::string(dtype_name(static_cast<at::ScalarType>(value)));
    default:
      return "rows of " + std::to_string(value) + " elements";
  }
}

[[noreturn]] void fail(const ArgChecks& check, const std::string& group_name, const char* reason) {
  TORCH_CHECK(
      false, "moe::", check.op(), ": the exchange over group \"", group_name,
      "\" failed; a rank died, raised, or did not call the operator: ", reason);
}

// Runs a collective; what goes wrong in it is an error of the operator.
template <typename Body>
auto communicate(const ArgChecks& check, const std::string& group_name, const Body& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    fail(check, group_name, error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(check, group_name, error.what());
  }
}

// Where the numbers of a collective have to be: on the host if the group can, since that is where they are needed.
at::Device counts_device(const Group& group) {
  const auto types = group.processes->group->getDeviceTypes();
  const bool on_host = std::find(types.begin(), types.end(), at::kCPU) != types.end();
  return on_host || types.empty() ? at::kCPU : types.front();
}

// The values (1-D, int64) of all ranks, one after the other. By an all-to-all of copies: gloo takes half the time of
// its all-gather.
std::vector<int64_t> gather(const ArgChecks& check, const Group& group, const Tensor& values) {
  const int64_t ranks = group.size;
  Tensor all = values;
  if (ranks > 1) {
    communicate(check, group.name, [&] {
      const at::Device device = counts_device(group);
      Tensor copies = (values.device().type() == device.type() ? values : values.to(device))
                          .expand({ranks, values.size(0)})
                          .contiguous();
      all = at::empty_like(copies);
      std::vector<int64_t> equal_parts;
      return group.processes->group->all_to_all_single(all, copies, equal_parts, equal_parts)->wait();
    });
  }
  all = all.cpu().contiguous();
  const int64_t* data = all.const_data_ptr<int64_t>();
  return {data, data + all.numel()};
}

// `records`: one of `size` numbers for each rank, which starts with its header.
void check_headers(const ArgChecks& check, const std::vector<int64_t>& records, int64_t size) {
  for (int64_t first = 0; first < static_cast<int64_t>(records.size()); first += size) {
    for (int64_t field = 0; field < kNumFields; ++field) {
      const int64_t theirs = records[first + field];
      TORCH_CHECK_VALUE(
          theirs == records[field], "moe::", check.op(), ": the ranks must agree, got ",
          describe(field, records[field]), " on rank 0 and ", describe(field, theirs), " on rank ", first / size);
    }
  }
}

// What the ranks tell each other: a header and counts (1-D, int64, on any device). Returns the counts of every rank.
// The first kFirstPart numbers go first: ranks whose headers differ may have other numbers of counts.
CountMatrix gather_records(
    const ArgChecks& check, const Group& group, const std::array<int64_t, kNumFields>& header, const Tensor& counts) {
  constexpr int64_t kFirstPart = 512; // enough for 127 experts on 2 ranks, 31 on 8: one collective
  const Tensor record = at::cat({at::tensor(at::IntArrayRef(header), at::kLong).to(counts.device()), counts});
  const int64_t first_size = std::min(record.size(0), kFirstPart);
  const int64_t rest_size = record.size(0) - first_size;
  Tensor first = at::zeros({kFirstPart}, record.options());
  first.narrow(0, 0, first_size).copy_(record.narrow(0, 0, first_size));
  const auto firsts = gather(check, group, first);
  check_headers(check, firsts, kFirstPart);
  std::vector<int64_t> rests;
  if (rest_size > 0) {
    rests = gather(check, group, record.narrow(0, first_size, rest_size));
  }
  CountMatrix matrix;
  for (int64_t rank = 0; rank < group.size; ++rank) {
    const auto part = firsts.begin() + rank * kFirstPart;
    auto& of_rank = matrix.emplace_back(part + kNumFields, part + first_size);
    of_rank.insert(of_rank.end(), rests.begin() + rank * rest_size, rests.begin() + (rank + 1) * rest_size);
  }
  return matrix;
}

// `records`: the send counts, then the receive counts of each rank.
void check_agreement(const ArgChecks& check, const Counts& counts, const CountMatrix& records) {
  const int64_t pairs = counts.ranks * counts.experts;
  for (int64_t source = 0; source < counts.ranks; ++source) {
    for (int64_t target = 0; target < counts.ranks; ++target) {
      for (int64_t expert = 0; expert < counts.experts; ++expert) {
        const int64_t sent = records[source][target * counts.experts + expert];
        const int64_t expected = records[target][pairs + source * counts.experts + expert];
        TORCH_CHECK_VALUE(
            sent == expected, "moe::", check.op(), ": send_counts must equal the recv_counts of the other rank, got ",
            sent, " rows from rank ", source, " to rank ", target, " for its expert ", expert, ", where rank ", target,
            " expects ", expected);
      }
    }
  }
}

} // namespace

Group resolve_group(const ArgChecks& check, std::string_view group) {
  Group resolved;
  resolved.name = group;
  for (const auto& [path, suffix] : kSuffixes) {
    if (group.ends_with(suffix)) {
      resolved.name = group.substr(0, group.size() - suffix.size());
      resolved.agreed = path;
    }
  }
  if (!resolved.name.empty()) {
    try {
      const auto found = c10d::resolve_process_group(resolved.name);
      resolved.rank = found->getRank();
      resolved.size = found->getSize();
      resolved.processes = std::make_shared<Processes>(Processes{found});
    } catch (const std::exception&) {
      TORCH_CHECK_VALUE(
          false, "moe::", check.op(), ": group must be the name of a process group of torch.distributed, got \"",
          resolved.name, "\"");
    }
  }
  return resolved;
}

Group resolve_group(const ArgChecks& check, std::string_view group, int64_t ep_world_size) {
  Group resolved = resolve_group(check, group);
  TORCH_CHECK_VALUE(
      resolved.size == ep_world_size, "moe::", check.op(), ": ep_world_size must be the size of group \"",
      resolved.name, "\" (", resolved.size, "), got ", ep_world_size);
  return resolved;
}

std::string with_path(const std::string& name, Path path) {
  return name + std::string(kSuffixes[path == Path::kFused ? 0 : 1].second);
}

std::vector<int64_t> Counts::rows_by_rank(const std::vector<int64_t>& counts) const {
  std::vector<int64_t> rows(ranks, 0);
  for (int64_t i = 0; i < ranks * experts; ++i) {
    rows[i / experts] += counts[i];
  }
  return rows;
}

std::vector<int64_t> Counts::rows_by_expert(const std::vector<int64_t>& counts) const {
  std::vector<int64_t> rows(experts, 0);
  for (int64_t i = 0; i < ranks * experts; ++i) {
    rows[i % experts] += counts[i];
  }
  return rows;
}

Counts make_counts(int64_t ep_world_size, SymIntArrayRef send_counts, SymIntArrayRef recv_counts) {
  const at::IntArrayRef send = C10_AS_INTARRAYREF_SLOW(send_counts);
  const at::IntArrayRef recv = C10_AS_INTARRAYREF_SLOW(recv_counts);
  return {ep_world_size, static_cast<int64_t>(send.size()) / ep_world_size, send.vec(), recv.vec()};
}

CountMatrix gather_counts(
    const ArgChecks& check, const Group& group, const Counts& counts, const Tensor& rows, int64_t row_size) {
  const auto dtype = static_cast<int64_t>(rows.scalar_type());
  const Tensor both = at::cat({at::tensor(counts.send, at::kLong), at::tensor(counts.recv, at::kLong)});
  CountMatrix matrix =
      gather_records(check, group, {operator_number(check.op()), counts.experts, dtype, row_size}, both);
  check_agreement(check, counts, matrix);
  for (auto& of_rank : matrix) {
    of_rank.resize(counts.send.size());
  }
  return matrix;
}

Group agreed_group(
    const ArgChecks& check,
    std::string_view name,
    const Counts& counts,
    const Tensor& rows,
    int64_t row_size,
    bool compare) {
  Group group = resolve_group(check, name, counts.ranks);
  if (compare || group.size == 1) {
    gather_counts(check, group, counts, rows, row_size);
  }
  return group;
}

std::pair<int64_t, CountMatrix> exchange_counts(const Tensor& send_counts, std::string_view group_name) {
  constexpr ArgChecks check("exchange_counts");
  const Group group = resolve_group(check, group_name);
  const int64_t pairs = send_counts.size(0);
  check.multiple_of(pairs, "number of send_counts", group.size, "the number of ranks");
  CountMatrix matrix =
      gather_records(check, group, {operator_number(check.op()), pairs / group.size, 0, 0}, send_counts);
  for (const auto& of_rank : matrix) {
    // All ranks find the same: a device's counts have not been looked at before.
    check.counts(c10::fromIntArrayRefSlow(of_rank), "send_counts", pairs);
  }
  return {group.rank, std::move(matrix)};
}

RowExchange::RowExchange(const ArgChecks& check, const Group& group, const Counts& counts, Tensor send, Tensor recv)
    : check_(check), group_name_(group.name), send_(std::move(send)), recv_(std::move(recv)) {
  auto to = counts.rows_by_rank(counts.send);
  auto from = counts.rows_by_rank(counts.recv);
  work_ = std::make_shared<PendingWork>(PendingWork{communicate(
      check_, group_name_, [&] { return group.processes->group->all_to_all_single(recv_, send_, from, to); })});
}

void RowExchange::finish() {
  communicate(check_, group_name_, [&] { return work_->work->wait(); });
}

} // namespace moe::comm
