// aclnnGroupedMatmulV5, in a file of its own: a build without it is a CANN that only has V4. The contract is in
// grouped_matmul.h.
#include "grouped_matmul.h"

STANDIN_API int aclnnGroupedMatmulV5GetWorkspaceSize(
    const aclTensorList* x,
    const aclTensorList* weight,
    const aclTensorList* biasOptional,
    const aclTensorList* scaleOptional,
    const aclTensorList* offsetOptional,
    const aclTensorList* antiquantScaleOptional,
    const aclTensorList* antiquantOffsetOptional,
    const aclTensorList* perTokenScaleOptional,
    const aclTensor* groupListOptional,
    const aclTensorList* activationInputOptional,
    const aclTensorList* activationQuantScaleOptional,
    const aclTensorList* activationQuantOffsetOptional,
    int64_t splitItem,
    int64_t groupType,
    int64_t groupListType,
    int64_t actType,
    aclIntArray* tuningConfigOptional,
    aclTensorList* out,
    aclTensorList* activationFeatureOutOptional,
    aclTensorList* dynQuantScaleOutOptional,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return standin::phase1(
      "aclnnGroupedMatmulV5", workspaceSize, executor,
      [&](standin::Plan& plan) {
        standin::plan_grouped_matmul(
            plan, {x, weight, biasOptional, scaleOptional, offsetOptional, antiquantScaleOptional,
                   antiquantOffsetOptional, perTokenScaleOptional, groupListOptional, activationInputOptional,
                   activationQuantScaleOptional, activationQuantOffsetOptional, splitItem, groupType, groupListType,
                   actType, out, activationFeatureOutOptional, dynQuantScaleOutOptional});
      },
      x, weight, biasOptional, scaleOptional, offsetOptional, antiquantScaleOptional, antiquantOffsetOptional,
      perTokenScaleOptional, groupListOptional, activationInputOptional, activationQuantScaleOptional,
      activationQuantOffsetOptional, splitItem, groupType, groupListType, actType, tuningConfigOptional, out,
      activationFeatureOutOptional, dynQuantScaleOutOptional);
}
STANDIN_PHASE2(aclnnGroupedMatmulV5)
