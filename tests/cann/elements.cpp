// Elements of tensors as kernels read and write them: logical order whatever the strides, 16-bit floats widened on
// reading and rounded to nearest even on writing, every index checked.
#include <bit>
#include <cmath>
#include <cstring>

#include "runtime.h"

int64_t aclTensor::numel() const {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    count *= dim;
  }
  return count;
}

int64_t aclTensor::dim(int64_t index) const {
  const int64_t position = index < 0 ? index + rank() : index;
  if (position < 0 || position >= rank()) {
    standin::die("a kernel asks for dimension " + std::to_string(index) + " of " + std::to_string(rank()));
  }
  return dims[position];
}

bool aclTensor::contiguous() const {
  int64_t expected = 1;
  for (int64_t i = rank() - 1; i >= 0; --i) {
    if (dims[i] != 1 && strides[i] != expected) {
      return false;
    }
    expected *= dims[i];
  }
  return true;
}

namespace standin {
namespace {

float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t to_bfloat16(float value) {
  if (std::isnan(value)) {
    return 0x7FC0;
  }
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float from_float16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.F : 1.F;
  if (exponent == 31) {
    return fraction != 0 ? NAN : sign * INFINITY;
  }
  return sign * std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024), std::max(exponent, 1) - 25);
}

uint16_t to_float16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    return sign | 0x7E00;
  }
  const float size = std::fabs(value);
  if (size >= 65520.F) { // halfway between the largest number and the next power of two: rounds to infinity
    return sign | 0x7C00;
  }
  int exponent = 0;
  std::frexp(size, &exponent);
  exponent = size == 0.F ? -14 : std::max(exponent - 1, -14); // frexp calls the exponent of 0 zero
  // In units of the last place; 1024 is the leading bit of a normal number, and a carry goes on into the exponent.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + units));
}

// Where an element is, in elements from the first one.
int64_t position(const aclTensor& tensor, int64_t flat) {
  if (flat < 0 || flat >= tensor.numel()) {
    die("a kernel uses element " + std::to_string(flat) + " of " + std::to_string(tensor.numel()));
  }
  int64_t offset = 0;
  for (int64_t i = tensor.rank() - 1; i >= 0; --i) {
    offset += flat % tensor.dims[i] * tensor.strides[i];
    flat /= tensor.dims[i];
  }
  return offset;
}

char* element(const aclTensor& tensor, char* base, int64_t flat) {
  return base + position(tensor, flat) * item_size(tensor.dtype);
}

} // namespace

char* first_element(const aclTensor& tensor) {
  if (tensor.numel() == 0) {
    return nullptr;
  }
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.rank(); ++i) {
    last += (tensor.dims[i] - 1) * tensor.strides[i];
  }
  const int64_t size = item_size(tensor.dtype);
  const char* address = static_cast<const char*>(tensor.data) + tensor.offset * size;
  return static_cast<char*>(host_view(address, static_cast<uint64_t>((last + 1) * size)));
}

float load_float(aclDataType dtype, const char* from) {
  if (dtype == ACL_FLOAT) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return dtype == ACL_BF16 ? from_bfloat16(bits) : from_float16(bits);
}

void store_float(aclDataType dtype, char* to, float value) {
  if (dtype == ACL_FLOAT) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const uint16_t bits = dtype == ACL_BF16 ? to_bfloat16(value) : to_float16(value);
  std::memcpy(to, &bits, sizeof bits);
}

int64_t item_size(aclDataType dtype) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
      return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    default:
      die("a tensor of the dtype " + std::to_string(dtype));
  }
}

bool is_float(aclDataType dtype) {
  return dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16;
}

bool is_index(aclDataType dtype) {
  return dtype == ACL_INT32 || dtype == ACL_INT64;
}

Floats::Floats(const aclTensor& tensor) : tensor_(tensor), base_(first_element(tensor)) {
  if (!is_float(tensor.dtype)) {
    die("a kernel reads floats from a tensor of the dtype " + std::to_string(tensor.dtype));
  }
}

float Floats::get(int64_t flat) const {
  return load_float(tensor_.dtype, element(tensor_, base_, flat));
}

void Floats::set(int64_t flat, float value) const {
  store_float(tensor_.dtype, element(tensor_, base_, flat), value);
}

int64_t Floats::size() const {
  return tensor_.numel();
}

Ints::Ints(const aclTensor& tensor) : tensor_(tensor), base_(first_element(tensor)) {
  if (!is_index(tensor.dtype)) {
    die("a kernel reads integers from a tensor of the dtype " + std::to_string(tensor.dtype));
  }
}

int64_t Ints::get(int64_t flat) const {
  int64_t wide = 0;
  int32_t narrow = 0;
  const char* from = element(tensor_, base_, flat);
  if (tensor_.dtype == ACL_INT64) {
    std::memcpy(&wide, from, sizeof wide);
    return wide;
  }
  std::memcpy(&narrow, from, sizeof narrow);
  return narrow;
}

void Ints::set(int64_t flat, int64_t value) const {
  char* to = element(tensor_, base_, flat);
  const auto narrow = static_cast<int32_t>(value);
  if (tensor_.dtype == ACL_INT64) {
    std::memcpy(to, &value, sizeof value);
  } else {
    std::memcpy(to, &narrow, sizeof narrow);
  }
}

int64_t Ints::size() const {
  return tensor_.numel();
}

void copy_element(const aclTensor& from, int64_t from_flat, const aclTensor& to, int64_t to_flat) {
  if (item_size(from.dtype) != item_size(to.dtype)) {
    die("copy_element between dtypes of different sizes");
  }
  const auto size = static_cast<size_t>(item_size(to.dtype));
  std::memmove(element(to, first_element(to), to_flat), element(from, first_element(from), from_flat), size);
}

void poison(const aclTensor& tensor) {
  char* base = first_element(tensor);
  for (int64_t flat = 0; flat < tensor.numel(); ++flat) {
    fill_poison(element(tensor, base, flat), static_cast<uint64_t>(item_size(tensor.dtype)));
  }
}

float rounded(float value, aclDataType dtype) {
  char bytes[sizeof(float)];
  store_float(dtype, bytes, value);
  return load_float(dtype, bytes);
}

} // namespace standin
