// Keeps the matrix products that a task calls on the task's own thread.
//
// A BLAS splits a product by the number of threads that it may use, and with it the order of the sums: the same product
// has other bits on 1, 2 and 4 threads (measured for float32, float64 and bfloat16). Tasks of a fixed size, each with a
// one-threaded product, give the same bits for any number of threads, and small groups keep every core busy besides.
#pragma once

namespace moe::cpu {

class SerialBlas {
 public:
  SerialBlas();
  ~SerialBlas();
  SerialBlas(const SerialBlas&) = delete;
  SerialBlas& operator=(const SerialBlas&) = delete;

 private:
  int openmp_threads_;
  int mkl_threads_;
};

} // namespace moe::cpu
