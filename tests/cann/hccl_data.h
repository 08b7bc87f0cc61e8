// Data of collectives: HCCL's data types, buffers on a device, and reductions.
#pragma once

#include <cstring>

#include "runtime.h"

#pragma GCC visibility push(default)
#include "third_party/hccl/inc/hccl/hccl.h"
#pragma GCC visibility pop

namespace standin {

struct Type {
  const char* name;
  int64_t size;
  aclDataType acl; // of those that can be reduced, else ACL_DT_UNDEFINED
};

// Null for what is no data type.
const Type* find_type(HcclDataType type);

// Elements of a device buffer. The host's view is asked for when a stream comes to it.
struct Buffer {
  char* address;
  uint64_t count;
  const Type* type;

  Buffer(const void* address, uint64_t count, HcclDataType type)
      : address(static_cast<char*>(const_cast<void*>(address))), count(count), type(find_type(type)) {}

  uint64_t bytes() const {
    return count * static_cast<uint64_t>(type->size);
  }
  Buffer part(uint64_t first, uint64_t elements) const {
    Buffer part = *this;
    part.address += first * static_cast<uint64_t>(type->size);
    part.count = elements;
    return part;
  }
  char* view() const {
    return bytes() == 0 ? nullptr : static_cast<char*>(host_view(address, bytes()));
  }
  std::vector<char> read() const {
    const char* from = view();
    return {from, from + bytes()};
  }
  void write(const std::vector<char>& data) const {
    if (!data.empty()) {
      std::memcpy(view(), data.data(), data.size());
    }
  }
  std::string text() const {
    return std::to_string(count) + " x " + type->name;
  }
};

// "sum", "prod", "max" or "min", or null.
const char* name_of(HcclReduceOp op);

// The contributions of all ranks combined element by element, in the order of ranks: the same bits on every rank.
// 16-bit floats are computed in float32 and rounded once.
std::vector<char> reduced(HcclReduceOp op, const Type& type, const std::vector<std::vector<char>>& all);

} // namespace standin
