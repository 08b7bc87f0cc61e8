#include "serial_blas.h"

#include <ATen/Parallel.h>

#ifdef _OPENMP
#include <omp.h>
#endif

// Part of MKL, which torch's x86-64 builds carry and export; absent elsewhere.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace moe::cpu {

// Both settings belong to the calling thread alone: other threads of the process keep theirs.
// at::get_num_threads first: a thread's first parallel loop in torch sets the thread count of OpenMP and MKL, which
// would undo ours in the middle of a task.
SerialBlas::SerialBlas() : openmp_threads_(at::get_num_threads()), mkl_threads_(0) {
#ifdef _OPENMP
  omp_set_num_threads(1);
#endif
  if (MKL_Set_Num_Threads_Local != nullptr) {
    mkl_threads_ = MKL_Set_Num_Threads_Local(1);
  }
}

SerialBlas::~SerialBlas() {
#ifdef _OPENMP
  omp_set_num_threads(openmp_threads_);
#endif
  if (MKL_Set_Num_Threads_Local != nullptr) {
    MKL_Set_Num_Threads_Local(mkl_threads_);
  }
}

} // namespace moe::cpu
