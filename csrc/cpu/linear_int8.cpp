// Products of 8-bit weights and 8-bit rows: y[m, n] = x_scale[m] w_scale[n] sum_k (x[m, k] - 128) w[n, k] + bias[n].
//
// Weights are signed, with a scale for each output; rows are unsigned around 128, as the dot-product instructions want them, with
// a scale for each row. Sums are exact in 32-bit integers, so neither batch nor threads can change them. What the 128 adds, the
// same for every row, is subtracted at the end: 128 times each output's sum of weights, kept behind the panels.
#include <cmath>
#include <new>

#include "panels.h"
#include "scratch.h"

namespace {

constexpr int32_t kMiddle = 128;
constexpr int64_t kMostInputs = 1 << 16;  // 255 * 128 times this many still fits 32 bits

struct Quad {
    uint8_t at[4];
};

// A step is four neighbouring k.
struct Int8Format {
    using X = Quad;
    using B = Quad;
    static constexpr int64_t kStep = 4, kSliceSteps = 512;
    static constexpr int kXPerStep = 1;
    static Quad some(const void* from, int64_t left) {
        Quad quad = {};
        std::memcpy(quad.at, from, size_t(std::min<int64_t>(4, left)));
        return quad;
    }
    static B pack_weight(const int8_t* w, int64_t k, int64_t count) { return some(w, count - k); }
    static void pack_x(X* to, const uint8_t* x, int64_t, int64_t left) { *to = some(x, left); }
    struct Loaded {
        vi value;
    };
    static Loaded load_b(const B* b) { return {(vi)load((const float*)b)}; }

    static vf multiply(vf sum, Loaded b, const X* x, int) {
        const uint32_t row = bit_cast<uint32_t>(*x);
#if defined(__AVX512VNNI__)
        return (vf)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(int32_t(row)), (__m512i)b.value);
#else
        // Bytes 0 and 2, then 1 and 3, as pairs of 16 bits.
        return add_pairs(add_pairs(sum, row & 0x00ff00ffu, (vi)((vu)b.value << 8)), (row >> 8) & 0x00ff00ffu, b.value);
#endif
    }

#if !defined(__AVX512VNNI__)
    // sum + low pair + high pair; the weights are the upper bytes of their 16 bits.
    static vf add_pairs(vf sum, uint32_t row, vi weights) {
#if defined(__AVX512F__)
        const __m512i wide = _mm512_srai_epi16((__m512i)weights, 8);
        return (vf)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(_mm512_set1_epi32(int32_t(row)), wide));
#elif defined(__AVX2__)
        const __m256i wide = _mm256_srai_epi16((__m256i)weights, 8);
        return (vf)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(_mm256_set1_epi32(int32_t(row)), wide));
#else
        const vi low = (vi)((vu)weights << 16) >> 24, high = weights >> 24;
        return (vf)((vi)sum + low * splat_int(int32_t(row & 0xffffu)) + high * splat_int(int32_t(row >> 16)));
#endif
    }
#endif
};

int64_t panel_bytes(int64_t n, int64_t k) { return (n + kPanel - 1) / kPanel * kPanel * steps_of<Int8Format>(k) * 4; }

struct Scales {
    const float *rows, *outputs;
};

template <class T>
void write_scaled(const Product& a, const Scales& scales, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const auto* middle = (const int32_t*)((const char*)a.packed + panel_bytes(a.n, a.k)) + column;
    const T* bias = a.bias ? (const T*)a.bias + column : nullptr;
    for (int64_t r = 0; r < rows; r++) {
        T* out = (T*)a.out + (row + r) * a.out_stride + column;
        for_each_vector(std::min<int64_t>(kPanel, a.n - column), [&](int64_t i, int64_t n) {
            const vi sum = (vi)load(sums + r * kPanel + i) - (vi)load((const float*)(middle + i));
            const vf product = __builtin_convertvector(sum, vf) * scales.rows[row + r];
            const vf scale = load_some(scales.outputs + column + i, n);
            store_some(out + i, bias ? fma(product, scale, load_some(bias + i, n)) : product * scale, n);
        });
    }
}

// The row's largest magnitude becomes 127; rounding is to nearest, ties to even.
template <class T>
void quantize_row(uint8_t* out, float* scale, const T* x, int64_t k) {
    vf top = {};
    for_each_vector(k, [&](int64_t i, int64_t n) {
        const vf v = load_some(x + i, n);
        top = vmax(top, v < 0.0f ? -v : v);
    });
    const float largest = max_lanes(top);
    *scale = largest / 127.0f;
    const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
    for_each_vector(k, [&](int64_t i, int64_t n) {
        // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
        const vu bits = (vu)(load_some(x + i, n) * factor + 12582912.0f) + uint32_t(kMiddle);
        uint32_t lanes[W];
        std::memcpy(lanes, &bits, sizeof(lanes));
        for (int64_t j = 0; j < n; j++) out[i + j] = uint8_t(lanes[j]);
    });
}

}  // namespace

// Bytes of [n, k] 8-bit weights when packed.
VLLM_API int64_t vllm_packed_int8_bytes(int64_t n, int64_t k) {
    return panel_bytes(n, k) + (n + kPanel - 1) / kPanel * kPanel * int64_t(sizeof(int32_t));
}

// weight: [n, k] int8, rows `stride` apart. Returns kOk, or kOutOfRange if a row is so long that sums could overflow.
VLLM_API int vllm_pack_int8(void* packed, const int8_t* weight, int64_t n, int64_t k, int64_t stride) {
    if (k > kMostInputs) return kOutOfRange;
    pack_panels<int8_t, Int8Format>(packed, weight, n, k, stride);
    auto* middle = (int32_t*)((char*)packed + panel_bytes(n, k));
    for (int64_t row = 0; row < (n + kPanel - 1) / kPanel * kPanel; row++) {
        int32_t sum = 0;
        for (int64_t i = 0; row < n && i < k; i++) sum += weight[row * stride + i];
        middle[row] = kMiddle * sum;
    }
    return kOk;
}

// out: [m, k] uint8, scales: [m]: x = (out - 128) * scale, to half a scale. x: finite, rows `stride` apart. Returns kOk or kUnknownType.
VLLM_API int vllm_quantize_rows(uint8_t* out, float* scales, const void* x, int64_t m, int64_t k, int64_t stride, int32_t dtype) {
    return guarded([&] {
        return run_kernel(threads_for(m * k), 1, [&](Team& team) {
            return with_type(dtype, [&](auto type) {
                team.share(m, team.grain(m, 1), [&](int64_t row, int64_t end) {
                    for (; row < end; row++) quantize_row(out + row * k, scales + row, (const decltype(type)*)x + row * stride, k);
                });
            });
        });
    });
}

// x: [m, k] as vllm_quantize_rows gives it; out [m, n] and bias [n] have `dtype`. Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_linear_int8(void* out, const uint8_t* x, const float* x_scales, const void* packed, const float* scales,
                              const void* bias, int64_t m, int64_t n, int64_t k, int32_t dtype) {
    const Product a = {out, x, packed, bias, m, n, k, k, n, {}};
    return guarded([&] {
        thread_local Scratch scratch;
        void* memory = scratch.reserve(linear_scratch_bytes(m, k));
        return run_kernel(threads_for(n * k), 2, [&](Team& team) {
            return with_type(dtype, [&](auto type) {
                product<Int8Format, uint8_t>(team, a, memory, [&](const float* sums, int64_t row, int64_t rows, int64_t column) {
                    write_scaled<decltype(type)>(a, {x_scales, scales}, sums, row, rows, column);
                });
            });
        });
    });
}
