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

// The counters of one phase: pieces done, and for each thread's range the next piece to claim. A line holds those of seven threads.
struct alignas(64) PhaseLine {
    std::atomic<int64_t> at[8] = {};
};

constexpr int64_t kPhaseLineCounters = 8;

// Items cut into pieces of `grain`; the last ones are small, so that threads finish together.
class Pieces {
  public:
    Pieces(int64_t count, int64_t grain, int64_t in_small)
        : items_(count), grain_(grain), whole_(std::max<int64_t>(0, count / grain - in_small)), small_((grain + 3) / 4) {}

    int64_t count() const { return whole_ + (items_ - whole_ * grain_ + small_ - 1) / small_; }
    int64_t begin(int64_t i) const { return i < whole_ ? i * grain_ : whole_ * grain_ + (i - whole_) * small_; }
    int64_t end(int64_t i) const { return std::min(items_, begin(i) + (i < whole_ ? grain_ : small_)); }

  private:
    int64_t items_, grain_, whole_, small_;
};

// One thread's view of a parallel region.
class Team {
  public:
    Team(PhaseLine* phases, int threads, int thread) : phases_(phases), threads_(threads), thread_(thread) {}

    // Lines that one phase takes.
    static int64_t lines_of(int threads) { return (1 + threads + kPhaseLineCounters - 1) / kPhaseLineCounters; }

    int threads() const { return threads_; }
    int thread() const { return thread_; }

    // Calls body(begin, end) for pieces of up to `grain` of `count` items, on whichever threads have time; returns when all are done.
    template <class Body>
    void share(int64_t count, int64_t grain, Body&& body) {
        PhaseLine* phase = take_phase();
        const Pieces pieces(count, grain, 2 * threads_);
        for (int64_t i; (i = claim(counter(phase, 1))) < pieces.count();) {
            body(pieces.begin(i), pieces.end(i));
            finish_piece(phase);
        }
        wait(phase, pieces.count());
    }

    // The same, each thread beginning with a range of its own, so that what it reads is one long stream; then it helps the others.
    template <class Body>
    void share_ranges(int64_t count, int64_t grain, Body&& body) {
        PhaseLine* phase = take_phase();
        int64_t total = 0;
        for (int turn = 0; turn < threads_; turn++) {
            const int owner = (thread_ + turn) % threads_;
            const int64_t first = range_begin(count, owner);
            const Pieces pieces(range_begin(count, owner + 1) - first, grain, 2);
            std::atomic<int64_t>& next = counter(phase, 1 + owner);
            total += pieces.count();
            if (next.load(std::memory_order_relaxed) >= pieces.count()) continue;
            for (int64_t i; (i = claim(next)) < pieces.count();) {
                body(first + pieces.begin(i), first + pieces.end(i));
                finish_piece(phase);
            }
        }
        wait(phase, total);
    }

    // Where the range of `owner` begins in `share_ranges`.
    int64_t range_begin(int64_t count, int owner) const { return count * owner / threads_; }

    // A grain that gives every thread several pieces of at least `least` items.
    int64_t grain(int64_t count, int64_t least) const { return std::max(least, count / (8 * threads_)); }

    // What this thread will read next: asked for, line by line, while it waits for others.
    void foresee(const void* begin, int64_t bytes) {
        foreseen_ = (const char*)begin;
        foreseen_end_ = foreseen_ + bytes;
    }

  private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    PhaseLine* take_phase() {
        PhaseLine* phase = phases_;
        phases_ += lines_of(threads_);
        return phase;
    }

    static std::atomic<int64_t>& counter(PhaseLine* phase, int64_t i) {
        return phase[i / kPhaseLineCounters].at[i % kPhaseLineCounters];
    }

    static int64_t claim(std::atomic<int64_t>& next) { return next.fetch_add(1, std::memory_order_relaxed); }

    static void finish_piece(PhaseLine* phase) { counter(phase, 0).fetch_add(1, std::memory_order_release); }

    void wait(PhaseLine* phase, int64_t pieces) {
        for (int spins = 0; counter(phase, 0).load(std::memory_order_acquire) < pieces; spins++) {
            if (foreseen_ < foreseen_end_) {
                __builtin_prefetch(foreseen_, 0, 2);
                foreseen_ += 64;
            } else if (spins < 1000) {
                pause();
            } else {
                sched_yield();  // the thread we wait for may be queued behind this one
            }
        }
    }

    PhaseLine* phases_;
    int threads_, thread_;
    const char *foreseen_ = nullptr, *foreseen_end_ = nullptr;
};

// Runs body(team) on `threads` threads. phases: an upper bound of the number of `share` calls in it. Throws std::bad_alloc.
template <class Body>
void run_team(int threads, int64_t phases, Body&& body) {
    const std::unique_ptr<PhaseLine[]> shared(new PhaseLine[size_t(phases * Team::lines_of(threads))]);
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
