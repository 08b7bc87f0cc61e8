// What the aclnn routing functions share: refusals, reads of unchecked indices, and the operators that stand behind two
// entry points.
//
// Ascend 950 has no kernels of its own for the token operators. Their entry points launch the routing operators:
//   MoeTokenPermute       -> MoeInitRoutingV2, activeNum = numOutTokens
//   MoeTokenPermuteGrad   -> MoeInitRoutingV2Grad, mode 0, activeNum = rows of the gradient
//   MoeTokenUnpermute     -> MoeFinalizeRoutingV2, mode 2
//   MoeTokenUnpermuteGrad -> MoeFinalizeRoutingV2Grad, mode 0, activeNum = slots
// and so take over what those check, skip and leave unwritten. A2 and A3 share kernels.
//
// T tokens, K choices, n = T * K slots; slot i = t * K + k (token-major).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "standin.h"

namespace standin::routing {

using Dims = std::vector<int64_t>;

// ---- refusals ----------------------------------------------------------------------------------------------------
// The code of what tiling refuses: hand-written entry points see a launch that returned null; generated ones (the token
// operators on A2 and A3) hand on the code of tiling.
inline int token_tiling_code() {
  return on_950() ? kInnerNullptr : kTiling;
}

constexpr int64_t kMaxTopK = 512; // of the token operators on A2 and A3

std::string shape_text(const Dims& dims);
void need_shape(const Plan& plan, int code, const char* name, const aclTensor& tensor, const Dims& wanted);
void need_rank(const Plan& plan, int code, const char* name, const aclTensor& tensor, int64_t rank);
// Sizes of 0. What the kernels do for an empty input with an output to fill is settled by no public source, and the
// tilings that say anything ask for positive sizes: refused.
void need_elements(const Plan& plan, int code, const char* name, const aclTensor& tensor);
void need_float(const Plan& plan, int code, const char* name, const aclTensor& tensor); // float32, float16, bfloat16
void need_int32(const Plan& plan, int code, const char* name, const aclTensor& tensor);
void need_dtype_of(
    const Plan& plan,
    int code,
    const char* name,
    const aclTensor& tensor,
    const char* other_name,
    const aclTensor& other);
void need_no_padded_mode(const Plan& plan, bool padded_mode);

// ---- tensors in kernels ------------------------------------------------------------------------------------------
inline std::optional<aclTensor> copy_of(const aclTensor* tensor) {
  return tensor == nullptr ? std::nullopt : std::optional<aclTensor>(*tensor);
}

template <typename View>
std::optional<View> view_of(const std::optional<aclTensor>& tensor) {
  return tensor ? std::optional<View>(View(*tensor)) : std::nullopt;
}

// `index`, which the kernel uses unchecked: ends the process where hardware would read or write beyond a buffer.
int64_t unchecked_index(const char* kernel, const char* what, int64_t slot, int64_t index, int64_t size);

void fill(const Floats& tensor, float value);
void fill(const Ints& tensor, int64_t value);
void copy_row(const aclTensor& from, int64_t from_row, const aclTensor& to, int64_t to_row, int64_t row_size);

// For rows that several slots write at once. No public source says which one stays: the last, or with
// CANN_STANDIN_UNSETTLED the first.
class ScatterOrder {
 public:
  explicit ScatterOrder(int64_t rows) : written_(rows, false) {}
  bool may_write(int64_t row) {
    const bool first = !written_[row];
    written_[row] = true;
    return first || !unsettled();
  }

 private:
  std::vector<bool> written_;
};

// ---- sorting -----------------------------------------------------------------------------------------------------
// Slots in stable ascending order of their expert ids, which the vector sort compares as float32: ids from 2^24 on
// collapse.
struct SortedSlots {
  std::vector<int64_t> order;    // slots in sorted order
  std::vector<int64_t> position; // the inverse: where a slot went
};
SortedSlots sort_slots(const Ints& ids);

// ---- operators behind two entry points: tiling and kernel --------------------------------------------------------
struct InitRoutingV2 {
  const aclTensor& x;
  const aclTensor& expert_idx;
  int64_t active_num;
  int64_t expert_capacity;
  int64_t expert_num;
  int64_t drop_pad_mode;
  int64_t count_flag;
  bool before_capacity_flag;
  const aclTensor& expanded_x;
  const aclTensor& expanded_row_idx;
  const aclTensor* counts;
  const aclTensor* before_capacity;
};
void plan_init_routing_v2(Plan& plan, const InitRoutingV2& op);

struct InitRoutingV2Grad {
  const aclTensor& grad_expanded_x;
  const aclTensor& expanded_row_idx;
  int64_t top_k;
  int64_t drop_pad_mode;
  int64_t active_num;
  const aclTensor& grad_x;
};
void plan_init_routing_v2_grad(Plan& plan, const InitRoutingV2Grad& op);

struct FinalizeRoutingV2 {
  const aclTensor& expanded_x;
  const aclTensor& expanded_row_idx;
  const aclTensor* x1;
  const aclTensor* x2;
  const aclTensor* bias;
  const aclTensor* scales;
  const aclTensor* expert_idx;
  int64_t drop_pad_mode;
  const aclTensor& out;
};
void plan_finalize_routing_v2(Plan& plan, const FinalizeRoutingV2& op);

struct FinalizeRoutingV2Grad {
  const aclTensor& grad_y;
  const aclTensor& expanded_row_idx;
  const aclTensor* expanded_x;
  const aclTensor* scales;
  const aclTensor* expert_idx;
  const aclTensor* bias;
  int64_t drop_pad_mode;
  int64_t active_num;
  int64_t expert_num;
  int64_t expert_capacity;
  const aclTensor& grad_expanded_x;
  const aclTensor& grad_scales;
};
void plan_finalize_routing_v2_grad(Plan& plan, const FinalizeRoutingV2Grad& op);

// The A2/A3 kernel of MoeTokenUnpermute, without probs also that of MoeTokenPermuteGrad:
// out[t] = sum over k of probs[t, k] * rows[indices[t * K + k]], float32, k ascending. Indices >= rows and slots of
// probability 0 are skipped; negative indices are not checked.
void unpermute_rows(
    const char* kernel,
    const aclTensor& rows,
    const aclTensor& indices,
    const std::optional<aclTensor>& probs,
    int64_t top_k,
    const aclTensor& out);

} // namespace standin::routing
