// Which way the expert-parallel operators take on an NPU, the same on every rank of a group.
//
// The fused kernels of CANN refuse some sizes on one rank alone, or return at once without a word where a rank has
// nothing to compute, while the other ranks wait for it. So the choice is made from what every rank knows: the counts
// of all ranks, and sizes that are the same on all of them.
#pragma once

#include <string>

#include "../comm/group.h"
#include "device.h"

namespace moe::npu {

// What the fused kernels of a product can do, on the releases of CANN from `major`.`minor` on. Older ones never run
// fused: they refuse ranks that exchange little (under 2 MB), each by itself.
struct FusedLimits {
  Product product;
  int major;
  int minor;
  std::vector<int64_t> group_sizes;
  int64_t max_experts = 32; // of each rank
  int64_t max_pairs = 256;  // ranks * experts of each
  int64_t max_rows = 52428799;
  int64_t max_columns = 65535;
  // With more experts than this the kernel splits its work by the rows of its own rank, which then must be the same
  // on all ranks.
  int64_t max_experts_with_any_rows = 16;
};

// Null where the product and the release have no fused kernels, or libopapi.so lacks them.
const FusedLimits* fused_limits(const char* op);

// Whether the fused kernels can do all calls with these counts: the send counts of every rank.
comm::Path agreed_path(const char* op, const comm::CountMatrix& send_counts);

// Name of the group's HCCL communicator on the current device. Makes it if there is none yet, which is collective.
std::string communicator_name(const char* op, const comm::Group& group);

} // namespace moe::npu
