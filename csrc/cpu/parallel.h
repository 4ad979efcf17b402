// How threads share work: one parallel region per call, in which every thread walks the same sequence of phases and claims pieces
// of each. Threads come from the process's one OpenMP pool, which torch configures.
//
// Pieces are claimed, not dealt: a thread that another process keeps from running claims nothing, so the others do its share and
// go on, and it skips what is done when it comes back. With OpenMP's own loops every loop would wait for every thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include <omp.h>
#include <sched.h>

// Waking the pool costs a few microseconds; below this many elements a call is done sooner alone.
constexpr int64_t kParallelElements = 1 << 15;

inline int threads_for(int64_t elements) { return elements < kParallelElements ? 1 : omp_get_max_threads(); }

struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
};

// One thread's view of a parallel region.
class Team {
  public:
    Team(Phase* phases, int threads, int thread) : phases_(phases), threads_(threads), thread_(thread) {}

    int threads() const { return threads_; }
    int thread() const { return thread_; }

    // Calls body(begin, end) for pieces of up to `grain` of `count` items, on whichever threads have time; returns when all are done.
    // The last pieces are small, so that threads finish together.
    template <class Body>
    void share(int64_t count, int64_t grain, Body&& body) {
        Phase& phase = *phases_++;
        const int64_t whole = std::max<int64_t>(0, count / grain - 2 * threads_), small = (grain + 3) / 4;
        const int64_t pieces = whole + (count - whole * grain + small - 1) / small;
        for (int64_t i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
            const int64_t begin = i < whole ? i * grain : whole * grain + (i - whole) * small;
            body(begin, std::min(count, begin + (i < whole ? grain : small)));
            phase.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < pieces; spins++) {
            if (spins < 1000) {
                pause();
            } else {
                sched_yield();  // the thread we wait for may be queued behind this one
            }
        }
    }

    // A grain that gives every thread several pieces of at least `least` items.
    int64_t grain(int64_t count, int64_t least) const { return std::max(least, count / (8 * threads_)); }

  private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    Phase* phases_;
    int threads_, thread_;
};

// Runs body(team) on `threads` threads. phases: an upper bound of the number of `share` calls in it. Throws std::bad_alloc.
template <class Body>
void run_team(int threads, int64_t phases, Body&& body) {
    const std::unique_ptr<Phase[]> shared(new Phase[size_t(phases)]);
    if (threads == 1) {
        Team team(shared.get(), 1, 0);
        body(team);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Team team(shared.get(), threads, omp_get_thread_num());
        body(team);
    }
}
