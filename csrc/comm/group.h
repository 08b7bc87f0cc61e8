// The process group of an expert-parallel operator, and what its ranks tell each other before any row moves.
//
// `group` is the name of a process group of torch.distributed, with what exchange_counts() has found out about it, if
// anything: "<name>@fused" or "<name>@composed". An empty name is this process alone, which needs no torch.distributed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../common/checks.h"

namespace moe::comm {

// How an NPU does it. The ranks of a group must all do it in the same way.
enum class Path {
  kFused,   // one kernel of CANN exchanges and multiplies
  kComposed // an exchange of HCCL and our operators
};

struct Group {
  std::string name;
  std::optional<Path> agreed; // by all ranks
  int64_t rank = 0;
  int64_t size = 1;
  // torch's process group, whose headers take longer to compile than all of this. Null for this process alone.
  std::shared_ptr<struct Processes> processes;
};

// ValueError if there is no such group, or if it has another size than `ep_world_size`.
Group resolve_group(const ArgChecks& check, std::string_view group);
Group resolve_group(const ArgChecks& check, std::string_view group, int64_t ep_world_size);

// `group` with the path that all ranks take.
std::string with_path(const std::string& name, Path path);

// Row counts of one rank, indexed [peer rank * experts + local expert].
struct Counts {
  int64_t ranks;
  int64_t experts; // of each rank
  std::vector<int64_t> send;
  std::vector<int64_t> recv;

  std::vector<int64_t> rows_by_rank(const std::vector<int64_t>& counts) const;
  std::vector<int64_t> rows_by_expert(const std::vector<int64_t>& counts) const;
};

Counts make_counts(int64_t ep_world_size, SymIntArrayRef send_counts, SymIntArrayRef recv_counts);

// The send counts of every rank.
using CountMatrix = std::vector<std::vector<int64_t>>;

// Collective, waits. Every rank gets the send counts of all, or the same ValueError, which names the first two ranks
// that disagree and both their values: about the operator, the experts per rank, the dtype and the `row_size` of
// `rows`, or the number of rows that one sends to the other.
CountMatrix gather_counts(
    const ArgChecks& check, const Group& group, const Counts& counts, const Tensor& rows, int64_t row_size);

// The group of that name, once its ranks have compared their counts as above if `compare`. A rank alone always does.
Group agreed_group(
    const ArgChecks& check,
    std::string_view name,
    const Counts& counts,
    const Tensor& rows,
    int64_t row_size,
    bool compare);

// Collective, waits once for an NPU: this rank, and the send counts of all ranks, from those of this one (1-D, int64,
// on any device). For torch_moe_ops.exchange_counts.
std::pair<int64_t, CountMatrix> exchange_counts(const Tensor& send_counts, std::string_view group);

// Starts the exchange of rows between ranks, `recv` being written: rank-major on both sides. Both are contiguous, and
// live until the end of `finish`.
class RowExchange {
 public:
  RowExchange(const ArgChecks& check, const Group& group, const Counts& counts, Tensor send, Tensor recv);
  // Waits (an NPU's stream does). RuntimeError if a peer is gone, or did not come within the group's timeout.
  void finish();

 private:
  ArgChecks check_;
  std::string group_name_;
  Tensor send_;
  Tensor recv_;
  std::shared_ptr<struct PendingWork> work_;
};

} // namespace moe::comm
