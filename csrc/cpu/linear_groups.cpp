// Products of 4- or 8-bit codes that have scales for groups of inputs: y[m, n] = sum over groups g of
// scale[n, g] sum_k (code[n, k] - zero) x[m, k] + offset[n, g] sum_k x[m, k], + bias[n].
//
// Rows of x are rounded to 8 bits on the way, each group with a scale of its own, so that the inner sums are exact in integers (as
// llama.cpp does; bf16 rows lose about as much again as they have lost already). Between groups a row's sums are one chain of
// additions in ascending order, whatever the batch.
#include <cmath>
#include <new>

#include "groups.h"
#include "scratch.h"

namespace {

#if defined(__AVX512F__)
constexpr int kGroupRows = 6;
#else
constexpr int kGroupRows = 4;
#endif
constexpr int64_t kBlockBytes = 384 << 10;  // rows of x that are multiplied with all panels before the next ones

// Rows of x, rounded: tiles of up to kGroupRows rows. quads: [k / 4][rows]; scales, sums: [groups][rows].
struct Rows {
    int32_t* quads;
    float* scales;
    int32_t* sums;
};

inline vi load_quads(const uint8_t* p) { return (vi)load((const float*)p); }

// sum + codes (unsigned bytes, at most 15 with Bits == 4) times the signed bytes of x.
template <int Bits>
inline vi dot(vi sum, vi codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX512F__)
    const __m512i row = _mm512_set1_epi32(x);
    if constexpr (Bits == 4) {
        return (vi)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, row), _mm512_set1_epi16(1)));
    } else {
        const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(row, 8), 8), odd = _mm512_srai_epi16(row, 8);
        const __m512i low = _mm512_and_si512((__m512i)codes, _mm512_set1_epi16(255)), high = _mm512_srli_epi16((__m512i)codes, 8);
        return (vi)_mm512_add_epi32((__m512i)sum, _mm512_add_epi32(_mm512_madd_epi16(low, even), _mm512_madd_epi16(high, odd)));
    }
#elif defined(__AVX2__)
    const __m256i row = _mm256_set1_epi32(x);
    if constexpr (Bits == 4) {
        return (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, row), _mm256_set1_epi16(1)));
    } else {
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(row, 8), 8), odd = _mm256_srai_epi16(row, 8);
        const __m256i low = _mm256_and_si256((__m256i)codes, _mm256_set1_epi16(255)), high = _mm256_srli_epi16((__m256i)codes, 8);
        return (vi)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(_mm256_madd_epi16(low, even), _mm256_madd_epi16(high, odd)));
    }
#else
    for (int byte = 0; byte < 4; byte++) {
        sum += ((codes >> (8 * byte)) & 255) * int32_t(int8_t(uint32_t(x) >> (8 * byte)));
    }
    return sum;
#endif
}

// Vectors [v, v + Vectors) of one panel times Rows rows: adds each group's share to sums [Rows][kPanel].
template <int Bits, bool Offsets, int Count, int Vectors>
void multiply_groups(const GroupShape& a, const uint8_t* panel, const Rows& x, int v, float* sums) {
    vf total[Count * Vectors];
    const auto each = [](auto&& body) ALWAYS_INLINE { unrolled(std::make_integer_sequence<int, Count * Vectors>(), body); };
    each([&](auto i) ALWAYS_INLINE { total[i] = vf{}; });
    const int64_t steps = a.group * Bits / 32, groups = a.groups(), group_bytes = a.group_bytes();
    const int32_t* quad = x.quads;
    for (int64_t g = 0; g < groups; g++, panel += group_bytes) {
        const float* scales = x.scales + g * Count;
        const int32_t* row_sums = x.sums + g * Count;
        vi sum[Count * Vectors];
        each([&](auto i) ALWAYS_INLINE { sum[i] = splat_int(-a.zero * row_sums[i / Vectors]); });
        const uint8_t* codes = panel + a.header_bytes() + v * W * 4;
        for (int64_t s = 0; s < steps; s++, codes += kPanel * 4) {
            vi loaded[Vectors];
            for (int i = 0; i < Vectors; i++) loaded[i] = load_quads(codes + i * W * 4);
            if constexpr (Bits == 4) {
                vi low[Vectors], high[Vectors];
                for (int i = 0; i < Vectors; i++) {
                    low[i] = loaded[i] & 0x0f0f0f0f;
                    high[i] = (vi)((vu)loaded[i] >> 4) & 0x0f0f0f0f;
                }
                each([&](auto i) ALWAYS_INLINE {
                    sum[i] = dot<4>(sum[i], low[i % Vectors], quad[i / Vectors]);
                    sum[i] = dot<4>(sum[i], high[i % Vectors], quad[Count + i / Vectors]);
                });
                quad += 2 * Count;
            } else {
                each([&](auto i) ALWAYS_INLINE { sum[i] = dot<8>(sum[i], loaded[i % Vectors], quad[i / Vectors]); });
                quad += Count;
            }
        }
        vf weight_scales[Vectors], offsets[Vectors];
        for (int i = 0; i < Vectors; i++) {
            weight_scales[i] = load((const f16*)panel + (v + i) * W);
            if constexpr (Offsets) offsets[i] = load((const f16*)panel + kPanel + (v + i) * W);
        }
        each([&](auto i) ALWAYS_INLINE {
            const float scale = scales[i / Vectors];
            total[i] = fma(__builtin_convertvector(sum[i], vf) * scale, weight_scales[i % Vectors], total[i]);
            if constexpr (Offsets) total[i] = fma(splat(scale * float(row_sums[i / Vectors])), offsets[i % Vectors], total[i]);
        });
    }
    each([&](auto i) ALWAYS_INLINE { store(sums + i / Vectors * kPanel + (v + i % Vectors) * W, total[i]); });
}

template <int Bits, bool Offsets, int Count = kGroupRows>
void multiply_rows(int64_t rows, const GroupShape& a, const uint8_t* panel, const Rows& x, float* sums) {
    if constexpr (Count > 0) {
        if (rows == Count) {
            constexpr int kTogether = Count <= 2 ? kVectors : 2;
            for (int v = 0; v < kVectors; v += kTogether) multiply_groups<Bits, Offsets, Count, kTogether>(a, panel, x, v, sums);
        } else {
            multiply_rows<Bits, Offsets, Count - 1>(rows, a, panel, x, sums);
        }
    }
}

using Multiply = void (*)(int64_t, const GroupShape&, const uint8_t*, const Rows&, float*);

Multiply multiply_for(const GroupShape& a) {
    if (a.bits == 4) return a.has_offsets ? multiply_rows<4, true> : multiply_rows<4, false>;
    return a.has_offsets ? multiply_rows<8, true> : multiply_rows<8, false>;
}

// One row into its place `r` of a tile of `rows` rows.
template <class T>
void round_row(const T* x, const GroupShape& a, const Rows& to, int64_t rows, int64_t r) {
    for (int64_t g = 0; g < a.groups(); g++) {
        const T* from = x + g * a.group;
        vf top = {};
        for_each_vector(a.group, [&](int64_t i, int64_t n) {
            const vf v = load_some(from + i, n);
            top = vmax(top, v < 0.0f ? -v : v);
        });
        const float largest = max_lanes(top), factor = largest > 0.0f ? 127.0f / largest : 0.0f;
        int8_t rounded[kMostGroup];
        int32_t sum = 0;
        for_each_vector(a.group, [&](int64_t i, int64_t n) {
            // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
            const vi bits = (vi)(load_some(from + i, n) * factor + 12582912.0f);
            int32_t lanes[W];
            std::memcpy(lanes, &bits, sizeof(lanes));
            for (int64_t j = 0; j < n; j++) {
                rounded[i + j] = int8_t(lanes[j]);
                sum += rounded[i + j];
            }
        });
        to.scales[g * rows + r] = largest / 127.0f;
        to.sums[g * rows + r] = sum;
        int32_t* quads = to.quads + g * a.group / 4 * rows + r;
        for (int64_t i = 0; i < a.group / 4; i++) std::memcpy(quads + i * rows, rounded + 4 * i, 4);
    }
}

template <class T, class Out>
void product_of_groups(Team& team, const GroupShape& a, const Product& p, void* scratch) {
    const int64_t tiles = (p.m + kGroupRows - 1) / kGroupRows, panels = a.panels(), groups = a.groups();
    const auto first_of = [&](int64_t tile) { return p.m * tile / tiles; };
    const auto rows_of = [&](int64_t first) {
        auto* quads = (int32_t*)scratch + first * (a.k / 4);
        auto* scales = (float*)((int32_t*)scratch + p.m * (a.k / 4)) + first * groups;
        return Rows{quads, scales, (int32_t*)(scales + (p.m - first) * groups) + first * groups};
    };
    team.share(tiles, team.grain(tiles, 1), [&](int64_t tile, int64_t end) {
        for (; tile < end; tile++) {
            const int64_t first = first_of(tile), rows = first_of(tile + 1) - first;
            for (int64_t r = 0; r < rows; r++) round_row((const T*)p.x + (first + r) * p.x_stride, a, rows_of(first), rows, r);
        }
    });
    const Multiply multiply = multiply_for(a);
    const auto* packed = (const uint8_t*)p.packed;
    const int64_t per_block = std::max<int64_t>(1, kBlockBytes / (a.k * kGroupRows)), blocks = (tiles + per_block - 1) / per_block;
    const auto run = [&](int64_t task, int64_t end) {
        for (; task < end; task++) {
            const int64_t block = task / panels, panel = task % panels, column = panel * kPanel;
            const uint8_t* from = packed + panel * a.panel_bytes();
            const auto* factors = (const float*)(from + groups * a.group_bytes());
            const T* bias = p.bias ? (const T*)p.bias + column : nullptr;
            for (int64_t tile = tiles * block / blocks; tile < tiles * (block + 1) / blocks; tile++) {
                const int64_t first = first_of(tile), rows = first_of(tile + 1) - first;
                alignas(64) float sums[kGroupRows * kPanel];
                multiply(rows, a, from, rows_of(first), sums);
                for (int64_t r = 0; r < rows; r++) {
                    Out* out = (Out*)p.out + (first + r) * p.out_stride + column;
                    for_each_vector(std::min<int64_t>(kPanel, a.n - column), [&](int64_t i, int64_t n) {
                        const vf value = load(sums + r * kPanel + i), factor = load_some(factors + i, n);
                        store_some(out + i, bias ? fma(value, factor, load_some(bias + i, n)) : value * factor, n);
                    });
                }
            }
        }
    };
    if (blocks == 1) {
        team.share_ranges(panels, std::min<int64_t>(16, team.grain(panels, 1)), run);
    } else {
        team.share(blocks * panels, team.grain(panels, 1), run);
    }
}

}  // namespace

// Bytes of packed [n, k] codes; 0 if this file does not know their shape. Groups: multiples of 8 from 16 to 128 that divide k.
VLLM_API int64_t vllm_packed_groups_bytes(int64_t n, int64_t k, int64_t group, int32_t bits, int32_t has_offsets) {
    const GroupShape a = {n, k, group, bits, 0, has_offsets};
    return a.known() ? a.panels() * a.panel_bytes() : 0;
}

// codes: [n, k]; scales, offsets (or null): [n, k / group]. Returns kOk, or kOutOfRange for a shape that is not known.
VLLM_API int vllm_pack_groups(void* packed, const uint8_t* codes, const float* scales, const float* offsets, int64_t n, int64_t k,
                              int64_t group, int32_t bits) {
    const GroupShape a = {n, k, group, bits, 0, offsets != nullptr};
    if (!a.known()) return kOutOfRange;
    const int64_t groups = a.groups();
#pragma omp parallel for schedule(static) num_threads(threads_for(n * k))
    for (int64_t panel = 0; panel < a.panels(); panel++) {
        auto* to = (uint8_t*)packed + panel * a.panel_bytes();
        std::memset(to, 0, size_t(a.panel_bytes()));
        auto* factors = (float*)(to + groups * a.group_bytes());
        for (int64_t c = 0; c < kPanel && panel * kPanel + c < n; c++) {
            const int64_t row = panel * kPanel + c;
            float largest = 0;
            for (int64_t g = 0; g < groups; g++) {
                largest = std::max(largest, std::fabs(scales[row * groups + g]));
                if (offsets) largest = std::max(largest, std::fabs(offsets[row * groups + g]));
            }
            factors[c] = largest;
            // what is less than that (the power of two of a row of zeros is) has no finite inverse, and counts as zero
            const float factor = largest >= 0x1p-126f ? 1.0f / largest : 0.0f;
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* header = to + g * a.group_bytes();
                ((f16*)header)[c] = from_float<f16>(scales[row * groups + g] * factor);
                if (offsets) ((f16*)header)[kPanel + c] = from_float<f16>(offsets[row * groups + g] * factor);
                uint8_t* out = header + a.header_bytes() + 4 * c;
                const uint8_t* in = codes + row * k + g * group;
                const int64_t step = 32 / bits;
                for (int64_t s = 0; s < group / step; s++, out += kPanel * 4, in += step) {
                    for (int64_t i = 0; i < 4; i++) out[i] = bits == 8 ? in[i] : uint8_t((in[i] & 15) | in[4 + i] << 4);
                }
            }
        }
    }
    return kOk;
}

// x: [m, k], bias: [n] or null, of `dtype`; out: [m, n] of `dtype` or fp32 (`out_dtype`). Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_linear_groups(void* out, const void* x, const void* packed, const void* bias, int64_t m, int64_t n, int64_t k,
                                int64_t x_stride, int64_t group, int32_t bits, int32_t zero, int32_t has_offsets, int32_t dtype,
                                int32_t out_dtype) {
    const GroupShape a = {n, k, group, bits, zero, has_offsets};
    if (!a.known() || (out_dtype != dtype && out_dtype != kFloat32)) return kUnknownType;
    if (m == 0) return kOk;
    const Product p = {out, x, packed, bias, m, n, k, x_stride, n, {}};
    return guarded([&] {
        thread_local Scratch scratch;
        void* memory = scratch.reserve(size_t(m * (k + a.groups() * 8)));
        return run_kernel(threads_for(n * k), 2, [&](Team& team) {
            return with_type(dtype, [&](auto type) {
                using T = decltype(type);
                if (out_dtype == dtype) {
                    product_of_groups<T, T>(team, a, p, memory);
                } else {
                    product_of_groups<T, float>(team, a, p, memory);
                }
            });
        });
    });
}
