// One matrix product on one thread, cut into blocks that fit the caches:
//
//     out = left @ right      (M, N) = (M, K) @ (K, N), sums in float32, one rounding to the dtype of `out`
//
// Each block is a call of oneDNN's brgemm, a kernel that is compiled at run time for its size, so that no GEMM is
// written here. A BLAS packs both factors before it multiplies: with 32 rows that takes as long as the product. Here a
// factor is read where it lies if the kernel can, and packed block by block if it must be: transposed, converted to
// float32, or in pairs of rows (bfloat16). Blocks depend on sizes and strides alone, so equal calls give equal bits.
#pragma once

#include "../common/checks.h"

namespace moe::cpu {

// Whether block_matmul takes this product, and is the faster way on this processor.
bool multiplies_in_blocks(const Tensor& left, const Tensor& right, const Tensor& out);

// Only where multiplies_in_blocks. The rows of `out` are dense.
void block_matmul(const Tensor& left, const Tensor& right, Tensor& out);

} // namespace moe::cpu
