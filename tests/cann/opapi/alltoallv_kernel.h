// The kernel of alltoallv_grouped_matmul.h, which tells the contract: what one rank does.
#pragma once

#include <memory>
#include <optional>

#include "hccl_transport.h"
#include "standin.h"

namespace standin {

// The arguments by value.
struct AlltoAllvKernel {
  bool forward;
  std::shared_ptr<Communicator> comm;
  int64_t ep;
  int64_t experts;
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
  bool trans_weight;
  bool trans_mm_weight;
  aclTensor x;
  aclTensor weight;
  aclTensor y;
  std::optional<aclTensor> permute_out;
  std::optional<aclTensor> mm_x;
  std::optional<aclTensor> mm_weight;
  std::optional<aclTensor> mm_y;

  void run() const;
};

} // namespace standin
