// Activations of the feed-forward layers, plain and gated.
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace {

enum Kind : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

vf silu(vf x) { return x / (1.0f + vexp(-x)); }

// x Phi(x). The tail 1 - Phi(|x|) = erfc(|x| / sqrt 2) / 2 by a Chebyshev fit of log(erfc) (Numerical Recipes, 6.2), whose
// relative error stays below 2e-7 however small the tail is.
vf gelu(vf x) {
    const vf z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
    const vf t = 1.0f / (1.0f + 0.5f * z);
    vf p = splat(0.17087277f);
    p = fma(p, t, splat(-0.82215223f));
    p = fma(p, t, splat(1.48851587f));
    p = fma(p, t, splat(-1.13520398f));
    p = fma(p, t, splat(0.27886807f));
    p = fma(p, t, splat(-0.18628806f));
    p = fma(p, t, splat(0.09678418f));
    p = fma(p, t, splat(0.37409196f));
    p = fma(p, t, splat(1.00002368f));
    p = fma(p, t, splat(-1.26551223f));
    const vf tail = 0.5f * t * vexp(p - z * z);
    return x < 0.0f ? x * tail : x - x * tail;
}

vf gelu_tanh(vf x) {
    // 0.5 (1 + tanh u) = 1 / (1 + e^(-2u))
    const vf u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (1.0f + vexp(-2.0f * u));
}

vf relu(vf x) { return x > 0.0f ? x : (x != x ? x : vf{}); }

vf relu2(vf x) {
    const vf y = relu(x);
    return y * y;
}

// Rounded to T between activation and product, as two separate operations would.
template <class T, class F>
void gated_row(T* out, const T* gate, const T* up, int64_t begin, int64_t end, F activate) {
    for_each_vector(end - begin, [&](int64_t j, int64_t n) {
        const int64_t i = begin + j;
        store_some(out + i, rounded_to(T{}, activate(load_some(gate + i, n))) * load_some(up + i, n), n);
    });
}

template <class T, class F>
void plain_row(T* out, const T* x, int64_t begin, int64_t end, F activate) {
    for_each_vector(end - begin, [&](int64_t j, int64_t n) {
        store_some(out + begin + j, activate(load_some(x + begin + j, n)), n);
    });
}

// Work is cut into pieces of one row's part, so that a single long row is shared too.
constexpr int64_t kPiece = 2048;

template <class T, class F>
void run(Team& team, const ActivationArguments& a, F activate) {
    const int64_t pieces = (a.dim + kPiece - 1) / kPiece;
    team.share(a.rows * pieces, team.grain(a.rows * pieces, 4), [&](int64_t task, int64_t last) {
        for (; task < last; task++) {
            const int64_t row = task / pieces, begin = task % pieces * kPiece, end = std::min(begin + kPiece, a.dim);
            const T* from = (const T*)a.x + row * a.x_stride;
            T* to = (T*)a.out + row * a.dim;
            if (a.gated) {
                gated_row(to, from, from + a.dim, begin, end, activate);
            } else {
                plain_row(to, from, begin, end, activate);
            }
        }
    });
}

}  // namespace

bool activate(Team& team, const ActivationArguments& a, int32_t dtype) {
    bool known = true;
    return with_type(dtype, [&](auto type) {
        using T = decltype(type);
        switch (a.kind) {
            case kSilu: run<T>(team, a, silu); break;
            case kGelu: run<T>(team, a, gelu); break;
            case kGeluTanh: run<T>(team, a, gelu_tanh); break;
            case kRelu: run<T>(team, a, relu); break;
            case kRelu2: run<T>(team, a, relu2); break;
            default: known = false;
        }
    }) && known;
}

// Returns kOk, or kUnknownType for an unknown dtype or kind.
VLLM_API int vllm_activate(void* out, const void* x, int64_t rows, int64_t dim, int64_t x_stride, int32_t gated,
                           int32_t kind, int32_t dtype) {
    const ActivationArguments a = {out, x, rows, dim, x_stride, gated, kind};
    return guarded([&] {
        return run_kernel(threads_for(rows * dim), 1, [&](Team& team) { return activate(team, a, dtype); });
    });
}
