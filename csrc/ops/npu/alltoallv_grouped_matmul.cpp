// alltoallv_grouped_matmul and grouped_matmul_alltoallv on the NPU. Contract: ../alltoallv_grouped_matmul.h.
//
// Fused: aclnnAlltoAllvGroupedMatMul and aclnnGroupedMatMulAlltoAllv (their second versions where CANN has them).
// Composed, for everything outside their limits: an exchange of HCCL, and the grouped matmul of this package. All ranks
// take the same way (../../npu/expert_comm.h). The shared expert takes no part in that choice: it does not communicate.
#include "../alltoallv_grouped_matmul.h"

#include <ATen/ops/mm.h>

#include "../../comm/expert_rows.h"
#include "../../common/registration.h"
#include "../../common/switches.h"
#include "../../npu/expert_comm.h"
#include "../../npu/inputs.h"
#include "../../npu/launch.h"

namespace moe::npu {
namespace {

constexpr const char* kForward = "alltoallv_grouped_matmul";
constexpr const char* kReverse = "grouped_matmul_alltoallv";
constexpr const char* kExchange = "_exchange_expert_rows";

// Value of the parameter commMode: communication by the AI CPU, which every product has.
const std::string kCommMode = "ai_cpu";

// MOE_OPS_CHECK_COUNTS=1 turns it on: it waits for the device.
bool compares_counts() {
  return switched_on("MOE_OPS_CHECK_COUNTS");
}

// Whether the kernels take the sizes, which are the same on every rank.
bool sizes_fit(const char* op, const ExpertMatmulArgs& args) {
  const FusedLimits* limits = fused_limits(op);
  const auto dtype = args.gmm_x.scalar_type();
  if (limits == nullptr || (dtype != at::kHalf && dtype != at::kBFloat16)) {
    return false;
  }
  const auto fits = [&](int64_t columns) { return 1 <= columns && columns <= limits->max_columns; };
  return fits(args.gmm_weight.size(1)) && fits(args.gmm_weight.size(2));
}

struct Plan {
  comm::Group group;
  comm::Counts counts;
  bool fused;
};

Plan make_plan(const ArgChecks& check, const ExpertMatmulArgs& args, std::string_view group, int64_t row_size) {
  check_npu_float(check, args.gmm_x, "gmm_x");
  Plan plan;
  plan.counts = comm::make_counts(args.ep_world_size.expect_int(), args.send_counts, args.recv_counts);
  plan.group = comm::resolve_group(check, group, plan.counts.ranks);
  plan.fused = plan.counts.ranks > 1 && sizes_fit(check.op(), args);
  const bool must_ask = plan.fused && !plan.group.agreed.has_value();
  if (must_ask || plan.counts.ranks == 1 || compares_counts()) {
    const auto send_counts = comm::gather_counts(check, plan.group, plan.counts, args.gmm_x, row_size);
    plan.fused = plan.fused && agreed_path(check.op(), send_counts) == comm::Path::kFused;
  } else {
    plan.fused = plan.fused && plan.group.agreed == comm::Path::kFused;
  }
  return plan;
}

// A weight without a copy of a transposed view: the kernel reads either storage order.
struct StoredWeight {
  StoredWeight(const Tensor& weight, bool trans) : tensor(weight), transposed(trans) {
    if (!weight.is_contiguous() && weight.transpose(-2, -1).is_contiguous()) {
      tensor = weight.transpose(-2, -1);
      transposed = !trans;
    } else {
      tensor = weight.contiguous();
    }
  }
  Tensor tensor;
  bool transposed;
};

// The shared expert as the kernels take it, or not at all; then it is a matrix product of its own.
struct SharedExpert {
  SharedExpert(const ExpertMatmulArgs& args, int64_t routed_rows) : y(shared_expert_output(args)) {
    if (!given(args.mm_x)) {
      return;
    }
    const StoredWeight stored(*args.mm_weight, args.trans_mm_weight);
    x = args.mm_x->contiguous();
    weight = stored.tensor;
    transposed = stored.transposed;
    fused = within_limits(routed_rows);
  }

  // K = routed rows per row of the shared expert, in [2, 8].
  bool within_limits(int64_t routed_rows) const {
    constexpr int64_t kMaxInner = 12288;
    const int64_t rows = x.size(0);
    const int64_t inner = x.size(1);
    return rows > 0 && routed_rows % rows == 0 && routed_rows / rows >= 2 && routed_rows / rows <= 8 && inner > 0 &&
           inner <= kMaxInner && y.size(1) > 0 && y.size(1) <= kMaxColumns;
  }
  void multiply_unless_fused() {
    if (x.defined() && !fused) {
      y = at::mm(x, transposed ? weight.t() : weight);
    }
  }
  OptionalTensor if_fused(const Tensor& tensor) const {
    return fused ? OptionalTensor(tensor) : std::nullopt;
  }

  Tensor x;
  Tensor weight;
  Tensor y;
  bool transposed = false;
  bool fused = false;
};

template <typename... Mode>
using ForwardVersion = std::conditional_t<sizeof...(Mode) == 0, AlltoAllvGroupedMatMul, AlltoAllvGroupedMatMulV2>;
template <typename... Mode>
using ReverseVersion = std::conditional_t<sizeof...(Mode) == 0, GroupedMatMulAlltoAllv, GroupedMatMulAlltoAllvV2>;

// Calls launch(mode...), with the mode for the second version of an operator or without it for the first.
template <typename SecondVersion, typename Launch>
void with_mode(const Launch& launch_version) {
  static const bool kHasSecond = find_symbol(SecondVersion::kName) != nullptr;
  if (kHasSecond) {
    launch_version(kCommMode);
  } else {
    launch_version();
  }
}

std::tuple<Tensor, Tensor, Tensor> fused_forward(
    const Plan& plan, const ExpertMatmulArgs& args, const std::string& communicator, bool permute_out_flag) {
  const Tensor gmm_y = expert_matmul_output(args);
  const Tensor permute_out = permute_output(args, permute_out_flag);
  const StoredWeight weight(args.gmm_weight, args.trans_gmm_weight);
  SharedExpert shared(args, args.gmm_x.size(0));
  with_mode<AlltoAllvGroupedMatMulV2>([&](const auto&... mode) {
    launch<ForwardVersion<decltype(mode)...>>(
        kForward, args.gmm_x.contiguous(), weight.tensor, nullptr, nullptr, shared.if_fused(shared.x),
        shared.if_fused(shared.weight), communicator, mode..., plan.counts.ranks, plan.counts.send, plan.counts.recv,
        weight.transposed, shared.fused && shared.transposed, permute_out_flag, gmm_y, shared.if_fused(shared.y),
        permute_out_flag ? OptionalTensor(permute_out) : std::nullopt);
  });
  shared.multiply_unless_fused();
  return {gmm_y, shared.y, permute_out};
}

std::tuple<Tensor, Tensor> fused_reverse(
    const Plan& plan, const ExpertMatmulArgs& args, const std::string& communicator) {
  const Tensor y = expert_matmul_output(args);
  const StoredWeight weight(args.gmm_weight, args.trans_gmm_weight);
  SharedExpert shared(args, y.size(0));
  with_mode<GroupedMatMulAlltoAllvV2>([&](const auto&... mode) {
    launch<ReverseVersion<decltype(mode)...>>(
        kReverse, args.gmm_x.contiguous(), weight.tensor, nullptr, nullptr, shared.if_fused(shared.x),
        shared.if_fused(shared.weight), communicator, mode..., plan.counts.ranks, plan.counts.send, plan.counts.recv,
        weight.transposed, shared.fused && shared.transposed, y, shared.if_fused(shared.y));
  });
  shared.multiply_unless_fused();
  return {y, shared.y};
}

std::tuple<Tensor, Tensor, Tensor> alltoallv_grouped_matmul(
    const Tensor& gmm_x,
    const Tensor& gmm_weight,
    std::string_view group,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    const OptionalTensor& mm_x,
    const OptionalTensor& mm_weight,
    bool trans_gmm_weight,
    bool trans_mm_weight,
    bool permute_out_flag) {
  constexpr ArgChecks check(kForward);
  const ExpertMatmulArgs args{gmm_x, gmm_weight, ep_world_size,    send_counts,    recv_counts,
                              mm_x,  mm_weight,  trans_gmm_weight, trans_mm_weight};
  check_expert_matmul(check, args);
  const c10::DeviceGuard guard(gmm_x.device());
  const Plan plan = make_plan(check, args, group, gmm_x.size(1));
  if (!plan.fused) {
    return comm::alltoallv_grouped_matmul(check, plan.group, plan.counts, args, permute_out_flag);
  }
  return fused_forward(plan, args, communicator_name(kForward, plan.group), permute_out_flag);
}

std::tuple<Tensor, Tensor> grouped_matmul_alltoallv(
    const Tensor& gmm_x,
    const Tensor& gmm_weight,
    std::string_view group,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    const OptionalTensor& mm_x,
    const OptionalTensor& mm_weight,
    bool trans_gmm_weight,
    bool trans_mm_weight) {
  constexpr ArgChecks check(kReverse);
  const ExpertMatmulArgs args{gmm_x, gmm_weight, ep_world_size,    send_counts,    recv_counts,
                              mm_x,  mm_weight,  trans_gmm_weight, trans_mm_weight};
  check_expert_matmul(check, args);
  const c10::DeviceGuard guard(gmm_x.device());
  const Plan plan = make_plan(check, args, group, output_columns(args).expect_int());
  if (!plan.fused) {
    return comm::grouped_matmul_alltoallv(check, plan.group, plan.counts, args);
  }
  return fused_reverse(plan, args, communicator_name(kReverse, plan.group));
}

Tensor exchange_expert_rows(
    const Tensor& rows,
    std::string_view group,
    SymInt ep_world_size,
    SymIntArrayRef send_counts,
    SymIntArrayRef recv_counts,
    bool to_experts) {
  constexpr ArgChecks check(kExchange);
  check_exchange(check, rows, ep_world_size, send_counts, recv_counts);
  const c10::DeviceGuard guard(rows.device());
  const auto counts = comm::make_counts(ep_world_size.expect_int(), send_counts, recv_counts);
  const auto ranks = comm::agreed_group(check, group, counts, rows, rows.size(1), compares_counts());
  return comm::exchange_expert_rows(check, ranks, counts, rows, to_experts);
}

} // namespace
} // namespace moe::npu

MOE_KERNELS(PrivateUse1, m) {
  m.impl("alltoallv_grouped_matmul", TORCH_FN(moe::npu::alltoallv_grouped_matmul));
  m.impl("grouped_matmul_alltoallv", TORCH_FN(moe::npu::grouped_matmul_alltoallv));
  m.impl("_exchange_expert_rows", TORCH_FN(moe::npu::exchange_expert_rows));
}
