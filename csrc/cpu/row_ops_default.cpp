// Row functions for the instruction set that the compiler assumes by itself: right on every machine.
#include "row_ops_levels.h"

#define MOE_ROW_OPS_F16_LANES 0 // no instruction that may be assumed
#define MOE_ROW_OPS_VECTOR_BYTES 16
#define MOE_ROW_OPS_NAMESPACE level_default
#include "row_ops_impl.h"

MOE_ROW_OPS_DEFINE_TABLE(row_ops_default, level_default)
