// When a loop is worth a second thread. Threads come from the process's one OpenMP pool, which torch configures.
#pragma once

#include <cstdint>

#include <omp.h>

// Waking the pool costs a few microseconds; below this many elements a loop is done sooner alone.
constexpr int64_t kParallelElements = 1 << 15;

inline int threads_for(int64_t elements) { return elements < kParallelElements ? 1 : omp_get_max_threads(); }

// Part `index` of `count` items split into `parts` contiguous ranges whose sizes differ by at most one.
inline void split_evenly(int64_t count, int64_t parts, int64_t index, int64_t* begin, int64_t* end) {
    *begin = count * index / parts;
    *end = count * (index + 1) / parts;
}
