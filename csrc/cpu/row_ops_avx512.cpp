// Row functions for x86-64 processors with AVX-512 (F, BW, DQ, VL).
#include "row_ops_levels.h"

#ifdef MOE_ROW_OPS_X86_LEVELS
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
#define MOE_ROW_OPS_F16_LANES 16
#define MOE_ROW_OPS_VECTOR_BYTES 64
#define MOE_ROW_OPS_NAMESPACE level_avx512
#include "row_ops_impl.h"
#pragma GCC pop_options

MOE_ROW_OPS_DEFINE_TABLE(row_ops_avx512, level_avx512)
#endif
