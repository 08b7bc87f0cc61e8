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

template <typename T>
inline void prefetch_block(const T* block) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t j = 0; j < kBlock; j += kLine) {
    __builtin_prefetch(block + j);
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
  const int64_t later = i + bytes / static_cast<int64_t>(sizeof(T));
  const T* next = term.next == nullptr ? term.row : term.next + (later - row_size);
  prefetch_block(later < row_size ? term.row + later : next);
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
inline A biased_at(const Term<T, A>& term, int64_t i) {
  const A row = static_cast<A>(term.row[i]);
  return term.bias == nullptr ? row : row + static_cast<A>(term.bias[i]);
}

template <typename T, typename A>
void combine(T* out, const Term<T, A>* terms, int64_t count, Stretch stretch) {
  const int64_t ahead = bytes_ahead(count);
  int64_t i = stretch.begin;
  for (; i + kBlock <= stretch.end; i += kBlock, out += kBlock) {
    Sums<A> sums;
    for (int64_t k = 0; k < count; ++k) {
      prefetch_later(terms[k], i, stretch.size, ahead);
      A buffer[kBlock];
      const A* row = load_biased(buffer, terms[k], i);
      Sums<A>::each([&](int64_t v) { sums.vectors[v] += terms[k].weight * Sums<A>::load(row, v); });
    }
    A block[kBlock];
    Sums<A>::each([&](int64_t v) { Sums<A>::store(block, v, sums.vectors[v]); });
    store_block(out, block);
  }
  for (; i < stretch.end; ++i, ++out) {
    A sum = 0;
    for (int64_t k = 0; k < count; ++k) {
      sum += terms[k].weight * biased_at(terms[k], i);
    }
    *out = static_cast<T>(sum);
  }
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
    *out = static_cast<T>(weight * g);
    lanes[j] += biased_at(term, i) * g;
  }
}

inline void pair_rows(uint32_t* out, const uint16_t* first, const uint16_t* second, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = first[i] | static_cast<uint32_t>(second[i]) << 16;
  }
}

// The numbers behind quarter_exp(). kTail are the coefficients of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, a
// polynomial through its values at the Chebyshev points: within 0.09 units in the last place of e^r.
template <typename A>
struct Exp;

template <>
struct Exp<float> {
  using Bits = uint32_t;
  static constexpr float kLowest = -85;
  static constexpr float kHighest = 89; // e^kHighest is infinite
  static constexpr float kLog2E = 0x1.715476p0F;
  static constexpr float kLn2High = 0x1.63p-1F; // few bits: a whole number times it is exact
  static constexpr float kLn2Low = -0x1.bd0106p-13F;
  static constexpr float kRounder = 0x1.8p23F - 2;
  static constexpr int kMantissaBits = 23;
  static constexpr float kTail[] = {0.5F, 0x1.5554dcp-3F, 0x1.555518p-5F, 0x1.120be2p-7F, 0x1.6d117cp-10F};
};

template <>
struct Exp<double> {
  using Bits = uint64_t;
  static constexpr double kLowest = -706;
  static constexpr double kHighest = 710;
  static constexpr double kLog2E = 0x1.71547652b82fep0;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kRounder = 0x1.8p52 - 2;
  static constexpr int kMantissaBits = 52;
  static constexpr double kTail[] = {0x1.0000000000001p-1,  0x1.5555555555556p-3,  0x1.5555555553d37p-5,
                                     0x1.11111111109a6p-7,  0x1.6c16c1789d1d7p-10, 0x1.a01a01a7cebcdp-13,
                                     0x1.a019b8ca26fcfp-16, 0x1.71de0d85293b8p-19, 0x1.2891d4ffbb0f9p-22,
                                     0x1.af390ba7e6f47p-26};
};

template <size_t first = 0, typename A, size_t count>
inline A polynomial(const A (&coefficients)[count], A x) {
  if constexpr (first + 1 == count) {
    return coefficients[first];
  } else {
    return coefficients[first] + x * polynomial<first + 1>(coefficients, x);
  }
}

// The argument of quarter_exp() for e^-x: cut off, as NaN is too, where its bits would run over. Compares the bits: as
// signed numbers those of positive x are in order and above all others, as unsigned ones those of negative x are. It
// has a loop to itself, since compilers make branches of what is known to be a constant.
template <typename A>
inline A cut_off_negative(A x) {
  using Bits = typename Exp<A>::Bits;
  using Signed = std::make_signed_t<Bits>;
  const Bits bits = __builtin_bit_cast(Bits, -x);
  constexpr Bits kLowest = __builtin_bit_cast(Bits, Exp<A>::kLowest);
  constexpr Signed kHighest = __builtin_bit_cast(Signed, Exp<A>::kHighest);
  const Signed above = static_cast<Signed>(bits < kLowest ? bits : kLowest);
  return __builtin_bit_cast(A, above < kHighest ? above : kHighest);
}

// e^x / 4 for x from kLowest to kHighest, within 1 unit in the last place. Four times that is e^x, infinite where e^x
// is too large, while a quarter never is. Unlike std::exp it has no branch and no call, so that loops with it become
// vector instructions, and no other bits with another library.
template <typename A>
inline A quarter_exp(A x) {
  using E = Exp<A>;
  using Bits = typename E::Bits;
  // x = power * ln(2) + rest. Numbers as large as kRounder have no bits for fractions: adding it rounds, and leaves
  // power - 2 in the lowest bits.
  const A shifted = x * E::kLog2E + E::kRounder;
  const A power = shifted - E::kRounder;
  const A rest = (x - power * E::kLn2High) - power * E::kLn2Low;
  const A mantissa = 1 + (rest + rest * rest * polynomial(E::kTail, rest));
  // Times 2^(power - 2), through the bits of the exponent.
  const Bits exponent = __builtin_bit_cast(Bits, shifted) << E::kMantissaBits;
  return __builtin_bit_cast(A, __builtin_bit_cast(Bits, mantissa) + exponent);
}

// How many elements ahead to ask for inputs: arithmetic fills the time in which nothing would be read, and the
// processor's own foresight ends with each page of each tensor.
template <typename T>
constexpr int64_t kSwigluAhead = 2048 / sizeof(T);

// kBlock elements of swiglu().
template <typename T, typename A>
inline void swiglu_block(T* out, const T* gate, const T* up) {
  A gate_buffer[kBlock];
  A up_buffer[kBlock];
  const A* gates = load_block(gate_buffer, gate);
  const A* ups = load_block(up_buffer, up);
  A exponents[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    exponents[j] = cut_off_negative(gates[j]);
  }
  A products[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    // At -infinity a quotient of infinities: NaN, as in torch.
    products[j] = gates[j] / (1 + 4 * quarter_exp(exponents[j])) * ups[j];
  }
  store_block(out, products);
}

// kBlock elements of swiglu_grad().
template <typename T, typename A>
inline void swiglu_grad_block(T* gate_grad, T* up_grad, const T* grad, const T* gate, const T* up) {
  A grad_buffer[kBlock];
  A gate_buffer[kBlock];
  A up_buffer[kBlock];
  const A* grads = load_block(grad_buffer, grad);
  const A* gates = load_block(gate_buffer, gate);
  const A* ups = load_block(up_buffer, up);
  A exponents[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    exponents[j] = cut_off_negative(gates[j]);
  }
  A gate_grads[kBlock];
  A up_grads[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    const A quarter = quarter_exp(exponents[j]);
    const A sigmoid = 1 / (1 + 4 * quarter);
    // 1 - sigmoid without the difference, which would lose digits. Zero where e^-gate was cut off.
    const A rest = 4 * ((gates[j] < -Exp<A>::kLowest ? quarter : 0) * sigmoid);
    const A slope = sigmoid * (1 + gates[j] * rest); // of silu
    gate_grads[j] = grads[j] * (ups[j] * slope);
    up_grads[j] = grads[j] * (gates[j] * sigmoid);
  }
  store_block(gate_grad, gate_grads);
  store_block(up_grad, up_grads);
}

template <typename T>
inline void copy(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = from[i];
  }
}

template <typename T, typename A>
void swiglu(T* out, const T* gate, const T* up, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_block(gate + i + kSwigluAhead<T>);
    prefetch_block(up + i + kSwigluAhead<T>);
    swiglu_block<T, A>(out + i, gate + i, up + i);
  }
  if (i < n) {
    T block[3][kBlock] = {};
    copy(block[0], gate + i, n - i);
    copy(block[1], up + i, n - i);
    swiglu_block<T, A>(block[2], block[0], block[1]);
    copy(out + i, block[2], n - i);
  }
}

template <typename T, typename A>
void swiglu_grad(T* gate_grad, T* up_grad, const T* grad, const T* gate, const T* up, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_block(grad + i + kSwigluAhead<T>);
    prefetch_block(gate + i + kSwigluAhead<T>);
    prefetch_block(up + i + kSwigluAhead<T>);
    swiglu_grad_block<T, A>(gate_grad + i, up_grad + i, grad + i, gate + i, up + i);
  }
  if (i < n) {
    T block[5][kBlock] = {};
    copy(block[0], grad + i, n - i);
    copy(block[1], gate + i, n - i);
    copy(block[2], up + i, n - i);
    swiglu_grad_block<T, A>(block[3], block[4], block[0], block[1], block[2]);
    copy(gate_grad + i, block[3], n - i);
    copy(up_grad + i, block[4], n - i);
  }
}

template <typename T, typename A>
constexpr RowOps<T, A> table() {
  return {convert<T, A>, round<T, A>, combine<T, A>, scatter<T, A>, swiglu<T, A>, swiglu_grad<T, A>};
}

} // namespace moe::cpu::MOE_ROW_OPS_NAMESPACE
