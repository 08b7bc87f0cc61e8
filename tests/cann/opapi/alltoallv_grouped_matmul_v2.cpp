// aclnnAlltoAllvGroupedMatMulV2 and aclnnGroupedMatMulAlltoAllvV2, in a file of their own: a build without it is a CANN
// before 9.1. The contract is in alltoallv_grouped_matmul.h.
#include "alltoallv_grouped_matmul.h"

STANDIN_API int aclnnAlltoAllvGroupedMatMulV2GetWorkspaceSize(
    const aclTensor* gmmX,
    const aclTensor* gmmWeight,
    const aclTensor* sendCountsTensorOptional,
    const aclTensor* recvCountsTensorOptional,
    const aclTensor* mmXOptional,
    const aclTensor* mmWeightOptional,
    const char* group,
    const char* commMode,
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
      "aclnnAlltoAllvGroupedMatMulV2", workspaceSize, executor,
      [&](standin::Plan& plan) {
        standin::plan_alltoallv(
            plan, {true, gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional,
                   mmWeightOptional, group, commMode, epWorldSize, sendCounts, recvCounts, transGmmWeight,
                   transMmWeight, permuteOutFlag, gmmY, mmYOptional, permuteOutOptional});
      },
      gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional, mmWeightOptional, group,
      commMode, epWorldSize, sendCounts, recvCounts, transGmmWeight, transMmWeight, permuteOutFlag, gmmY, mmYOptional,
      permuteOutOptional);
}
STANDIN_PHASE2(aclnnAlltoAllvGroupedMatMulV2)

STANDIN_API int aclnnGroupedMatMulAlltoAllvV2GetWorkspaceSize(
    const aclTensor* gmmX,
    const aclTensor* gmmWeight,
    const aclTensor* sendCountsTensorOptional,
    const aclTensor* recvCountsTensorOptional,
    const aclTensor* mmXOptional,
    const aclTensor* mmWeightOptional,
    const char* group,
    const char* commMode,
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
      "aclnnGroupedMatMulAlltoAllvV2", workspaceSize, executor,
      [&](standin::Plan& plan) {
        standin::plan_alltoallv(
            plan, {false, gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional,
                   mmWeightOptional, group, commMode, epWorldSize, sendCounts, recvCounts, transGmmWeight,
                   transMmWeight, false, y, mmYOptional, nullptr});
      },
      gmmX, gmmWeight, sendCountsTensorOptional, recvCountsTensorOptional, mmXOptional, mmWeightOptional, group,
      commMode, epWorldSize, sendCounts, recvCounts, transGmmWeight, transMmWeight, y, mmYOptional);
}
STANDIN_PHASE2(aclnnGroupedMatMulAlltoAllvV2)
