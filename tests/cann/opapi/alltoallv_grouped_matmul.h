// aclnnAlltoAllvGroupedMatMul and aclnnGroupedMatMulAlltoAllv with their V2: one implementation. A3 and 950 only; V2
// adds commMode, which changes nothing in the result.
//
// ep ranks with e experts each; both lists of counts have e * ep entries, entry rank * e + expert. S_j rows for expert
// j of this rank, from all ranks. Rows and weights float16 or bfloat16, accumulated in float32, rounded once.
//   AlltoAllvGroupedMatMul: x (BSK, H1), in the order of the counts, goes to the ranks of its experts. What arrives, by
//     expert and then by source, is permuteOut (A, H1); y (A, N1) is its product with weight (e, H1, N1) by groups S_j.
//   GroupedMatMulAlltoAllv: the way back. x (A, H1), by expert and then by destination, is multiplied by groups and
//     goes to where it came from: y (BSK, N1), in the order of the counts.
//   mmY (BS, N2) = mmX (BS, H2) @ mmWeight, if there are any.
// trans* say that a weight has its last two dimensions swapped.
//
// As the real ones:
// - Outputs all empty (absent ones are): phase 1 asks for no workspace and checks no shape; phase 2 launches nothing.
//   The peers wait in vain, and end by the limit of hccl_transport.h. A launched kernel sends something to every peer,
//   were it zero rows, so that none gets by without one that does not launch.
// - Outputs are written as if they were contiguous: others end the process. Inputs may have any strides.
// - Nothing compares counts between ranks, or epWorldSize with the group: what does not fit ends the process.
// - Limits are those of tiling. Where it lets pass what the kernel's arrays (32 experts, 128 ranks) or the documents do
//   not (N1 up to 65535), the kernel ends the process.
// - Before CANN 9.1 the sets of ep are smaller (no 128, and for 950 those of A3), and A3 wants 2 MB of rows of H1 to
//   and from every rank.
// Dtypes that have no kernel are refused with 161002, the one of the two possible codes that says what is wrong.
#pragma once

#include "standin.h"

namespace standin {

struct AlltoAllvGroupedMatmul {
  bool forward; // AlltoAllvGroupedMatMul
  const aclTensor* x;
  const aclTensor* weight;
  const aclTensor* send_counts_tensor;
  const aclTensor* recv_counts_tensor;
  const aclTensor* mm_x;
  const aclTensor* mm_weight;
  const char* group;
  const char* comm_mode; // "ai_cpu" in the functions that have none
  int64_t ep;
  const aclIntArray* send_counts;
  const aclIntArray* recv_counts;
  bool trans_weight;
  bool trans_mm_weight;
  bool permute_out_flag;
  const aclTensor* y;
  const aclTensor* mm_y;
  const aclTensor* permute_out;
};

void plan_alltoallv(Plan& plan, const AlltoAllvGroupedMatmul& op);

} // namespace standin
