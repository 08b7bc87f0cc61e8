#include "large_outputs.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace moe::cpu {

void use_huge_pages(const Tensor& output) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  // Below, a page or two would not pay for the call.
  constexpr size_t kMinBytes = 4 * kHugePage;
  if (output.nbytes() < kMinBytes) {
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(output.data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + output.nbytes()) / kHugePage * kHugePage;
  // Advice: where the system has no such pages it changes nothing, and an error is none of ours.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)output;
#endif
}

bool outgrows_caches(const Tensor& output) {
  constexpr size_t kMinBytes = size_t{32} << 20;
  return output.storage().nbytes() >= kMinBytes;
}

bool streams(const Tensor& output, int64_t row_bytes) {
  return outgrows_caches(output) && row_bytes % kStreamAlignment == 0 &&
         reinterpret_cast<uintptr_t>(output.data_ptr()) % kStreamAlignment == 0;
}

} // namespace moe::cpu
