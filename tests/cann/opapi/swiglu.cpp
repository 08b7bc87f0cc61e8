// aclnnSwiGlu and aclnnSwiGluGrad (A2, A3, 950), generated entry points on all three.
//
//   x = [a, b], each half of dimension dim;  s = 1 / (1 + exp(-a))
//   out = a * s * b                                              grad:  out = [yGrad * b * s'(a), yGrad * a * s]
//
// Float32, float16 and bfloat16 are computed in float32 and rounded once. exp(-a) overflows below a = -88.7, where s is
// then exactly 0. Kernels differ in the order of operations:
//   forward       float32: a * (1 / (1 + exp(-a))) * b; 16 bits: a / (1 + exp(-a)) * b
//   grad, A2, A3  (s * (1 - s) * a + s) * yGrad * b;             950: yGrad * s * (1 + (1 - s) * a) * b
//
// Refused because the documents exclude it, although no entry point looks: strided tensors, more than 8 dimensions,
// empty inputs of the gradient (the forward takes them on 950 alone, by its tiling). 310P and the limits that only it
// has (64-byte rows, no bfloat16) are not implemented here.
#include <cmath>

#include "routing.h"

using namespace standin;
using namespace standin::routing;

namespace {

// Where elements of x are: (rows before dim, [a, b] x the elements from dim on).
struct Halves {
  int64_t rows;
  int64_t width; // of each half

  Halves(const aclTensor& x, int64_t dim) : rows(1) {
    for (int64_t i = 0; i < dim; ++i) {
      rows *= x.dim(i);
    }
    width = x.numel() / rows / 2;
  }
};

// The number of the dimension. Refuses a dim that is none, and halves that are not equal.
int64_t checked_dim(const Plan& plan, const aclTensor& x, int64_t dim) {
  plan.need(-x.rank() <= dim && dim < x.rank(), kTiling, "dim must be a dimension of x");
  const int64_t place = dim < 0 ? dim + x.rank() : dim;
  plan.need(x.dim(place) % 2 == 0, kTiling, "x must be divisible by 2 in dimension dim");
  return place;
}

void need_as_documented(const Plan& plan, const char* name, const aclTensor& tensor) {
  need_float(plan, kInvalid, name, tensor);
  plan.need(tensor.rank() >= 1 && tensor.rank() <= 8, kInvalid, std::string(name) + " must have 1 to 8 dimensions");
  plan.need(tensor.contiguous(), kInvalid, std::string(name) + " must not be strided");
}

Dims half_of(const aclTensor& x, int64_t dim) {
  Dims dims = x.dims;
  dims[dim] /= 2;
  return dims;
}

void forward(const aclTensor& x, const Halves& halves, const aclTensor& out) {
  const Floats from(x);
  const Floats to(out);
  for (int64_t i = 0; i < to.size(); ++i) {
    const int64_t place = i / halves.width * 2 * halves.width + i % halves.width;
    const float a = from.get(place);
    const float b = from.get(place + halves.width);
    const float denominator = 1.0F + std::exp(-a);
    const float silu = x.dtype == ACL_FLOAT ? a * (1.0F / denominator) : a / denominator;
    to.set(i, silu * b);
  }
}

void backward(const aclTensor& grad, const aclTensor& x, const Halves& halves, const aclTensor& out) {
  const Floats grads(grad);
  const Floats from(x);
  const Floats to(out);
  for (int64_t i = 0; i < grads.size(); ++i) {
    const int64_t place = i / halves.width * 2 * halves.width + i % halves.width;
    const float g = grads.get(i);
    const float a = from.get(place);
    const float b = from.get(place + halves.width);
    const float s = 1.0F / (1.0F + std::exp(-a));
    to.set(place, on_950() ? g * s * (1.0F + (1.0F - s) * a) * b : (s * (1.0F - s) * a + s) * g * b);
    to.set(place + halves.width, on_950() ? g * s * a : s * a * g);
  }
}

} // namespace

STANDIN_API int aclnnSwiGluGetWorkspaceSize(
    const aclTensor* x, int64_t dim, const aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return phase1(
      "aclnnSwiGlu", workspaceSize, executor,
      [&](Plan& plan) {
        need_as_documented(plan, "x", plan.tensor(x, "x"));
        need_as_documented(plan, "out", plan.tensor(out, "out"));
        need_dtype_of(plan, kInvalid, "out", *out, "x", *x);
        const int64_t place = checked_dim(plan, *x, dim);
        need_shape(plan, kTiling, "out", *out, half_of(*x, place));
        if (out->numel() == 0 && on_950()) {
          plan.nothing_to_do();
          return;
        }
        need_elements(plan, kTiling, "x", *x);
        plan.output(out);
        plan.kernel([x = *x, halves = Halves(*x, place), out = *out] { forward(x, halves, out); });
      },
      x, dim, out);
}
STANDIN_PHASE2(aclnnSwiGlu)

STANDIN_API int aclnnSwiGluGradGetWorkspaceSize(
    const aclTensor* yGrad,
    const aclTensor* x,
    int64_t dim,
    const aclTensor* out,
    uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  return phase1(
      "aclnnSwiGluGrad", workspaceSize, executor,
      [&](Plan& plan) {
        need_as_documented(plan, "yGrad", plan.tensor(yGrad, "yGrad"));
        need_as_documented(plan, "x", plan.tensor(x, "x"));
        need_as_documented(plan, "out", plan.tensor(out, "out"));
        need_dtype_of(plan, kInvalid, "yGrad", *yGrad, "x", *x);
        need_dtype_of(plan, kInvalid, "out", *out, "x", *x);
        const int64_t place = checked_dim(plan, *x, dim);
        need_shape(plan, kTiling, "yGrad", *yGrad, half_of(*x, place));
        need_shape(plan, kTiling, "out", *out, x->dims);
        need_elements(plan, kTiling, "x", *x);
        plan.output(out);
        plan.kernel(
            [grad = *yGrad, x = *x, halves = Halves(*x, place), out = *out] { backward(grad, x, halves, out); });
      },
      yGrad, x, dim, out);
}
STANDIN_PHASE2(aclnnSwiGluGrad)
