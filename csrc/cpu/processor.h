// What decides between ways to multiply, of the processor that this runs on.
#pragma once

namespace moe::cpu {

struct Processor {
  bool has_blocks = false;         // oneDNN has float32 kernels for it
  bool has_bfloat16 = false;       // multiplies bfloat16 faster than float32
  bool has_tiles = false;          // and by tile registers
  bool blas_is_fast = true;        // MKL runs at full speed on the processors of its maker, and only there
  bool blas_takes_bfloat16 = true; // else by a plain loop
  bool blas_takes_float16 = false; // else 7 to 500 times slower than float32
};

inline const Processor& processor() {
#ifdef __x86_64__
  static const Processor kProcessor{
      .has_blocks = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
      .has_bfloat16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw"),
      .has_tiles = __builtin_cpu_supports("amx-bf16") != 0,
      .blas_is_fast = __builtin_cpu_is("intel") != 0,
      .blas_takes_bfloat16 = __builtin_cpu_supports("avx512bw") != 0,
      .blas_takes_float16 = __builtin_cpu_supports("avx512fp16") != 0,
  };
#else
  static const Processor kProcessor{};
#endif
  return kProcessor;
}

} // namespace moe::cpu
