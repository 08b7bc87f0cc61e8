// The fastest ways to copy a large block on all threads, as limits for the operators. limits.py compiles it.
//
// An ordinary store reads the line of the target first, only to overwrite it; a streaming store does not. The block
// is shared out over the OpenMP threads that torch uses as well, so that no second pool keeps the cores busy.
#include <cstddef>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64;

// `to` is a multiple of kLine.
void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__SSE2__)
  for (size_t i = 0; i < kLine; i += sizeof(__m128i)) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
  }
#else
  std::memcpy(to, from, kLine);
#endif
}

void stream_part(char* to, const char* from, size_t bytes) {
  size_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    stream_line(to + i, from + i);
  }
#ifdef __SSE2__
  _mm_sfence(); // streamed stores are not ordered with others
#endif
  std::memcpy(to + i, from + i, bytes - i);
}

template <typename CopyPart>
void on_all_threads(char* to, const char* from, size_t bytes, int threads, CopyPart copy_part) {
  const size_t lines = (bytes + kLine - 1) / kLine;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) {
    const size_t begin = lines * part / threads * kLine;
    const size_t end = lines * (part + 1) / threads * kLine;
    copy_part(to + begin, from + begin, (end < bytes ? end : bytes) - begin);
  }
}

} // namespace

extern "C" {

// `to` is a multiple of 64.
void stream_copy(char* to, const char* from, size_t bytes, int threads) {
  on_all_threads(to, from, bytes, threads, stream_part);
}

void memmove_copy(char* to, const char* from, size_t bytes, int threads) {
  on_all_threads(to, from, bytes, threads, std::memmove);
}

} // extern "C"
