// Helpers of routing.h: refusals with the argument's name and shape, unchecked indices, stable sorting in float32.
#include "routing.h"

#include <algorithm>
#include <numeric>

namespace standin::routing {

std::string shape_text(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return text + ")";
}

void need_shape(const Plan& plan, int code, const char* name, const aclTensor& tensor, const Dims& wanted) {
  plan.need(
      tensor.dims == wanted, code,
      std::string(name) + " must have shape " + shape_text(wanted) + ", got " + shape_text(tensor.dims));
}

void need_rank(const Plan& plan, int code, const char* name, const aclTensor& tensor, int64_t rank) {
  plan.need(
      tensor.rank() == rank, code,
      std::string(name) + " must have " + std::to_string(rank) + " dimensions, got shape " + shape_text(tensor.dims));
}

void need_elements(const Plan& plan, int code, const char* name, const aclTensor& tensor) {
  plan.need(tensor.numel() > 0, code, std::string(name) + " must not be empty, got shape " + shape_text(tensor.dims));
}

void need_float(const Plan& plan, int code, const char* name, const aclTensor& tensor) {
  plan.need(is_float(tensor.dtype), code, std::string(name) + " must be float32, float16 or bfloat16");
}

void need_int32(const Plan& plan, int code, const char* name, const aclTensor& tensor) {
  plan.need(tensor.dtype == ACL_INT32, code, std::string(name) + " must be int32");
}

void need_dtype_of(
    const Plan& plan,
    int code,
    const char* name,
    const aclTensor& tensor,
    const char* other_name,
    const aclTensor& other) {
  plan.need(tensor.dtype == other.dtype, code, std::string(name) + " must have the dtype of " + other_name);
}

void need_no_padded_mode(const Plan& plan, bool padded_mode) {
  plan.need(!padded_mode, on_950() ? kInvalid : kTiling, "paddedMode must be false");
}

int64_t unchecked_index(const char* kernel, const char* what, int64_t slot, int64_t index, int64_t size) {
  if (index < 0 || index >= size) {
    die(std::string(kernel) + ": " + what + " index " + std::to_string(index) + " of slot " + std::to_string(slot) +
        " is out of bounds for " + std::to_string(size) + ", and this kernel does not check it");
  }
  return index;
}

void fill(const Floats& tensor, float value) {
  for (int64_t i = 0; i < tensor.size(); ++i) {
    tensor.set(i, value);
  }
}

void fill(const Ints& tensor, int64_t value) {
  for (int64_t i = 0; i < tensor.size(); ++i) {
    tensor.set(i, value);
  }
}

void copy_row(const aclTensor& from, int64_t from_row, const aclTensor& to, int64_t to_row, int64_t row_size) {
  for (int64_t h = 0; h < row_size; ++h) {
    copy_element(from, from_row * row_size + h, to, to_row * row_size + h);
  }
}

SortedSlots sort_slots(const Ints& ids) {
  std::vector<float> keys(ids.size());
  for (int64_t slot = 0; slot < ids.size(); ++slot) {
    keys[slot] = static_cast<float>(ids.get(slot));
  }
  SortedSlots sorted{std::vector<int64_t>(keys.size()), std::vector<int64_t>(keys.size())};
  std::iota(sorted.order.begin(), sorted.order.end(), 0);
  std::stable_sort(sorted.order.begin(), sorted.order.end(), [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
  for (size_t place = 0; place < sorted.order.size(); ++place) {
    sorted.position[sorted.order[place]] = static_cast<int64_t>(place);
  }
  return sorted;
}

} // namespace standin::routing
