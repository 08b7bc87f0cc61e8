// The few operators that torch_npu itself calls for copies and fills. Everything else of ATen runs on the CPU, see
// aten_override.cpp.
#include <cstring>

#include "../runtime.h"

using namespace standin;

namespace {

// A number of any dtype: as an integer and as a float, exact in at least one.
struct Number {
  int64_t integer;
  double real;
};

template <typename T>
Number load_as(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return {static_cast<int64_t>(value), static_cast<double>(value)};
}

template <typename T>
void store_as(char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

Number load_number(aclDataType dtype, const char* from) {
  switch (dtype) {
    case ACL_INT8:
      return load_as<int8_t>(from);
    case ACL_UINT8:
    case ACL_BOOL:
      return load_as<uint8_t>(from);
    case ACL_INT16:
      return load_as<int16_t>(from);
    case ACL_INT32:
      return load_as<int32_t>(from);
    case ACL_INT64:
      return load_as<int64_t>(from);
    case ACL_DOUBLE:
      return load_as<double>(from);
    default:
      const float value = load_float(dtype, from);
      return {static_cast<int64_t>(value), value};
  }
}

void store_number(aclDataType dtype, char* to, Number value) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
      return store_as(to, static_cast<int8_t>(value.integer));
    case ACL_BOOL:
      return store_as(to, value.real != 0);
    case ACL_INT16:
      return store_as(to, static_cast<int16_t>(value.integer));
    case ACL_INT32:
      return store_as(to, static_cast<int32_t>(value.integer));
    case ACL_INT64:
      return store_as(to, value.integer);
    case ACL_DOUBLE:
      return store_as(to, value.real);
    default:
      return store_float(dtype, to, static_cast<float>(value.real));
  }
}

bool convertible(aclDataType dtype) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_INT16:
    case ACL_INT32:
    case ACL_INT64:
    case ACL_DOUBLE:
      return true;
    default:
      return is_float(dtype);
  }
}

// Whether `from` has the shape of `to` or can be expanded to it.
bool expands_to(const aclTensor& from, const aclTensor& to) {
  if (from.rank() > to.rank()) {
    return false;
  }
  for (int64_t i = 1; i <= from.rank(); ++i) {
    if (from.dim(-i) != 1 && from.dim(-i) != to.dim(-i)) {
      return false;
    }
  }
  return true;
}

// `tensor` with the dimensions of `like`; expanded ones have the stride 0.
aclTensor expanded(const aclTensor& tensor, const aclTensor& like) {
  aclTensor result = tensor;
  const int64_t missing = like.rank() - tensor.rank();
  result.dims = like.dims;
  result.strides.assign(like.dims.size(), 0);
  for (int64_t i = missing; i < like.rank(); ++i) {
    const int64_t own = i - missing;
    result.strides[i] = tensor.dims[own] == 1 ? 0 : tensor.strides[own];
  }
  return result;
}

// Calls visit(offset of the element of a, offset of the element of b), in bytes, for tensors of equal dimensions.
template <typename Visit>
void for_each_pair(const aclTensor& a, const aclTensor& b, const Visit& visit) {
  std::vector<int64_t> index(a.dims.size(), 0);
  int64_t at_a = 0;
  int64_t at_b = 0;
  for (int64_t left = a.numel(); left > 0; --left) {
    visit(at_a * item_size(a.dtype), at_b * item_size(b.dtype));
    for (int64_t i = a.rank() - 1; i >= 0; --i) {
      at_a += a.strides[i];
      at_b += b.strides[i];
      if (++index[i] < a.dims[i]) {
        break;
      }
      at_a -= a.strides[i] * a.dims[i];
      at_b -= b.strides[i] * a.dims[i];
      index[i] = 0;
    }
  }
}

void copy(const aclTensor& to, const aclTensor& narrow) {
  const aclTensor from = expanded(narrow, to);
  char* target = first_element(to);
  const char* source = first_element(from);
  const auto size = static_cast<size_t>(item_size(to.dtype));
  if (to.dtype == from.dtype && to.contiguous() && from.contiguous()) {
    std::memmove(target, source, static_cast<size_t>(to.numel()) * size);
  } else if (to.dtype == from.dtype) {
    for_each_pair(to, from, [&](int64_t a, int64_t b) { std::memmove(target + a, source + b, size); });
  } else {
    for_each_pair(to, from, [&](int64_t a, int64_t b) {
      store_number(to.dtype, target + a, load_number(from.dtype, source + b));
    });
  }
}

void fill(const aclTensor& to, Number value) {
  char* target = first_element(to);
  for_each_pair(to, to, [&](int64_t a, int64_t) { store_number(to.dtype, target + a, value); });
}

void plan_copy(Plan& plan, const aclTensor* to, const aclTensor* from) {
  const aclTensor target = plan.tensor(to, "the destination");
  const aclTensor source = plan.tensor(from, "the source");
  plan.need(expands_to(source, target), kInvalid, "copy: the source does not expand to the destination");
  plan.need(
      source.dtype == target.dtype || (convertible(source.dtype) && convertible(target.dtype)), kInvalid,
      "copy: no conversion between these dtypes");
  if (target.numel() == 0) {
    plan.nothing_to_do();
    return;
  }
  plan.kernel([=] { copy(target, source); });
}

void plan_fill(Plan& plan, const aclTensor* to, Number value) {
  const aclTensor target = plan.tensor(to, "the tensor");
  plan.need(convertible(target.dtype), kInvalid, "fill: no such dtype");
  if (target.numel() == 0) {
    plan.nothing_to_do();
    return;
  }
  plan.output(to);
  plan.kernel([=] { fill(target, value); });
}

} // namespace

STANDIN_API int aclnnInplaceCopyGetWorkspaceSize(
    aclTensor* self, const aclTensor* source, uint64_t* size, aclOpExecutor** executor) {
  return phase1("aclnnInplaceCopy", size, executor, [&](Plan& plan) { plan_copy(plan, self, source); }, self, source);
}
STANDIN_PHASE2(aclnnInplaceCopy)

STANDIN_API int aclnnCastGetWorkspaceSize(
    const aclTensor* self, aclDataType dtype, aclTensor* out, uint64_t* size, aclOpExecutor** executor) {
  const auto plan_cast = [&](Plan& plan) {
    plan.need(out == nullptr || out->dtype == dtype, kInvalid, "aclnnCast: the output has another dtype");
    plan_copy(plan, out, self);
  };
  return phase1("aclnnCast", size, executor, plan_cast, self, static_cast<int64_t>(dtype), out);
}
STANDIN_PHASE2(aclnnCast)

STANDIN_API int aclnnInplaceFillScalarGetWorkspaceSize(
    aclTensor* self, const aclScalar* value, uint64_t* size, aclOpExecutor** executor) {
  const auto plan_scalar = [&](Plan& plan) {
    plan.need(value != nullptr, kNullptr, "aclnnInplaceFillScalar: the value is null");
    plan_fill(plan, self, load_number(value->dtype, value->bytes.data()));
  };
  return phase1("aclnnInplaceFillScalar", size, executor, plan_scalar, self, value);
}
STANDIN_PHASE2(aclnnInplaceFillScalar)

STANDIN_API int aclnnInplaceZeroGetWorkspaceSize(aclTensor* self, uint64_t* size, aclOpExecutor** executor) {
  return phase1("aclnnInplaceZero", size, executor, [&](Plan& plan) { plan_fill(plan, self, {0, 0}); }, self);
}
STANDIN_PHASE2(aclnnInplaceZero)

STANDIN_API int aclnnInplaceOneGetWorkspaceSize(aclTensor* self, uint64_t* size, aclOpExecutor** executor) {
  return phase1("aclnnInplaceOne", size, executor, [&](Plan& plan) { plan_fill(plan, self, {1, 1}); }, self);
}
STANDIN_PHASE2(aclnnInplaceOne)
