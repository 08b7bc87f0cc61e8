// Device and pinned host memory. Device memory is a memfd mapped twice: callers get a mapping without access rights, so
// that the host faults when it follows a device pointer, and the stand-in works through the other one.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "runtime.h"

namespace standin {
namespace {

constexpr aclError kOutOfMemory = 207001; // ACL_ERROR_RT_MEMORY_ALLOCATION
constexpr uint64_t kPage = 4096;

struct Allocation {
  uint64_t bytes; // as asked for: what extents are checked against
  uint64_t mapped;
  char* host;
  int device;
};

struct Memory {
  std::shared_mutex mutex;
  std::map<uintptr_t, Allocation> device; // by the address that callers have
  std::set<void*> host;
  int64_t device_bytes[kDevices] = {};
};

// Never destroyed: stream threads and exit handlers may still use it.
Memory& memory() {
  static auto* memory = new Memory;
  return *memory;
}

uintptr_t number(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

// The host's view of a device range, or null. The caller holds the lock.
char* find(const void* address, uint64_t bytes) {
  auto after = memory().device.upper_bound(number(address));
  if (after == memory().device.begin()) {
    return nullptr;
  }
  const auto& [base, allocation] = *std::prev(after);
  const uint64_t offset = number(address) - base;
  const bool inside = offset <= allocation.bytes && bytes <= allocation.bytes - offset;
  return inside ? allocation.host + offset : nullptr;
}

// Whether any byte of the range is in a mapping of device memory.
bool touches_device(const void* address, uint64_t bytes) {
  auto after = memory().device.lower_bound(number(address) + bytes);
  if (bytes == 0 || after == memory().device.begin()) {
    return false;
  }
  const auto& [base, allocation] = *std::prev(after);
  return number(address) < base + allocation.mapped;
}

void* map_shared(int file, uint64_t bytes, int protection) {
  void* mapping = mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
  if (mapping == MAP_FAILED) {
    die("mmap of " + std::to_string(bytes) + " bytes failed");
  }
  return mapping;
}

void* allocate(uint64_t bytes) {
  const uint64_t mapped = (bytes + kPage - 1) / kPage * kPage;
  const int file = memfd_create("cann_standin", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(mapped)) != 0) {
    die("memfd_create failed");
  }
  auto* host = static_cast<char*>(map_shared(file, mapped, PROT_READ | PROT_WRITE));
  void* address = map_shared(file, mapped, PROT_NONE);
  close(file);
  fill_poison(host, mapped);
  std::unique_lock lock(memory().mutex);
  memory().device[number(address)] = {bytes, mapped, host, current_device()};
  memory().device_bytes[current_device()] += static_cast<int64_t>(bytes);
  return address;
}

void release(void* address) {
  std::unique_lock lock(memory().mutex);
  const auto found = memory().device.find(number(address));
  if (found == memory().device.end()) {
    die("aclrtFree of an address that is not the start of a live device allocation");
  }
  const Allocation& allocation = found->second;
  memory().device_bytes[allocation.device] -= static_cast<int64_t>(allocation.bytes);
  munmap(allocation.host, allocation.mapped);
  munmap(address, allocation.mapped);
  memory().device.erase(found);
}

struct Sides {
  bool from_device;
  bool to_device;
};

Sides sides(aclrtMemcpyKind kind, const void* to, const void* from) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return {false, false};
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
      return {false, true};
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return {true, false};
    case ACL_MEMCPY_DEFAULT:
      return {is_device_range(from, 1), is_device_range(to, 1)};
    default:
      return {true, true};
  }
}

void* side(const void* address, uint64_t bytes, bool device) {
  if (device) {
    return host_view(address, bytes);
  }
  std::shared_lock lock(memory().mutex);
  if (touches_device(address, bytes)) {
    die("a copy takes a device address for a host address");
  }
  return const_cast<void*>(address);
}

void copy(void* to, const void* from, uint64_t bytes, Sides where) {
  if (bytes > 0) {
    std::memmove(side(to, bytes, where.to_device), side(from, bytes, where.from_device), bytes);
  }
}

} // namespace

void fill_poison(void* host, uint64_t bytes) {
  auto* words = static_cast<uint16_t*>(host);
  std::fill(words, words + bytes / 2, kPoison);
  if (bytes % 2 != 0) {
    static_cast<uint8_t*>(host)[bytes - 1] = kPoison & 0xFF;
  }
}

bool is_device_range(const void* address, uint64_t bytes) {
  std::shared_lock lock(memory().mutex);
  return find(address, bytes) != nullptr;
}

void* host_view(const void* address, uint64_t bytes) {
  std::shared_lock lock(memory().mutex);
  char* view = find(address, bytes);
  if (view == nullptr) {
    char text[96];
    std::snprintf(
        text, sizeof text, "%llu bytes at %p are not inside a live device allocation",
        static_cast<unsigned long long>(bytes), address);
    die(text);
  }
  return view;
}

int device_of(const void* address) {
  std::shared_lock lock(memory().mutex);
  const auto after = memory().device.upper_bound(number(address));
  return find(address, 0) == nullptr ? -1 : std::prev(after)->second.device;
}

int64_t live_device_bytes(int device) {
  std::shared_lock lock(memory().mutex);
  return memory().device_bytes[device];
}

int64_t live_device_bytes() {
  int64_t total = 0;
  for (int device = 0; device < kDevices; ++device) {
    total += live_device_bytes(device);
  }
  return total;
}

} // namespace standin

using namespace standin;

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  if (address == nullptr || bytes == 0) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMalloc: null pointer or size 0");
  }
  if (const int code = injected_fault("malloc")) {
    return refuse(code, "aclrtMalloc: injected fault");
  }
  if (static_cast<uint64_t>(live_device_bytes(current_device())) + bytes > kDeviceBytes) {
    return refuse(kOutOfMemory, "aclrtMalloc: out of device memory");
  }
  *address = allocate(bytes);
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}

aclError aclrtFree(void* address) {
  if (address == nullptr) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtFree: null pointer");
  }
  release(address);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** address, size_t bytes) {
  if (address == nullptr || bytes == 0) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMallocHost: null pointer or size 0");
  }
  if (posix_memalign(address, kPage, bytes) != 0) {
    return refuse(kOutOfMemory, "aclrtMallocHost: out of memory");
  }
  std::unique_lock lock(memory().mutex);
  memory().host.insert(*address);
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void* address) {
  std::unique_lock lock(memory().mutex);
  if (memory().host.erase(address) == 0) {
    die("aclrtFreeHost of an address that aclrtMallocHost did not return");
  }
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  *attributes = {};
  const int device = device_of(address);
  attributes->location.type = device >= 0 ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->location.id = device >= 0 ? static_cast<uint32_t>(device) : 0;
  if (device < 0) {
    std::shared_lock lock(memory().mutex);
    if (memory().host.count(const_cast<void*>(address)) != 0) {
      attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
    }
  }
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > capacity) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemcpy: more bytes than the destination holds");
  }
  copy(to, from, bytes, sides(kind, to, from));
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(
    void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  if (bytes > capacity) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemcpyAsync: more bytes than the destination holds");
  }
  const Sides where = sides(kind, to, from);
  submit(stream, [=] { copy(to, from, bytes, where); });
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* address, size_t capacity, int32_t value, size_t bytes) {
  if (bytes > capacity) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemset: more bytes than the destination holds");
  }
  std::memset(host_view(address, bytes), value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* address, size_t capacity, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > capacity) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemsetAsync: more bytes than the destination holds");
  }
  submit(stream, [=] { std::memset(host_view(address, bytes), value, bytes); });
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *total = kDeviceBytes;
  *free = kDeviceBytes - static_cast<uint64_t>(live_device_bytes(current_device()));
  return ACL_SUCCESS;
}
