// Dense products with packed weights: y[m, n] = sum_k x[m, k] w[n, k] + bias[n].
//
// Every output is accumulated in fp32 by one chain over k in ascending order, whatever the batch and the number of threads:
// a row's result depends on that row and the weights only. That is what makes a request's tokens the same alone, in a batch,
// in chunks, and after a prefix-cache hit.
#include <new>

#include "panels.h"
#include "scratch.h"

namespace {

// fp32 and fp16 weights: one k a step, x in fp32.
template <class Stored>
struct PlainFormat {
    using X = float;
    static constexpr int64_t kStep = 1, kSliceSteps = 512;
    using B = Stored;  // kPanel of them a step
    static constexpr int kXPerStep = 1;
    static B pack_weight(const Stored* w, int64_t, int64_t) { return *w; }
    template <class T>
    static void pack_x(X* to, const T* x, int64_t, int64_t) {
        *to = to_float(*x);
    }
    struct Loaded {
        vf value;
    };
    static Loaded load_b(const B* b) { return {load(b)}; }
    static vf multiply(vf sum, Loaded b, const X* x, int) { return fma(splat(*x), b.value, sum); }
};

struct Pair {
    bf16 low, high;
};

// bf16 weights in fp32 arithmetic: a step is the pair (k, k + 1), added in that order.
struct PairFormat {
    using X = float;
    static constexpr int64_t kStep = 2, kSliceSteps = 512;
    using B = Pair;
    static constexpr int kXPerStep = 2;
    static B pack_weight(const bf16* w, int64_t k, int64_t count) { return {w[0], k + 1 < count ? w[1] : bf16{0}}; }
    // The two values of a row lie `rows` apart.
    template <class T>
    static void pack_x(X* to, const T* x, int64_t rows, int64_t left) {
        to[0] = to_float(x[0]);
        to[rows] = left > 1 ? to_float(x[1]) : 0.0f;
    }
    struct Loaded {
        vf low, high;
    };
    static Loaded load_b(const B* b) {
        vu bits;
        std::memcpy(&bits, b, sizeof(bits));
        return {(vf)(bits << 16), (vf)(bits & 0xffff0000u)};
    }
    static vf multiply(vf sum, Loaded b, const X* x, int rows) {
        return fma(splat(x[rows]), b.high, fma(splat(x[0]), b.low, sum));
    }
};

#if defined(__AVX512BF16__)
// bf16 weights with the bf16 dot-product instruction: x stays bf16, a step is one pair.
struct DotFormat {
    using X = Pair;
    static constexpr int64_t kStep = 2, kSliceSteps = 512;
    using B = Pair;
    static constexpr int kXPerStep = 1;
    static B pack_weight(const bf16* w, int64_t k, int64_t count) { return PairFormat::pack_weight(w, k, count); }
    static void pack_x(X* to, const bf16* x, int64_t, int64_t left) { *to = {x[0], left > 1 ? x[1] : bf16{0}}; }
    struct Loaded {
        __m512i value;
    };
    static Loaded load_b(const B* b) { return {_mm512_loadu_si512(b)}; }
    static vf multiply(vf sum, Loaded b, const X* x, int) {
        const __m512i row = _mm512_set1_epi32(bit_cast<int32_t>(*x));
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)b.value);
    }
};
using Bf16Format = DotFormat;
#else
using Bf16Format = PairFormat;
#endif

// sums (+ bias) -> out, for `rows` rows and one panel's columns.
template <class T, class Out>
void write_out(const Product& a, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const int64_t columns = std::min<int64_t>(kPanel, a.n - column);
    const T* bias = a.bias ? (const T*)a.bias + column : nullptr;
    for (int64_t r = 0; r < rows; r++) {
        Out* out = (Out*)a.out + (row + r) * a.out_stride + column;
        for_each_vector(columns, [&](int64_t i, int64_t n) {
            vf v = load(sums + r * kPanel + i);
            if (bias) v += load_some(bias + i, n);
            store_some(out + i, v, n);
        });
    }
}

template <class Stored, class F>
void unpack_row(Stored* out, const void* packed, int64_t row, int64_t k) {
    const auto* from = (const typename F::B*)packed + row / kPanel * steps_of<F>(k) * kPanel + row % kPanel;
    for (int64_t s = 0; s < steps_of<F>(k); s++) {
        const Stored* values = (const Stored*)(from + s * kPanel);
        for (int64_t i = 0; i < F::kStep && s * F::kStep + i < k; i++) out[s * F::kStep + i] = values[i];
    }
}

}  // namespace

// Bytes of [n, k] weights when packed; 0 for an unknown dtype.
VLLM_API int64_t vllm_packed_bytes(int64_t n, int64_t k, int32_t dtype) {
    const int64_t columns = (n + kPanel - 1) / kPanel * kPanel;
    switch (dtype) {
        case kFloat32: return columns * k * 4;
        case kBFloat16: return columns * (k + 1) / 2 * 4;
        case kFloat16: return columns * k * 2;
        default: return 0;
    }
}

// weight: [n, k], rows `stride` elements apart. Returns kOk or kUnknownType.
VLLM_API int vllm_pack_weight(void* packed, const void* weight, int64_t n, int64_t k, int64_t stride, int32_t dtype) {
    switch (dtype) {
        case kFloat32: pack_panels<float, PlainFormat<float>>(packed, (const float*)weight, n, k, stride); return 0;
        case kBFloat16: pack_panels<bf16, Bf16Format>(packed, (const bf16*)weight, n, k, stride); return 0;
        case kFloat16: pack_panels<f16, PlainFormat<f16>>(packed, (const f16*)weight, n, k, stride); return 0;
        default: return 1;
    }
}

// out[i] = row rows[i] of the [n, k] weights: an embedding lookup in packed weights. Returns kOk, kUnknownType or kOutOfRange.
VLLM_API int vllm_unpack_rows(void* out, const void* packed, const int64_t* rows, int64_t count, int64_t n, int64_t k,
                              int32_t dtype) {
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= n) return kOutOfRange;
    }
    const bool known = with_type(dtype, [&](auto type) {
        using T = decltype(type);
        using F = std::conditional_t<std::is_same_v<T, bf16>, Bf16Format, PlainFormat<T>>;
#pragma omp parallel for schedule(static) num_threads(threads_for(count * k))
        for (int64_t i = 0; i < count; i++) unpack_row<T, F>((T*)out + i * k, packed, rows[i], k);
    });
    return known ? kOk : kUnknownType;
}

size_t linear_scratch_bytes(int64_t m, int64_t k) { return size_t(m * (k + 1)) * sizeof(float); }

bool linear(Team& team, const Product& a, void* scratch, int32_t dtype, int32_t out_dtype) {
    return with_type(dtype, [&](auto type) {
        using T = decltype(type);
        using F = std::conditional_t<std::is_same_v<T, bf16>, Bf16Format, PlainFormat<T>>;
        product<F, T>(team, a, scratch, [&](const float* sums, int64_t row, int64_t rows, int64_t column) {
            if (out_dtype == dtype) {
                write_out<T, T>(a, sums, row, rows, column);
            } else {
                write_out<T, float>(a, sums, row, rows, column);
            }
        });
    });
}

// x, weights and bias have `dtype`; out has `dtype` or fp32. Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_linear(void* out, const void* x, const void* packed, const void* bias, int64_t m, int64_t n, int64_t k,
                         int64_t x_stride, int64_t out_stride, int32_t dtype, int32_t out_dtype) {
    if (out_dtype != dtype && out_dtype != kFloat32) return kUnknownType;
    const Product a = {out, x, packed, bias, m, n, k, x_stride, out_stride, {}};
    return guarded([&] {
        thread_local Scratch scratch;
        void* memory = scratch.reserve(linear_scratch_bytes(m, k));
        return run_kernel(threads_for(n * k / 8 + m), 2,
                          [&](Team& team) { return linear(team, a, memory, dtype, out_dtype); });
    });
}
