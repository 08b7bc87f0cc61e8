// Calls a function template with the element types of an operator's tensors.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "../common/checks.h"

namespace moe::cpu {

template <typename T>
struct TypeTag {
  using type = T;
};

// Sums are float64 where the rows or their weights are, else float32.
inline at::ScalarType accumulation_dtype(const Tensor& rows, const OptionalTensor& weights) {
  const bool any_double =
      rows.scalar_type() == at::kDouble || (given(weights) && weights->scalar_type() == at::kDouble);
  return any_double ? at::kDouble : at::kFloat;
}

// body(TypeTag<T>, TypeTag<A>): T the row type, A the type of the sums.
template <typename Body>
void dispatch_rows_and_sums(at::ScalarType rows, at::ScalarType sums, const Body& body) {
  const auto with_sums = [&](auto row_tag) {
    using T = typename decltype(row_tag)::type;
    if (std::is_same_v<T, double> || sums == at::kDouble) {
      body(row_tag, TypeTag<double>{});
    } else if constexpr (!std::is_same_v<T, double>) {
      body(row_tag, TypeTag<float>{});
    }
  };
  switch (rows) {
    case at::kFloat:
      return with_sums(TypeTag<float>{});
    case at::kDouble:
      return with_sums(TypeTag<double>{});
    case at::kBFloat16:
      return with_sums(TypeTag<c10::BFloat16>{});
    case at::kHalf:
      return with_sums(TypeTag<c10::Half>{});
    default:
      TORCH_INTERNAL_ASSERT(false, "dtype checks come first");
  }
}

} // namespace moe::cpu
