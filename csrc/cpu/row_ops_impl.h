// Bodies of row_ops.h. Included once for each instruction set, inside a namespace of its own (MOE_ROW_OPS_NAMESPACE),
// after the target options of that set: nothing here may be shared with code compiled for another set. No include
// guard: the including files differ in what they define.

namespace moe::cpu::MOE_ROW_OPS_NAMESPACE {

constexpr int64_t kBlock = 32;
constexpr int64_t kDotLanes = kBlock;

template <typename A, typename T>
inline void load_block(A* block, const T* source) {
  for (int64_t i = 0; i < kBlock; ++i) {
    block[i] = static_cast<A>(source[i]);
  }
}

template <typename T, typename A>
inline void store_block(T* target, const A* block) {
  for (int64_t i = 0; i < kBlock; ++i) {
    target[i] = static_cast<T>(block[i]);
  }
}

#ifdef MOE_ROW_OPS_HAVE_F16C
// Compilers turn c10::Half conversions into a long sequence of integer operations; the processor has one instruction.
inline void load_block(float* block, const c10::Half* source) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(block + i, _mm256_cvtph_ps(halves));
  }
}

inline void store_block(c10::Half* target, const float* block) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(block + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), halves);
  }
}
#endif

template <typename T, typename A>
void set(A* sum, const T* row, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    load_block(sum + i, row + i);
  }
  for (; i < n; ++i) {
    sum[i] = static_cast<A>(row[i]);
  }
}

template <typename T, typename A>
void add(A* sum, const T* row, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A block[kBlock];
    load_block(block, row + i);
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
    A block[kBlock];
    load_block(block, row + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      sum[i + j] += weight * block[j];
    }
  }
  for (; i < n; ++i) {
    sum[i] += weight * static_cast<A>(row[i]);
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
    A block[kBlock];
    load_block(block, row + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      block[j] *= weight;
    }
    store_block(out + i, block);
  }
  for (; i < n; ++i) {
    out[i] = static_cast<T>(weight * static_cast<A>(row[i]));
  }
}

template <typename T, typename A>
A dot(const T* left, const T* right, int64_t n) {
  A lanes[kDotLanes] = {};
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    A left_block[kBlock];
    A right_block[kBlock];
    load_block(left_block, left + i);
    load_block(right_block, right + i);
    for (int64_t j = 0; j < kBlock; ++j) {
      lanes[j] += left_block[j] * right_block[j];
    }
  }
  for (int64_t j = 0; i < n; ++i, ++j) {
    lanes[j] += static_cast<A>(left[i]) * static_cast<A>(right[i]);
  }
  A sum = 0;
  for (const A lane : lanes) {
    sum += lane;
  }
  return sum;
}

template <typename T, typename A>
constexpr RowOps<T, A> table() {
  return {set<T, A>, add<T, A>, add_scaled<T, A>, round<T, A>, scale<T, A>, dot<T, A>};
}

} // namespace moe::cpu::MOE_ROW_OPS_NAMESPACE
