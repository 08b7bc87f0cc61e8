// The headers of torch that most sources include, which take longer to compile than our own code. setup.py has GCC
// compile them once for each library and read the result before every source. Sources include what they use all the
// same: other compilers do without. No guard: it is read once, by command.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>
