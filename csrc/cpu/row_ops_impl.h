// Bodies of row_ops.h. Included once for each instruction set, inside a namespace of its own (MOE_ROW_OPS_NAMESPACE),
// after the target options of that set: nothing here may be shared with code compiled for another set. No include
// guard: the including files differ in what they define.

namespace moe::cpu::MOE_ROW_OPS_NAMESPACE {

constexpr int64_t kBlock = 32;

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
void set(A* sum, const T* row, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A buffer[kBlock];
    const A* block = load_block(buffer, row + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      sum[i + j] = block[j];
    }
  }
  for (; i < n; ++i) {
    sum[i] = static_cast<A>(row[i]);
  }
}

template <typename T, typename A>
void add(A* sum, const T* row, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A buffer[kBlock];
    const A* block = load_block(buffer, row + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      sum[i + j] += block[j];
    }
  }
  for (; i < n; ++i) {
    sum[i] += static_cast<A>(row[i]);
  }
}

template <typename T, typename A>
void add_scaled(A* sum, const T* row, A weight, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A buffer[kBlock];
    const A* block = load_block(buffer, row + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      sum[i + j] += weight * block[j];
    }
  }
  for (; i < n; ++i) {
    sum[i] += weight * static_cast<A>(row[i]);
  }
}

template <typename T, typename A>
void add_scaled_pair(A* sum, const T* row, const T* bias, A weight, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A row_buffer[kBlock];
    A bias_buffer[kBlock];
    const A* row_block = load_block(row_buffer, row + i);
    const A* bias_block = load_block(bias_buffer, bias + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      sum[i + j] += weight * (row_block[j] + bias_block[j]);
    }
  }
  for (; i < n; ++i) {
    sum[i] += weight * (static_cast<A>(row[i]) + static_cast<A>(bias[i]));
  }
}

template <typename T, typename A>
void round(T* out, const A* sum, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    store_block(out + i, sum + i);
  }
  for (; i < n; ++i) {
    out[i] = static_cast<T>(sum[i]);
  }
}

template <typename T, typename A>
void scale(T* out, const T* row, A weight, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A buffer[kBlock];
    const A* block = load_block(buffer, row + i);
    A scaled[kBlock];
    for (int64_t j = 0; j < kBlock; ++j) {
      scaled[j] = weight * block[j];
    }
    store_block(out + i, scaled);
  }
  for (; i < n; ++i) {
    out[i] = static_cast<T>(weight * static_cast<A>(row[i]));
  }
}

template <typename A>
A sum_lanes(const A (&lanes)[kBlock]) {
  A sum = 0;
  for (const A lane : lanes) {
    sum += lane;
  }
  return sum;
}

template <typename T, typename A>
A dot(const T* left, const T* right, int64_t n) {
  A lanes[kBlock] = {};
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A left_buffer[kBlock];
    A right_buffer[kBlock];
    const A* left_block = load_block(left_buffer, left + i);
    const A* right_block = load_block(right_buffer, right + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      lanes[j] += left_block[j] * right_block[j];
    }
  }
  for (int64_t j = 0; i < n; ++i, ++j) {
    lanes[j] += static_cast<A>(left[i]) * static_cast<A>(right[i]);
  }
  return sum_lanes(lanes);
}

template <typename T, typename A>
A dot_pair(const T* left, const T* bias, const T* right, int64_t n) {
  A lanes[kBlock] = {};
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A left_buffer[kBlock];
    A bias_buffer[kBlock];
    A right_buffer[kBlock];
    const A* left_block = load_block(left_buffer, left + i);
    const A* bias_block = load_block(bias_buffer, bias + i);
    const A* right_block = load_block(right_buffer, right + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      lanes[j] += (left_block[j] + bias_block[j]) * right_block[j];
    }
  }
  for (int64_t j = 0; i < n; ++i, ++j) {
    lanes[j] += (static_cast<A>(left[i]) + static_cast<A>(bias[i])) * static_cast<A>(right[i]);
  }
  return sum_lanes(lanes);
}

inline void pair_rows(uint32_t* out, const uint16_t* first, const uint16_t* second, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = first[i] | static_cast<uint32_t>(second[i]) << 16;
  }
}

template <typename T, typename A>
constexpr RowOps<T, A> table() {
  return {set<T, A>,   add<T, A>,   add_scaled<T, A>, add_scaled_pair<T, A>,
          round<T, A>, scale<T, A>, dot<T, A>,        dot_pair<T, A>};
}

} // namespace moe::cpu::MOE_ROW_OPS_NAMESPACE
