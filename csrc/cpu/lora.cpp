// What LoRA adapters add to a product's output: out[row] += b (a x[row]) with the matrices of the row's adapter.
//
// As everywhere, a row's result depends on that row only: a sum over the inputs goes through the vector's lanes in ascending order
// and is added up over the lanes at the end, one over the rank goes in ascending order, whatever rows are computed together.
#include <algorithm>

#include "kernels.h"
#include "scratch.h"
#include "simd.h"

namespace {

constexpr int kTileRows = 4, kTileRanks = 4;   // sums that one pass over the inputs keeps
constexpr int64_t kRowGroup = 32, kOutputs = 384;  // rows of a piece; outputs of a piece

// Rows of `a` and of x, as many numbers as a step takes.
template <class T>
struct Dot {
    static constexpr int64_t kStep = W;
    using Loaded = vf;
    static Loaded load_step(const T* p, int64_t n) { return load_some(p, n); }
    static vf add(vf sum, Loaded x, Loaded a) { return fma(x, a, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    static constexpr int64_t kStep = 2 * W;
    using Loaded = __m512i;
    static Loaded load_step(const bf16* p, int64_t n) {
        if (n == kStep) return _mm512_loadu_si512(p);
        return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << n) - 1), p);
    }
    static vf add(vf sum, Loaded x, Loaded a) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)a); }
};
#endif

// small[row][rank] for ROWS rows and RANKS ranks.
template <class T, int ROWS, int RANKS>
void shrink_tile(const LoraArguments& a, const T* matrix, const int64_t* rows, int64_t rank) {
    using D = Dot<T>;
    vf sums[ROWS][RANKS] = {};
    for (int64_t k = 0; k < a.inputs; k += D::kStep) {
        const int64_t n = std::min<int64_t>(D::kStep, a.inputs - k);
        typename D::Loaded x[ROWS];
        for (int r = 0; r < ROWS; r++) x[r] = D::load_step((const T*)a.x + rows[r] * a.x_stride + k, n);
        for (int j = 0; j < RANKS; j++) {
            const typename D::Loaded m = D::load_step(matrix + (rank + j) * a.inputs + k, n);
            for (int r = 0; r < ROWS; r++) sums[r][j] = D::add(sums[r][j], x[r], m);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int j = 0; j < RANKS; j++) a.small[rows[r] * a.parts * a.rank + rank + j] = sum_lanes(sums[r][j]);
    }
}

template <class T, int ROWS>
void shrink_rows(const LoraArguments& a, const T* matrix, const int64_t* rows, int64_t rank, int64_t end) {
    for (; rank + kTileRanks <= end; rank += kTileRanks) shrink_tile<T, ROWS, kTileRanks>(a, matrix, rows, rank);
    for (; rank < end; rank++) shrink_tile<T, ROWS, 1>(a, matrix, rows, rank);
}

// The ranks [first, end) of all parts that the adapter uses, for its rows.
template <class T>
void shrink(const LoraArguments& a, const int64_t* rows, int64_t count, int64_t slot, int64_t first, int64_t end) {
    const T* matrix = (const T*)a.a + slot * a.parts * a.rank * a.inputs;
    end = std::min(end, first / a.rank * a.rank + a.ranks[slot]);
    for (; count >= kTileRows; rows += kTileRows, count -= kTileRows) shrink_rows<T, kTileRows>(a, matrix, rows, first, end);
    for (; count > 0; rows++, count--) shrink_rows<T, 1>(a, matrix, rows, first, end);
}

// out[row][n...] += sum of small[row][r] * b[r][n...], for VECTORS vectors of outputs from n on, the last of `lanes`.
template <class T, class Out, int ROWS, int VECTORS>
void expand_tile(const LoraArguments& a, const float* const* small, const T* matrix, int64_t used, Out* const* out, int64_t n,
                 int64_t lanes) {
    vf sums[ROWS][VECTORS] = {};
    for (int64_t r = 0; r < used; r++, matrix += a.outputs) {
        vf m[VECTORS];
        for (int v = 0; v < VECTORS; v++) m[v] = load_some(matrix + n + v * W, v + 1 < VECTORS ? W : lanes);
        for (int i = 0; i < ROWS; i++) {
            const vf x = splat(small[i][r]);
            for (int v = 0; v < VECTORS; v++) sums[i][v] = fma(x, m[v], sums[i][v]);
        }
    }
    for (int i = 0; i < ROWS; i++) {
        for (int v = 0; v < VECTORS; v++) {
            Out* to = out[i] + n + v * W;
            const int64_t count = v + 1 < VECTORS ? W : lanes;
            store_some(to, load_some(to, count) + sums[i][v], count);
        }
    }
}

// For the outputs [begin, end) of a part.
template <class T, class Out, int ROWS>
void expand_rows(const LoraArguments& a, const int64_t* rows, int64_t slot, int64_t part, int64_t begin, int64_t end) {
    constexpr int kVectors = 3;
    const T* matrix = (const T*)a.b + slot * a.rank * a.outputs;
    const float* small[ROWS];
    Out* out[ROWS];
    for (int i = 0; i < ROWS; i++) {
        small[i] = a.small + (rows[i] * a.parts + part) * a.rank;
        out[i] = (Out*)a.out + rows[i] * a.out_stride;
    }
    int64_t n = begin;
    for (; n + kVectors * W <= end; n += kVectors * W) expand_tile<T, Out, ROWS, kVectors>(a, small, matrix, a.ranks[slot], out, n, W);
    for (; n < end; n += W) expand_tile<T, Out, ROWS, 1>(a, small, matrix, a.ranks[slot], out, n, std::min<int64_t>(W, end - n));
}

// Calls body(rows, count, slot) for the rows of each adapter in [first, end), in the order in which they come up.
template <class Body>
void for_each_adapter(const LoraArguments& a, int64_t first, int64_t end, Body&& body) {
    int64_t rows[kRowGroup];
    uint32_t done = 0;
    for (int64_t i = first; i < end; i++) {
        const int32_t slot = a.adapters[i];
        if (done >> (i - first) & 1 || slot < 0 || a.ranks[slot] == 0) continue;
        int64_t count = 0;
        for (int64_t j = i; j < end; j++) {
            if (a.adapters[j] != slot) continue;
            done |= 1u << (j - first);
            rows[count++] = j;
        }
        body(rows, count, int64_t(slot));
    }
}

template <class T, class Out>
void add(Team& team, const LoraArguments& a) {
    const int64_t groups = (a.rows + kRowGroup - 1) / kRowGroup;
    const int64_t chunks = (a.rank + kTileRanks - 1) / kTileRanks;  // of a part's ranks
    team.share(groups * a.parts * chunks, 1, [&](int64_t i, int64_t last) {
        for (; i < last; i++) {
            const int64_t group = i / (a.parts * chunks) * kRowGroup, part = i / chunks % a.parts;
            const int64_t rank = part * a.rank + i % chunks * kTileRanks;
            const int64_t end = std::min(rank + kTileRanks, (part + 1) * a.rank);
            for_each_adapter(a, group, std::min(a.rows, group + kRowGroup), [&](const int64_t* rows, int64_t count, int64_t slot) {
                shrink<T>(a, rows, count, slot, rank, end);
            });
        }
    });
    int64_t pieces = 0, before[kLoraParts + 1] = {};  // of each part
    for (int64_t part = 0; part < a.parts; part++) {
        pieces += (a.counts[part] + kOutputs - 1) / kOutputs;
        before[part + 1] = pieces;
    }
    team.share(groups * pieces, team.grain(groups * pieces, 4), [&](int64_t i, int64_t last) {
        for (; i < last; i++) {
            const int64_t first = i / pieces * kRowGroup;
            int64_t part = 0;
            while (i % pieces >= before[part + 1]) part++;
            const int64_t begin = a.starts[part] + (i % pieces - before[part]) * kOutputs;
            const int64_t end = std::min(begin + kOutputs, a.starts[part] + a.counts[part]);
            for_each_adapter(a, first, std::min(a.rows, first + kRowGroup), [&](const int64_t* rows, int64_t count, int64_t slot) {
                for (; count >= kTileRows; rows += kTileRows, count -= kTileRows)
                    expand_rows<T, Out, kTileRows>(a, rows, slot, part, begin, end);
                for (; count > 0; rows++, count--) expand_rows<T, Out, 1>(a, rows, slot, part, begin, end);
            });
        }
    });
}

}  // namespace

bool add_lora(Team& team, const LoraArguments& a, int32_t dtype, int32_t out_dtype) {
    return with_type(dtype, [&](auto type) {
        using T = decltype(type);
        if (out_dtype == dtype) {
            add<T, T>(team, a);
        } else {
            add<T, float>(team, a);
        }
    });
}

size_t lora_scratch_bytes(int64_t rows, int64_t parts, int64_t rank) { return size_t(rows * parts * rank) * sizeof(float); }

// x and matrices have `dtype`; out has `dtype` or fp32. Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_add_lora(const LoraArguments* call, int32_t dtype, int32_t out_dtype) {
    if ((out_dtype != dtype && out_dtype != kFloat32) || call->parts > kLoraParts) return kUnknownType;
    return guarded([&] {
        thread_local Scratch scratch;
        LoraArguments a = *call;
        a.small = (float*)scratch.reserve(lora_scratch_bytes(a.rows, a.parts, a.rank));
        return run_kernel(threads_for(a.rows * a.rank * (a.inputs + a.outputs) / 8), 2,
                          [&](Team& team) { return add_lora(team, a, dtype, out_dtype); });
    });
}
