// aclnnAlltoAllvGroupedMatMul and aclnnGroupedMatMulAlltoAllv: what phase 1 checks, for these and for V2.
#include "alltoallv_grouped_matmul.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "alltoallv_kernel.h"
#include "routing.h"

namespace standin {

using routing::copy_of;
using routing::need_rank;
using routing::need_shape;

namespace {

constexpr size_t kMaxGroupName = 128;
constexpr int64_t kMaxRows = 52428799;
constexpr int64_t kMaxSize = 65535;
constexpr int64_t kMaxSharedInner = 12288; // H2
constexpr int64_t kMaxCounts = 256;
constexpr int64_t kMinBytes = 2 << 20; // to and from each rank, before CANN 9.1 on A3

bool current() {
  return cann_at_least(9, 1);
}

void check_arguments(const Plan& plan, const AlltoAllvGroupedMatmul& op) {
  plan.tensor(op.x, "gmmX");
  plan.tensor(op.weight, "gmmWeight");
  plan.tensor(op.y, op.forward ? "gmmY" : "y");
  plan.need(
      op.send_counts_tensor == nullptr && op.recv_counts_tensor == nullptr, kNullptr,
      "sendCountsTensor and recvCountsTensor must be null");
  plan.need(op.group != nullptr && *op.group != '\0', kNullptr, "group must not be empty");
  const bool shared = op.mm_x != nullptr;
  plan.need(
      (op.mm_weight != nullptr) == shared && (op.mm_y != nullptr) == shared, kNullptr,
      "mmX, mmWeight and mmY must be all there or all null");
  plan.need(
      (op.permute_out != nullptr) == op.permute_out_flag, kNullptr, "permuteOut must be there if the flag says so");
  plan.need(std::strlen(op.group) < kMaxGroupName, kInvalid, "the name of the group must be shorter than 128");
  for (const aclIntArray* counts : {op.send_counts, op.recv_counts}) {
    plan.need(counts != nullptr && !counts->values.empty(), kInvalid, "sendCounts and recvCounts must not be empty");
  }
  plan.need(op.comm_mode != nullptr, kInvalid, "commMode must not be null");
  const std::string mode = op.comm_mode;
  plan.need(
      mode == "ai_cpu" || (mode == "ccu" && on_950()), kInvalid, "commMode must be ai_cpu, or ccu on 950, got " + mode);
}

void check_dtypes(const Plan& plan, const AlltoAllvGroupedMatmul& op) {
  plan.need(op.x->dtype == ACL_FLOAT16 || op.x->dtype == ACL_BF16, kInvalid, "gmmX must be float16 or bfloat16");
  for (const aclTensor* other : {op.weight, op.y, op.mm_x, op.mm_weight, op.mm_y, op.permute_out}) {
    plan.need(other == nullptr || other->dtype == op.x->dtype, kInvalid, "all tensors must have the dtype of gmmX");
  }
}

bool empty(const aclTensor* tensor) {
  return tensor == nullptr || tensor->numel() == 0;
}

void need_between(const Plan& plan, const char* name, int64_t value, int64_t low, int64_t high) {
  plan.need(
      value >= low && value <= high, kTiling,
      std::string(name) + " must be from " + std::to_string(low) + " to " + std::to_string(high) + ", got " +
          std::to_string(value));
}

std::vector<int64_t> allowed_ep(bool forward) {
  if (!current()) {
    return {8, 16, 32, 64};
  }
  if (!on_950()) {
    return {8, 16, 32, 64, 128};
  }
  return forward ? std::vector<int64_t>{2, 4, 8, 16, 32, 64, 128, 256} : std::vector<int64_t>{2, 4, 8, 16, 32, 64};
}

void check_shapes(const Plan& plan, const AlltoAllvGroupedMatmul& op) {
  need_rank(plan, kTiling, "gmmX", *op.x, 2);
  need_rank(plan, kTiling, "gmmWeight", *op.weight, 3);
  need_rank(plan, kTiling, "gmmY", *op.y, 2);
  const int64_t rows = op.forward ? op.x->dim(0) : op.y->dim(0);
  const int64_t inner = op.x->dim(1);
  const int64_t columns = op.weight->dim(op.trans_weight ? 1 : 2);
  need_between(plan, "BSK", rows, 1, kMaxRows);
  need_between(plan, "H1", inner, 1, kMaxSize);
  // The forward operator means N1 and looks at a dimension that is H1 unless the weight is transposed.
  need_between(plan, "N1", op.forward ? op.weight->dim(1) : columns, 1, kMaxSize);
  plan.need(op.weight->dim(op.trans_weight ? 2 : 1) == inner, kTiling, "gmmX and gmmWeight must agree in H1");
  need_shape(plan, kTiling, "gmmY", *op.y, {op.y->dim(0), columns});
  if (op.permute_out != nullptr) {
    need_shape(plan, kTiling, "permuteOut", *op.permute_out, {op.y->dim(0), inner});
  }
}

void check_shared_expert(const Plan& plan, const AlltoAllvGroupedMatmul& op) {
  if (op.mm_x == nullptr) {
    plan.need(op.forward || !op.trans_mm_weight, kTiling, "transMmWeight must be false without mmX");
    return;
  }
  need_rank(plan, kTiling, "mmX", *op.mm_x, 2);
  need_rank(plan, kTiling, "mmWeight", *op.mm_weight, 2);
  const int64_t rows = op.mm_x->dim(0);
  const int64_t columns = op.mm_weight->dim(op.trans_mm_weight ? 0 : 1);
  need_between(plan, "BS", rows, 1, kMaxRows);
  need_between(plan, "H2", op.mm_x->dim(1), 1, kMaxSharedInner);
  need_between(plan, "N2", columns, 1, kMaxSize);
  plan.need(
      op.mm_weight->dim(op.trans_mm_weight ? 1 : 0) == op.mm_x->dim(1), kTiling, "mmX and mmWeight must agree in H2");
  need_shape(plan, kTiling, "mmY", *op.mm_y, {rows, columns});
  const int64_t all = op.forward ? op.x->dim(0) : op.y->dim(0);
  plan.need(all % rows == 0, kTiling, "BSK must be a multiple of BS");
  need_between(plan, "BSK / BS", all / rows, 2, 8);
}

using Counts = std::vector<int64_t>;

void check_counts(const Plan& plan, const char* name, const Counts& counts, int64_t rows, bool forward, bool sent) {
  const bool bounded = forward && product() == Product::A3;
  for (const int64_t count : counts) {
    plan.need(!forward || !(sent || bounded) || count >= 0, kTiling, std::string(name) + " must not be negative");
    plan.need(!bounded || count <= rows, kTiling, std::string(name) + " must be at most the number of rows");
  }
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  plan.need(
      sum == rows, kTiling,
      std::string(name) + " must add up to the rows, " + std::to_string(rows) + ", got " + std::to_string(sum));
}

// Of each rank's rows of H1, by all experts together.
void check_volume(const Plan& plan, const char* name, const Counts& counts, int64_t experts, int64_t row_bytes) {
  for (auto first = counts.begin(); first != counts.end(); first += experts) {
    plan.need(
        std::accumulate(first, first + experts, int64_t{0}) * row_bytes >= kMinBytes, kTiling,
        std::string(name) + " must make at least 2 MB for every rank in this release");
  }
}

void check_exchange(const Plan& plan, const AlltoAllvGroupedMatmul& op, int64_t ep) {
  const auto allowed = allowed_ep(op.forward);
  plan.need(
      std::find(allowed.begin(), allowed.end(), ep) != allowed.end(), kTiling,
      "epWorldSize must be one of " + routing::shape_text(allowed) + ", got " + std::to_string(ep));
  const int64_t experts = op.weight->dim(0);
  need_between(plan, "e", experts, 1, op.forward && current() ? 48 : 32);
  need_between(plan, "e * ep", experts * ep, 1, kMaxCounts);
  const Counts& send = op.send_counts->values;
  const Counts& recv = op.recv_counts->values;
  const auto length = static_cast<size_t>(experts * ep);
  plan.need(send.size() == length && recv.size() == length, kTiling, "counts must have e * ep entries");
  check_counts(plan, "sendCounts", send, op.x->dim(0), op.forward, true);
  check_counts(plan, "recvCounts", recv, op.y->dim(0), op.forward, false);
  if (!current() && product() == Product::A3) {
    const int64_t row_bytes = op.x->dim(1) * item_size(op.x->dtype);
    check_volume(plan, "sendCounts", send, experts, row_bytes);
    check_volume(plan, "recvCounts", recv, experts, row_bytes);
  }
}

} // namespace

void plan_alltoallv(Plan& plan, const AlltoAllvGroupedMatmul& op) {
  check_arguments(plan, op);
  plan.need(product() != Product::A2, kNoBinary, "A2 has no such operator");
  const auto comm = find_communicator(op.group);
  plan.need(comm != nullptr, kNoGroup, std::string("no communicator of this process has the name ") + op.group);
  if (empty(op.y) && empty(op.mm_y) && empty(op.permute_out)) {
    plan.nothing_to_do();
    return;
  }
  check_dtypes(plan, op);
  check_shapes(plan, op);
  check_shared_expert(plan, op);
  const int64_t ep = op.ep == -1 && !op.forward ? comm->size : op.ep;
  check_exchange(plan, op, ep);

  for (const aclTensor* output : {op.y, op.mm_y, op.permute_out}) {
    if (output != nullptr) {
      if (!output->contiguous()) {
        die("AlltoAllv with GroupedMatMul: an output is not contiguous, and would be written as if it were");
      }
      plan.output(output);
    }
  }
  const AlltoAllvKernel kernel = {
      op.forward,
      comm,
      ep,
      op.weight->dim(0),
      op.send_counts->values,
      op.recv_counts->values,
      op.trans_weight,
      op.trans_mm_weight,
      *op.x,
      *op.weight,
      *op.y,
      copy_of(op.permute_out),
      copy_of(op.mm_x),
      copy_of(op.mm_weight),
      copy_of(op.mm_y)};
  plan.kernel([kernel] { kernel.run(); });
}

} // namespace standin

STANDIN_API int aclnnAlltoAllvGroupedMatMulGetWorkspaceSize(
    const aclTensor* gmmX,
    const aclTensor* gmmWeight,
    const aclTensor* sendCountsTensorOptional,
    const aclTensor* recvCountsTensorOptional,
    const aclTensor* mmXOptional,
    const aclTensor* mmWeightOptional,
    const char* group,
    int64_t epWorldSize,
    const aclIntArray* sendCounts,
    const aclIntArray* recvCounts,
    bool transGmmWeight,
    bool transMmWeight,
    bool permuteOutFlag,
    aclTensor* gmmY,
    aclTensor* mmYOptional,
    aclTensor* permuteOutOptional,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return standin::phase1(
      "aclnnAlltoAllvGroupedMatMul", workspaceSize, executor,
      [&](standin::Plan& plan) {
        standin::plan_alltoallv(
            plan, {true, gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional,
                   mmWeightOptional, group, "ai_cpu", epWorldSize, sendCounts, recvCounts, transGmmWeight,
                   transMmWeight, permuteOutFlag, gmmY, mmYOptional, permuteOutOptional});
      },
      gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional, mmWeightOptional, group,
      epWorldSize, sendCounts, recvCounts, transGmmWeight, transMmWeight, permuteOutFlag, gmmY, mmYOptional,
      permuteOutOptional);
}
STANDIN_PHASE2(aclnnAlltoAllvGroupedMatMul)

STANDIN_API int aclnnGroupedMatMulAlltoAllvGetWorkspaceSize(
    const aclTensor* gmmX,
    const aclTensor* gmmWeight,
    const aclTensor* sendCountsTensorOptional,
    const aclTensor* recvCountsTensorOptional,
    const aclTensor* mmXOptional,
    const aclTensor* mmWeightOptional,
    const char* group,
    int64_t epWorldSize,
    const aclIntArray* sendCounts,
    const aclIntArray* recvCounts,
    bool transGmmWeight,
    bool transMmWeight,
    aclTensor* y,
    aclTensor* mmYOptional,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return standin::phase1(
      "aclnnGroupedMatMulAlltoAllv", workspaceSize, executor,
      [&](standin::Plan& plan) {
        standin::plan_alltoallv(
            plan, {false, gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional,
                   mmWeightOptional, group, "ai_cpu", epWorldSize, sendCounts, recvCounts, transGmmWeight,
                   transMmWeight, false, y, mmYOptional, nullptr});
      },
      gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional, mmWeightOptional, group,
      epWorldSize, sendCounts, recvCounts, transGmmWeight, transMmWeight, y, mmYOptional);
}
STANDIN_PHASE2(aclnnGroupedMatMulAlltoAllv)
