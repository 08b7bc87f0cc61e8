// One table of row functions for each instruction set; row_ops.cpp chooses.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <tuple>
#include <type_traits>

#include "row_ops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// GCC compiles single functions for other instruction sets than the rest of the file; elsewhere the plain path serves.
#define MOE_ROW_OPS_X86_LEVELS 1
#endif

namespace moe::cpu {

using RowOpsTable = std::tuple<
    RowOps<float, float>,
    RowOps<float, double>,
    RowOps<double, double>,
    RowOps<c10::BFloat16, float>,
    RowOps<c10::BFloat16, double>,
    RowOps<c10::Half, float>,
    RowOps<c10::Half, double>,
    PairRows>;

const RowOpsTable& row_ops_default();
#ifdef MOE_ROW_OPS_X86_LEVELS
const RowOpsTable& row_ops_avx2();
const RowOpsTable& row_ops_avx512();
#endif

} // namespace moe::cpu

// The table of the instruction set whose bodies were included last.
#define MOE_ROW_OPS_DEFINE_TABLE(function, level)                                                                    \
  const moe::cpu::RowOpsTable& moe::cpu::function() {                                                                \
    static constexpr RowOpsTable kTable{level::table<float, float>(),          level::table<float, double>(),        \
                                        level::table<double, double>(),        level::table<c10::BFloat16, float>(), \
                                        level::table<c10::BFloat16, double>(), level::table<c10::Half, float>(),     \
                                        level::table<c10::Half, double>(),     level::pair_rows};                    \
    return kTable;                                                                                                   \
  }
