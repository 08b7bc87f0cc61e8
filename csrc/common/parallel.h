// Parallel loops whose result never depends on the number of threads: every index writes only what belongs to it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace moe {

// Calls body(begin, end) over [0, count), split so that a part touches at least some 64 Ki elements: below that,
// handing work to another thread costs more than it saves.
template <typename Body>
void parallel_rows(int64_t count, int64_t elements_per_row, const Body& body) {
  constexpr int64_t kElementsPerPart = 64 * 1024;
  at::parallel_for(0, count, std::max<int64_t>(1, kElementsPerPart / std::max<int64_t>(1, elements_per_row)), body);
}

// Calls body(task) for every task in [0, count). Threads take the next task when they are free, since tasks differ in
// size.
template <typename Body>
void parallel_tasks(int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < count; task = next++) {
      body(task);
    }
  });
}

} // namespace moe
