// Row functions for x86-64 processors with AVX2 and F16C.
#include "row_ops_levels.h"

#ifdef MOE_ROW_OPS_X86_LEVELS
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define MOE_ROW_OPS_F16_LANES 8
#define MOE_ROW_OPS_VECTOR_BYTES 32
#define MOE_ROW_OPS_NAMESPACE level_avx2
#include "row_ops_impl.h"
#pragma GCC pop_options

MOE_ROW_OPS_DEFINE_TABLE(row_ops_avx2, level_avx2)
#endif
