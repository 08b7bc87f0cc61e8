// Every aclnn operator that this package calls, declared once: the parameter types of its first phase in C, without the
// two trailing out-parameters (workspace size, executor) that all of them share, and the parameter names for messages.
//
// The compiler checks each call (launch.h) against these types: number, order, width. A C symbol carries no types, so
// nothing else would notice an int32 where the operator reads an int64.
#pragma once

#include <array>
#include <cstdint>

#include "acl_types.h"

namespace moe::npu {

template <typename... Args>
struct AclnnOperator {
  using Phase1 = Status (*)(Args..., uint64_t*, aclOpExecutor**);
  static constexpr size_t kNumArguments = sizeof...(Args);
  using Names = std::array<const char*, sizeof...(Args)>;
};

// `names` without the one in that place.
template <size_t place, size_t count>
constexpr std::array<const char*, count - 1> without(const std::array<const char*, count>& names) {
  std::array<const char*, count - 1> kept{};
  for (size_t i = 0; i < count - 1; ++i) {
    kept[i] = names[i < place ? i : i + 1];
  }
  return kept;
}

struct MoeTokenPermute
    : AclnnOperator<const aclTensor*, const aclTensor*, int64_t, bool, const aclTensor*, const aclTensor*> {
  static constexpr const char* kName = "aclnnMoeTokenPermute";
  static constexpr Names kArguments = {"tokens",     "indices",          "numOutTokens",
                                       "paddedMode", "permuteTokensOut", "sortedIndicesOut"};
};

struct MoeTokenPermuteGrad : AclnnOperator<const aclTensor*, const aclTensor*, int64_t, bool, aclTensor*> {
  static constexpr const char* kName = "aclnnMoeTokenPermuteGrad";
  static constexpr Names kArguments = {"permutedOutputGrad", "sortedIndices", "numTopk", "paddedMode", "out"};
};

struct MoeTokenUnpermute
    : AclnnOperator<const aclTensor*, const aclTensor*, const aclTensor*, bool, const aclIntArray*, aclTensor*> {
  static constexpr const char* kName = "aclnnMoeTokenUnpermute";
  static constexpr Names kArguments = {"permutedTokens", "sortedIndices",        "probsOptional",
                                       "paddedMode",     "restoreShapeOptional", "out"};
};

struct MoeTokenUnpermuteGrad : AclnnOperator<
                                   const aclTensor*,
                                   const aclTensor*,
                                   const aclTensor*,
                                   const aclTensor*,
                                   bool,
                                   const aclIntArray*,
                                   aclTensor*,
                                   aclTensor*> {
  static constexpr const char* kName = "aclnnMoeTokenUnpermuteGrad";
  static constexpr Names kArguments = {"permuteTokensOptional", "unpermutedTokensGrad", "sortedIndices",
                                       "probsOptional",         "paddedMode",           "restoreShapeOptional",
                                       "permutedTokensGradOut", "probsGradOut"};
};

struct MoeInitRoutingV2 : AclnnOperator<
                              const aclTensor*,
                              const aclTensor*,
                              int64_t,
                              int64_t,
                              int64_t,
                              int64_t,
                              int64_t,
                              bool,
                              const aclTensor*,
                              const aclTensor*,
                              const aclTensor*,
                              const aclTensor*> {
  static constexpr const char* kName = "aclnnMoeInitRoutingV2";
  static constexpr Names kArguments = {
      "x",
      "expertIdx",
      "activeNumOptional",
      "expertCapacityOptional",
      "expertNumOptional",
      "dropPadModeOptional",
      "expertTokensCountOrCumsumFlagOptional",
      "expertTokensBeforeCapacityFlagOptional",
      "expandedXOut",
      "expandedRowIdxOut",
      "expertTokensCountOrCumsumOutOptional",
      "expertTokensBeforeCapacityOutOptional"};
};

struct MoeInitRoutingV2Grad
    : AclnnOperator<const aclTensor*, const aclTensor*, int64_t, int64_t, int64_t, const aclTensor*> {
  static constexpr const char* kName = "aclnnMoeInitRoutingV2Grad";
  static constexpr Names kArguments = {"gradExpandedX", "expandedRowIdx", "topK", "dropPadMode", "activeNum", "out"};
};

struct MoeFinalizeRoutingV2 : AclnnOperator<
                                  const aclTensor*,
                                  const aclTensor*,
                                  const aclTensor*,
                                  const aclTensor*,
                                  const aclTensor*,
                                  const aclTensor*,
                                  const aclTensor*,
                                  int64_t,
                                  const aclTensor*> {
  static constexpr const char* kName = "aclnnMoeFinalizeRoutingV2";
  static constexpr Names kArguments = {"expandedX",         "expandedRowIdx", "x1Optional",
                                       "x2Optional",        "biasOptional",   "scalesOptional",
                                       "expertIdxOptional", "dropPadMode",    "out"};
};

struct MoeFinalizeRoutingV2Grad : AclnnOperator<
                                      const aclTensor*,
                                      const aclTensor*,
                                      const aclTensor*,
                                      const aclTensor*,
                                      const aclTensor*,
                                      const aclTensor*,
                                      int64_t,
                                      int64_t,
                                      int64_t,
                                      int64_t,
                                      const aclTensor*,
                                      const aclTensor*> {
  static constexpr const char* kName = "aclnnMoeFinalizeRoutingV2Grad";
  static constexpr Names kArguments = {
      "gradY",       "expandedRowIdx", "expandedXOptional", "scalesOptional", "expertIdxOptional", "biasOptional",
      "dropPadMode", "activeNum",      "expertNum",         "expertCapacity", "gradExpandedXOut",  "gradScalesOut"};
};

struct SwiGlu : AclnnOperator<const aclTensor*, int64_t, const aclTensor*> {
  static constexpr const char* kName = "aclnnSwiGlu";
  static constexpr Names kArguments = {"x", "dim", "out"};
};

struct SwiGluGrad : AclnnOperator<const aclTensor*, const aclTensor*, int64_t, const aclTensor*> {
  static constexpr const char* kName = "aclnnSwiGluGrad";
  static constexpr Names kArguments = {"yGrad", "x", "dim", "out"};
};

// GroupedMatmul V4 and V5, which has `Tuning` more.
template <typename... Tuning>
using GroupedMatmul = AclnnOperator<
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensor*,
    const aclTensorList*,
    const aclTensorList*,
    const aclTensorList*,
    int64_t,
    int64_t,
    int64_t,
    int64_t,
    Tuning...,
    aclTensorList*,
    aclTensorList*,
    aclTensorList*>;

struct GroupedMatmulV5 : GroupedMatmul<aclIntArray*> {
  static constexpr const char* kName = "aclnnGroupedMatmulV5";
  static constexpr Names kArguments = {
      "x",
      "weight",
      "biasOptional",
      "scaleOptional",
      "offsetOptional",
      "antiquantScaleOptional",
      "antiquantOffsetOptional",
      "perTokenScaleOptional",
      "groupListOptional",
      "activationInputOptional",
      "activationQuantScaleOptional",
      "activationQuantOffsetOptional",
      "splitItem",
      "groupType",
      "groupListType",
      "actType",
      "tuningConfigOptional",
      "out",
      "activationFeatureOutOptional",
      "dynQuantScaleOutOptional"};
};

struct GroupedMatmulV4 : GroupedMatmul<> {
  static constexpr const char* kName = "aclnnGroupedMatmulV4";
  static constexpr Names kArguments = without<16>(GroupedMatmulV5::kArguments); // tuningConfigOptional
};

// Both directions, with the communication mode of their second versions or without.
template <typename... Mode>
struct AlltoAllvGroupedMatMulBase : AclnnOperator<
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const char*,
                                        Mode...,
                                        int64_t,
                                        const aclIntArray*,
                                        const aclIntArray*,
                                        bool,
                                        bool,
                                        bool,
                                        aclTensor*,
                                        aclTensor*,
                                        aclTensor*> {};

struct AlltoAllvGroupedMatMulV2 : AlltoAllvGroupedMatMulBase<const char*> {
  static constexpr const char* kName = "aclnnAlltoAllvGroupedMatMulV2";
  static constexpr Names kArguments = {
      "gmmX",
      "gmmWeight",
      "sendCountsTensorOptional",
      "recvCountsTensorOptional",
      "mmXOptional",
      "mmWeightOptional",
      "group",
      "commMode",
      "epWorldSize",
      "sendCounts",
      "recvCounts",
      "transGmmWeight",
      "transMmWeight",
      "permuteOutFlag",
      "gmmY",
      "mmYOptional",
      "permuteOutOptional"};
};

struct AlltoAllvGroupedMatMul : AlltoAllvGroupedMatMulBase<> {
  static constexpr const char* kName = "aclnnAlltoAllvGroupedMatMul";
  static constexpr Names kArguments = without<7>(AlltoAllvGroupedMatMulV2::kArguments); // commMode
};

template <typename... Mode>
struct GroupedMatMulAlltoAllvBase : AclnnOperator<
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const aclTensor*,
                                        const char*,
                                        Mode...,
                                        int64_t,
                                        const aclIntArray*,
                                        const aclIntArray*,
                                        bool,
                                        bool,
                                        aclTensor*,
                                        aclTensor*> {};

struct GroupedMatMulAlltoAllvV2 : GroupedMatMulAlltoAllvBase<const char*> {
  static constexpr const char* kName = "aclnnGroupedMatMulAlltoAllvV2";
  static constexpr Names kArguments = {
      "gmmX",
      "gmmWeight",
      "sendCountsTensorOptional",
      "recvCountsTensorOptional",
      "mmXOptional",
      "mmWeightOptional",
      "group",
      "commMode",
      "epWorldSize",
      "sendCounts",
      "recvCounts",
      "transGmmWeight",
      "transMmWeight",
      "y",
      "mmYOptional"};
};

struct GroupedMatMulAlltoAllv : GroupedMatMulAlltoAllvBase<> {
  static constexpr const char* kName = "aclnnGroupedMatMulAlltoAllv";
  static constexpr Names kArguments = without<7>(GroupedMatMulAlltoAllvV2::kArguments); // commMode
};

// Calls visit(Operator{}) for each of them.
template <typename Visit>
void for_each_operator(const Visit& visit) {
  visit(MoeTokenPermute{});
  visit(MoeTokenPermuteGrad{});
  visit(MoeTokenUnpermute{});
  visit(MoeTokenUnpermuteGrad{});
  visit(MoeInitRoutingV2{});
  visit(MoeInitRoutingV2Grad{});
  visit(MoeFinalizeRoutingV2{});
  visit(MoeFinalizeRoutingV2Grad{});
  visit(SwiGlu{});
  visit(SwiGluGrad{});
  visit(GroupedMatmulV5{});
  visit(GroupedMatmulV4{});
  visit(AlltoAllvGroupedMatMulV2{});
  visit(AlltoAllvGroupedMatMul{});
  visit(GroupedMatMulAlltoAllvV2{});
  visit(GroupedMatMulAlltoAllv{});
}

} // namespace moe::npu
