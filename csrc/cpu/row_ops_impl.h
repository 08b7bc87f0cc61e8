// Bodies of row_ops.h. Included once for each instruction set, inside a namespace of its own (MOE_ROW_OPS_NAMESPACE),
// after the target options of that set: nothing here may be shared with code compiled for another set. No include
// guard: the including files differ in what they define.

namespace moe::cpu::MOE_ROW_OPS_NAMESPACE {

constexpr int64_t kBlock = kLanes;

// A vector register of this instruction set. Sums that are held in registers from block to block are written with it:
// compilers keep an array in memory, and every addition would wait for the store before it.
template <typename A>
struct Register {
  using type [[gnu::vector_size(MOE_ROW_OPS_VECTOR_BYTES)]] = A;
};

template <typename A>
struct Sums {
  using Vector = typename Register<A>::type;
  static constexpr int64_t kWidth = MOE_ROW_OPS_VECTOR_BYTES / sizeof(A);
  static constexpr int64_t kCount = kBlock / kWidth;
  Vector vectors[kCount] = {};

  static Vector load(const A* block, int64_t v) {
    Vector vector;
    __builtin_memcpy(&vector, block + v * kWidth, sizeof(vector));
    return vector;
  }

  static void store(A* block, int64_t v, Vector vector) {
    __builtin_memcpy(block + v * kWidth, &vector, sizeof(vector));
  }

  // Calls body(v) for each vector of a block.
  template <typename Body>
  static void each(const Body& body) {
#pragma GCC unroll 16
    for (int64_t v = 0; v < kCount; ++v) {
      body(v);
    }
  }
};

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

// How far ahead of what is read to ask for what comes: as far as the rows that are read together may lie in the
// first-level cache, in bytes.
constexpr int64_t bytes_ahead(int64_t num_rows) {
  constexpr int64_t kFarthest = 4096;
  constexpr int64_t kTogether = 16384;
  return num_rows * kFarthest <= kTogether ? kFarthest : kTogether / num_rows;
}

// Asks for the block that is read that much after the one at i, here or in the next row. Without a next row it asks for
// something all the same: compilers drop a request that depends on a condition.
template <typename T, typename A>
inline void prefetch_later(const Term<T, A>& term, int64_t i, int64_t row_size, int64_t bytes) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t later = i + bytes / static_cast<int64_t>(sizeof(T));
  const T* next = term.next == nullptr ? term.row : term.next + (later - row_size);
  const T* block = later < row_size ? term.row + later : next;
  for (int64_t j = 0; j < kBlock; j += kLine) {
    __builtin_prefetch(block + j);
  }
}

template <typename T, typename A>
inline void add_block(Sums<A>& sums, const Term<T, A>& term, int64_t i) {
  using S = Sums<A>;
  A row_buffer[kBlock];
  const A* row = load_block(row_buffer, term.row + i);
  if (!term.weighted) {
    S::each([&](int64_t v) { sums.vectors[v] += S::load(row, v); });
  } else if (term.bias == nullptr) {
    S::each([&](int64_t v) { sums.vectors[v] += term.weight * S::load(row, v); });
  } else {
    A bias_buffer[kBlock];
    const A* bias = load_block(bias_buffer, term.bias + i);
    S::each([&](int64_t v) { sums.vectors[v] += term.weight * (S::load(row, v) + S::load(bias, v)); });
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
  const int64_t ahead = bytes_ahead(count);
  int64_t i = stretch.begin;
  for (; i + kBlock <= stretch.end; i += kBlock, out += kBlock) {
    Sums<A> sums;
    for (int64_t k = 0; k < count; ++k) {
      prefetch_later(terms[k], i, stretch.size, ahead);
      add_block(sums, terms[k], i);
    }
    A block[kBlock];
    Sums<A>::each([&](int64_t v) { Sums<A>::store(block, v, sums.vectors[v]); });
    store_block(out, block);
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
  using S = Sums<A>;
  S sums;
  S::each([&](int64_t v) { sums.vectors[v] = S::load(lanes, v); });
  const A weight = term.weight;
  int64_t i = stretch.begin;
  for (; i + kBlock <= stretch.end; i += kBlock, out += kBlock) {
    prefetch_later(term, i, stretch.size, bytes_ahead(1));
    A grad_buffer[kBlock];
    A row_buffer[kBlock];
    A scaled[kBlock];
    const A* grads = load_block(grad_buffer, grad + i);
    const A* rows = load_biased(row_buffer, term, i);
    S::each([&](int64_t v) {
      const auto g = S::load(grads, v);
      sums.vectors[v] += S::load(rows, v) * g;
      S::store(scaled, v, weight * g);
    });
    store_block(out, scaled);
  }
  S::each([&](int64_t v) { S::store(lanes, v, sums.vectors[v]); });
  for (int64_t j = 0; i < stretch.end; ++i, ++j, ++out) {
    const A g = static_cast<A>(grad[i]);
    const A row = static_cast<A>(term.row[i]);
    *out = static_cast<T>(weight * g);
    lanes[j] += (term.bias == nullptr ? row : row + static_cast<A>(term.bias[i])) * g;
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
