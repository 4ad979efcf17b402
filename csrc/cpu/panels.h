// Products with packed weights: how rows and weights are cut up, for every format of weights (linear.cpp, linear_int8.cpp).
//
// Packed weights are panels of 32 outputs. Within a panel the 32 values (or groups of neighbouring k) of one k are contiguous,
// so that a product with one row reads memory as one sequential stream and needs no sums across lanes. Rows of x are packed into
// tiles of up to kTileRows, k-major, and panels are visited in slices of k that stay in cache.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "simd.h"
#include "transpose.h"

namespace {

constexpr int kPanel = 32;       // outputs per panel
constexpr int kVectors = kPanel / W;  // vectors per panel

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVectors = 2;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#else
constexpr int kTileRows = 4, kTileVectors = 2;
#endif

constexpr int64_t kBlockTiles = 16;                       // tiles of one task: its rows stay in the second-level cache
constexpr int64_t kBlockRows = kBlockTiles * kTileRows;
constexpr int64_t kGroupPanels = 4;            // panels of one task, if its rows do not stay there
constexpr int64_t kCachedBytes = 512 << 10;    // what does
constexpr int64_t kTileSliceBytes = 16 << 10;  // of a panel that meets one tile only: as far as is asked ahead
constexpr int kPrefetchRows = 6;               // of a tile
constexpr int64_t kForeseenBytes = 128 << 10;  // of the next product, while a thread waits

// A weight format F says how many k one step takes, how a step of x and of the weights is stored, and how they are multiplied. A
// "step" is the unit along k of both packed operands. Sums are 32 bits wide: floats, or integers in their place.

template <class F>
int64_t steps_of(int64_t k) {
    return (k + F::kStep - 1) / F::kStep;
}

#if defined(__SANITIZE_ADDRESS__)
#define ALWAYS_INLINE  // instrumented code compiles for minutes otherwise
#else
#define ALWAYS_INLINE __attribute__((always_inline))
#endif

template <int... I, class Body>
ALWAYS_INLINE inline void unrolled(std::integer_sequence<int, I...>, Body&& body) {
    (body(std::integral_constant<int, I>{}), ...);
}

// What is asked for while a tile is multiplied: its part of what will be read next, so many bytes a step. Asking far ahead and
// evenly keeps memory busy all the time; the processor's own prefetcher stops where arithmetic takes long.
struct Ahead {
    const char* at;
    int64_t stride;
};

// The inner loop: sums[row][...] (+)= x tile times columns [0, Vectors * W) of a panel.
// x: [steps][kXPerStep][Rows]; b: [steps][kPanel]; sums: Rows rows of kPanel.
template <class F, int Rows, int Vectors>
void multiply_tile(const typename F::X* x, const typename F::B* b, int64_t steps, float* sums, bool fresh, Ahead ahead) {
    vf sum[Rows * Vectors] = {};
    // Indices that are constants from the start let the compiler keep every sum in a register.
    const auto each_sum = [](auto&& body) ALWAYS_INLINE { unrolled(std::make_integer_sequence<int, Rows * Vectors>(), body); };
    if (!fresh) {
        each_sum([&](auto i) ALWAYS_INLINE { sum[i] = load(sums + i / Vectors * kPanel + i % Vectors * W); });
    }
    // With few rows the processor's own prefetcher keeps up and asking is in its way.
    constexpr bool kPrefetch = Rows >= kPrefetchRows;
    for (int64_t s = 0; s < steps; s++) {
        typename F::Loaded loaded[Vectors];
        for (int v = 0; v < Vectors; v++) loaded[v] = F::load_b(b + v * W);
        if constexpr (kPrefetch) {
            __builtin_prefetch(ahead.at, 0, 2);
            if (ahead.stride > 64) __builtin_prefetch(ahead.at + 64, 0, 2);
            ahead.at += ahead.stride;
        }
        each_sum([&](auto i) ALWAYS_INLINE { sum[i] = F::multiply(sum[i], loaded[i % Vectors], x + i / Vectors, Rows); });
        x += F::kXPerStep * Rows;
        b += kPanel;
    }
    each_sum([&](auto i) ALWAYS_INLINE { store(sums + i / Vectors * kPanel + i % Vectors * W, sum[i]); });
}

// A panel's slice times a tile of `rows` rows, while part `part` of `parts` of the slice at `next` is asked for. With one or two
// rows memory is the limit: the panel is read in one go.
template <class F, int Rows = kTileRows>
void multiply_panel(int64_t rows, const typename F::X* x, const typename F::B* b, int64_t steps, float* sums, bool fresh,
                    const typename F::B* next, int64_t part, int64_t parts) {
    if constexpr (Rows > 0) {
        if (rows == Rows) {
            constexpr int kTogether = Rows <= 2 ? kVectors : kTileVectors, kPasses = kVectors / kTogether;
            constexpr int64_t kStepBytes = kPanel * sizeof(typename F::B);
            const int64_t stride = (kStepBytes + parts * kPasses - 1) / (parts * kPasses);
            for (int pass = 0; pass < kPasses; pass++) {
                const int v = pass * kTogether;
                const Ahead ahead = {(const char*)next + (part * kPasses + pass) * stride * steps, stride};
                multiply_tile<F, Rows, kTogether>(x, b + v * W, steps, sums + v * W, fresh, ahead);
            }
        } else {
            multiply_panel<F, Rows - 1>(rows, x, b, steps, sums, fresh, next, part, parts);
        }
    }
}

int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

int64_t tiles_of(const Product& a) { return (a.m + kTileRows - 1) / kTileRows; }

// The first row of a tile. Tiles differ by at most one row.
int64_t tile_row(const Product& a, int64_t tile) { return a.m * tile / tiles_of(a); }

// Packs the steps [done, end) of a tile.
template <class F, class T>
void pack_tile(const Product& a, typename F::X* packed, int64_t tile, int64_t done, int64_t end) {
    const int64_t first = tile_row(a, tile), rows = tile_row(a, tile + 1) - first;
    typename F::X* to = packed + first * steps_of<F>(a.k) * F::kXPerStep;
    const T* from = (const T*)a.x + first * a.x_stride;
    // A step of a row that is 32 bits in both: rows are lanes, transposed in squares.
    if constexpr (F::kXPerStep == 1 && F::kStep * sizeof(T) == sizeof(float)) {
        static_assert(kTileRows <= W, "a tile's rows are the lanes of a vector");
        for (; done + W <= end && (done + W) * F::kStep <= a.k; done += W) {
            vf square[W] = {};
            for (int64_t r = 0; r < rows; r++) square[r] = load((const float*)(from + r * a.x_stride + done * F::kStep));
            if (rows > 1) transpose(square);
            if (rows == 1) {
                store((float*)(to + done), square[0]);
                continue;
            }
            for (int64_t i = 0; i < W; i++) {
                // Whole vectors are written; what is too much is overwritten by the next step, but at the end.
                auto* step = (float*)(to + (done + i) * rows);
                store_some(step, square[i], (done + i) * rows + W <= end * rows ? W : rows);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const T* x = from + r * a.x_stride;
        for (int64_t s = done; s < end; s++) {
            F::pack_x(to + s * F::kXPerStep * rows + r, x + s * F::kStep, rows, a.k - s * F::kStep);
        }
    }
}

// The panels [panel, panel_end) times one block of tiles, slice by slice along k: the slice of a panel is reused from cache by all
// tiles, the slice of the tiles by all panels. While one slice is multiplied, the next is asked for. sums: kBlockRows rows of each
// panel.
template <class F, class Write>
void panels_task(const Product& a, const typename F::X* x, int64_t first_tile, int64_t last_tile, int64_t panel,
                 int64_t panel_end, float* sums, Write&& write) {
    const int64_t steps = steps_of<F>(a.k), first_row = tile_row(a, first_tile), tiles = last_tile - first_tile;
    const int64_t longest = tiles == 1 ? kTileSliceBytes / int64_t(kPanel * sizeof(typename F::B)) : F::kSliceSteps;
    const int64_t slices = std::max<int64_t>(1, (steps + longest - 1) / longest), panels = panel_end - panel;
    const auto* b = (const typename F::B*)a.packed + panel * steps * kPanel;
    for (int64_t i = 0; i < slices; i++) {
        const int64_t s = steps * i / slices, end = steps * (i + 1) / slices;
        for (int64_t p = 0; p < panels; p++) {
            // The same slice of the next panel, the next slice of the first, or what follows the last.
            const int64_t next = p + 1 < panels ? (p + 1) * steps + s : i + 1 < slices ? end : panels * steps;
            for (int64_t tile = first_tile; tile < last_tile; tile++) {
                const int64_t row = tile_row(a, tile), rows = tile_row(a, tile + 1) - row;
                const typename F::X* tile_x = x + (row * steps + s * rows) * F::kXPerStep;
                multiply_panel<F>(rows, tile_x, b + (p * steps + s) * kPanel, end - s,
                                  sums + (p * kBlockRows + row - first_row) * kPanel, i == 0, b + next * kPanel,
                                  tile - first_tile, tiles);
            }
        }
    }
    for (int64_t p = panel; p < panel_end; p++) {
        write(sums + (p - panel) * kBlockRows * kPanel, first_row, tile_row(a, last_tile) - first_row, p * kPanel);
    }
}

// Rows of T times panels; write(sums, row, rows, column) takes the sums of one panel.
template <class F, class T, class Write>
void product(Team& team, const Product& a, void* scratch, Write&& write) {
    if (a.m == 0) return;
    const int64_t tiles = tiles_of(a), panels = panels_of(a.n), steps = steps_of<F>(a.k);
    const int64_t blocks = (tiles + kBlockTiles - 1) / kBlockTiles, slices = (steps + F::kSliceSteps - 1) / F::kSliceSteps;
    auto* x = (typename F::X*)scratch;
    team.share(tiles * slices, team.grain(tiles * slices, 1), [&](int64_t task, int64_t end) {
        for (; task < end; task++) {
            const int64_t s = task % slices * F::kSliceSteps;
            pack_tile<F, T>(a, x, task / slices, s, std::min(steps, s + F::kSliceSteps));
        }
    });
    // A block that does not stay in the second-level cache is worth several panels each time its slices come by.
    const bool large = a.m / blocks * steps * F::kXPerStep * int64_t(sizeof(typename F::X)) > kCachedBytes;
    alignas(64) float sums[kGroupPanels * kBlockRows * kPanel];
    const auto body = [&](int64_t task, int64_t end) {
        while (task < end) {
            const int64_t block = task / panels, panel = task % panels;
            const int64_t count = std::min({large ? kGroupPanels : 1, end - task, panels - panel});
            panels_task<F>(a, x, tiles * block / blocks, tiles * (block + 1) / blocks, panel, panel + count, sums, write);
            task += count;
        }
    };
    if (blocks > 1) {
        // Block by block: the panels of one are read by all threads at about the same time.
        team.share(blocks * panels, kGroupPanels, body);
        return;
    }
    const int64_t next_panels = panels_of(a.next.n), first = team.range_begin(next_panels, team.thread());
    const int64_t panel_bytes = steps_of<F>(a.next.k) * kPanel * int64_t(sizeof(typename F::B));
    team.foresee((const char*)a.next.packed + first * panel_bytes,
                 std::min(kForeseenBytes, (team.range_begin(next_panels, team.thread() + 1) - first) * panel_bytes));
    team.share_ranges(panels, std::min<int64_t>(16, team.grain(panels, 1)), body);
}

template <class Stored, class F>
void pack_panel(typename F::B* to, const Stored* weight, int64_t rows, int64_t k, int64_t stride) {
    const int64_t steps = steps_of<F>(k);
    int64_t s = 0;
    if constexpr (sizeof(typename F::B) == sizeof(float)) {
        // Whole squares of W rows and W steps, as 32-bit lanes.
        for (; rows == kPanel && (s + W) * F::kStep <= k; s += W) {
            for (int64_t c = 0; c < kPanel; c += W) {
                vf square[W];
                for (int i = 0; i < W; i++) square[i] = load((const float*)(weight + (c + i) * stride + s * F::kStep));
                transpose(square);
                for (int i = 0; i < W; i++) store((float*)(to + (s + i) * kPanel + c), square[i]);
            }
        }
    }
    for (; s < steps; s++) {
        for (int64_t c = 0; c < kPanel; c++) {
            to[s * kPanel + c] =
                c < rows ? F::pack_weight(weight + c * stride + s * F::kStep, s * F::kStep, k) : typename F::B{};
        }
    }
}

template <class Stored, class F>
void pack_panels(void* packed, const Stored* weight, int64_t n, int64_t k, int64_t stride) {
    const int64_t steps = steps_of<F>(k), panels = (n + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static) num_threads(threads_for(n * k))
    for (int64_t panel = 0; panel < panels; panel++) {
        pack_panel<Stored, F>((typename F::B*)packed + panel * steps * kPanel, weight + panel * kPanel * stride,
                              std::min<int64_t>(kPanel, n - panel * kPanel), k, stride);
    }
}

}  // namespace
