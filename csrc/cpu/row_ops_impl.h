// Bodies of row_ops.h. Included once for each instruction set, inside a namespace of its own (MOE_ROW_OPS_NAMESPACE),
// after the target options of that set: nothing here may be shared with code compiled for another set. No include
// guard: the including files differ in what they define.

namespace moe::cpu::MOE_ROW_OPS_NAMESPACE {

constexpr int64_t kBlock = kLanes;

// kBlock elements of a row in the dtype of the sums: the row itself, or converted into `buffer`.
template <typename A, typename T>
inline const A* load_block(A* buffer, const T* row) {
  for (int64_t i = 0; i < kBlock; ++i) {
    buffer[i] = static_cast<A>(row[i]);
  }
  return buffer;
}

inline const float* load_block(float* /*buffer*/, const float* row) {
  return row;
}

inline const double* load_block(double* /*buffer*/, const double* row) {
  return row;
}

template <typename T, typename A>
inline void store_block(T* row, const A* block) {
  for (int64_t i = 0; i < kBlock; ++i) {
    row[i] = static_cast<T>(block[i]);
  }
}

// Compilers turn c10::Half conversions into a long sequence of integer operations; the processor has one instruction.
// Its width is that of the other loops: a block stored by halves and loaded whole would wait for its stores.
#if MOE_ROW_OPS_F16_LANES == 16
// The masked forms are the same instructions; GCC 12 warns of an uninitialized value inside the plain ones.
constexpr __mmask16 kAllLanes = 0xFFFF;

inline const float* load_block(float* buffer, const c10::Half* row) {
  for (int64_t i = 0; i < kBlock; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i));
    _mm512_storeu_ps(buffer + i, _mm512_maskz_cvtph_ps(kAllLanes, halves));
  }
  return buffer;
}

inline void store_block(c10::Half* row, const float* block) {
  for (int64_t i = 0; i < kBlock; i += 16) {
    const __m512 floats = _mm512_loadu_ps(block + i);
    const __m256i halves = _mm512_maskz_cvtps_ph(kAllLanes, floats, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + i), halves);
  }
}
#elif MOE_ROW_OPS_F16_LANES == 8
inline const float* load_block(float* buffer, const c10::Half* row) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
    _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(halves));
  }
  return buffer;
}

inline void store_block(c10::Half* row, const float* block) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(block + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row + i), halves);
  }
}
#endif

template <typename T, typename A>
void convert(A* out, const T* row, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A buffer[kBlock];
    const A* block = load_block(buffer, row + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      out[i + j] = block[j];
    }
  }
  for (; i < n; ++i) {
    out[i] = static_cast<A>(row[i]);
  }
}

template <typename T, typename A>
void round(T* out, const A* row, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    store_block(out + i, row + i);
  }
  for (; i < n; ++i) {
    out[i] = static_cast<T>(row[i]);
  }
}

// Asks for the block that is read some 1 KiB after the one at i.
template <typename T, typename A>
inline void prefetch_later(const Term<T, A>& term, int64_t i, int64_t row_size) {
  constexpr int64_t kAhead = 1024 / sizeof(T);
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t later = i + kAhead;
  const T* block = later < row_size ? term.row + later : term.next == nullptr ? nullptr : term.next + later - row_size;
  if (block != nullptr) {
    for (int64_t j = 0; j < kBlock; j += kLine) {
      __builtin_prefetch(block + j);
    }
  }
}

template <typename T, typename A>
inline void add_block(A* sums, const Term<T, A>& term, int64_t i) {
  A row_buffer[kBlock];
  const A* row = load_block(row_buffer, term.row + i);
  if (!term.weighted) {
    for (int64_t j = 0; j < kBlock; ++j) {
      sums[j] += row[j];
    }
  } else if (term.bias == nullptr) {
    for (int64_t j = 0; j < kBlock; ++j) {
      sums[j] += term.weight * row[j];
    }
  } else {
    A bias_buffer[kBlock];
    const A* bias = load_block(bias_buffer, term.bias + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      sums[j] += term.weight * (row[j] + bias[j]);
    }
  }
}

template <typename T, typename A>
inline A term_at(const Term<T, A>& term, int64_t i) {
  const A row = static_cast<A>(term.row[i]);
  const A value = term.bias == nullptr ? row : row + static_cast<A>(term.bias[i]);
  return term.weighted ? term.weight * value : value;
}

template <typename T, typename A>
void combine(T* out, const Term<T, A>* terms, int64_t count, Stretch stretch) {
  int64_t i = stretch.begin;
  for (; i + kBlock <= stretch.end; i += kBlock, out += kBlock) {
    A sums[kBlock] = {};
    for (int64_t k = 0; k < count; ++k) {
      prefetch_later(terms[k], i, stretch.size);
      add_block(sums, terms[k], i);
    }
    store_block(out, sums);
  }
  for (; i < stretch.end; ++i, ++out) {
    A sum = 0;
    for (int64_t k = 0; k < count; ++k) {
      sum += term_at(terms[k], i);
    }
    *out = static_cast<T>(sum);
  }
}

// row + bias of a term where it has one.
template <typename T, typename A>
inline const A* load_biased(A* buffer, const Term<T, A>& term, int64_t i) {
  const A* row = load_block(buffer, term.row + i);
  if (term.bias == nullptr) {
    return row;
  }
  A bias_buffer[kBlock];
  const A* bias = load_block(bias_buffer, term.bias + i);
  for (int64_t j = 0; j < kBlock; ++j) {
    buffer[j] = row[j] + bias[j];
  }
  return buffer;
}

template <typename T, typename A>
void scatter(T* out, A* lanes, const Term<T, A>& term, const T* grad, Stretch stretch) {
  A sums[kBlock]; // of its own: nothing else that is written can be the same memory
  for (int64_t j = 0; j < kBlock; ++j) {
    sums[j] = lanes[j];
  }
  int64_t i = stretch.begin;
  for (; i + kBlock <= stretch.end; i += kBlock, out += kBlock) {
    prefetch_later(term, i, stretch.size);
    A grad_buffer[kBlock];
    A row_buffer[kBlock];
    const A* grads = load_block(grad_buffer, grad + i);
    const A* rows = load_biased(row_buffer, term, i);
    A scaled[kBlock];
    for (int64_t j = 0; j < kBlock; ++j) {
      scaled[j] = term.weight * grads[j];
    }
    for (int64_t j = 0; j < kBlock; ++j) {
      sums[j] += rows[j] * grads[j];
    }
    store_block(out, scaled);
  }
  for (int64_t j = 0; i < stretch.end; ++i, ++j, ++out) {
    const A g = static_cast<A>(grad[i]);
    const A row = static_cast<A>(term.row[i]);
    *out = static_cast<T>(term.weight * g);
    sums[j] += (term.bias == nullptr ? row : row + static_cast<A>(term.bias[i])) * g;
  }
  for (int64_t j = 0; j < kBlock; ++j) {
    lanes[j] = sums[j];
  }
}

inline void pair_rows(uint32_t* out, const uint16_t* first, const uint16_t* second, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = first[i] | static_cast<uint32_t>(second[i]) << 16;
  }
}

template <typename T, typename A>
constexpr RowOps<T, A> table() {
  return {convert<T, A>, round<T, A>, combine<T, A>, scatter<T, A>};
}

} // namespace moe::cpu::MOE_ROW_OPS_NAMESPACE
