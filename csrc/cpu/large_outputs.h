// Writing outputs that are larger than the caches. Nothing here changes a result.
//
//   use_huge_pages: a large new tensor comes from the system page by page, and the faults cost several times what a
//     kernel does. Asks Linux for pages of 2 MiB.
//   streams, stream_copy: stores that go past the caches. Ordinary ones read every line of the output first, only to
//     overwrite it, and push out what is still needed.
#pragma once

#include <cstdint>

#include "../common/checks.h"

#ifdef __SSE2__
#include <emmintrin.h>
#else
#include <cstring>
#endif

namespace moe::cpu {

void use_huge_pages(const Tensor& output);

// Whether `output`, or the tensor that it is a part of, is larger than the caches.
bool outgrows_caches(const Tensor& output);

// Whether the rows of `output` are worth streaming, and aligned for it.
bool streams(const Tensor& output, int64_t row_bytes);

constexpr int64_t kStreamAlignment = 64;

// `to` and `bytes` are multiples of kStreamAlignment. stream_end() comes after the last of a thread.
inline void stream_copy(void* to, const void* from, int64_t bytes) {
#ifdef __SSE2__
  auto* target = static_cast<__m128i*>(to);
  const auto* source = static_cast<const __m128i*>(from);
  // A line at a time: its four stores leave the processor as one.
  for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(__m128i)); i += 4) {
    const __m128i a = _mm_loadu_si128(source + i);
    const __m128i b = _mm_loadu_si128(source + i + 1);
    const __m128i c = _mm_loadu_si128(source + i + 2);
    const __m128i d = _mm_loadu_si128(source + i + 3);
    _mm_stream_si128(target + i, a);
    _mm_stream_si128(target + i + 1, b);
    _mm_stream_si128(target + i + 2, c);
    _mm_stream_si128(target + i + 3, d);
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

// Streamed stores are not ordered with others: makes them visible before the thread says that it is done.
inline void stream_end() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

} // namespace moe::cpu
