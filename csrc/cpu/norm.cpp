// RMS and layer normalisation, alone or after a residual addition. Rows are independent: their results do not depend on the batch.
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace {

// Writes x (+ residual, rounded to T as the reference rounds it) to where the second pass reads it; returns its sum.
template <class T>
void add_residual(const T* x, T* residual, int64_t dim) {
    for_each_vector(dim, [&](int64_t i, int64_t n) {
        store_some(residual + i, load_some(x + i, n) + load_some(residual + i, n), n);
    });
}

template <class T>
float mean_of_squares(const T* x, int64_t dim, float centre) {
    vf sum = {};
    for_each_vector(dim, [&](int64_t i, int64_t n) {
        vf v = load_some(x + i, n) - centre;
        if (n < W) v = lane_numbers() < splat_int(int32_t(n)) ? v : vf{};
        sum = fma(v, v, sum);
    });
    return sum_lanes(sum) / float(dim);
}

template <class T>
float mean(const T* x, int64_t dim) {
    vf sum = {};
    for_each_vector(dim, [&](int64_t i, int64_t n) { sum += load_some(x + i, n); });
    return sum_lanes(sum) / float(dim);
}

template <class T>
void norm_row(const NormArguments& a, int64_t row, bool centred) {
    const T* x = (const T*)a.x + row * a.x_stride;
    T* out = (T*)a.out + row * a.dim;
    if (a.residual) {
        T* residual = (T*)a.residual + row * a.dim;
        add_residual(x, residual, a.dim);
        x = residual;
    }
    const float centre = centred ? mean(x, a.dim) : 0.0f;
    const float scale = 1.0f / std::sqrt(mean_of_squares(x, a.dim, centre) + a.eps);
    const T* weight = (const T*)a.weight;
    const T* bias = (const T*)a.bias;
    for_each_vector(a.dim, [&](int64_t i, int64_t n) {
        vf v = (load_some(x + i, n) - centre) * scale;
        if (weight) v = v * (load_some(weight + i, n) + a.offset);
        if (bias) v = v + load_some(bias + i, n);
        store_some(out + i, v, n);
    });
}

}  // namespace

bool norm(Team& team, const NormArguments& a, int32_t dtype) {
    return with_type(dtype, [&](auto type) {
        team.share(a.rows, team.grain(a.rows, 1 + 8192 / a.dim), [&](int64_t row, int64_t end) {
            for (; row < end; row++) norm_row<decltype(type)>(a, row, a.centred != 0);
        });
    });
}

// Returns kOk or kUnknownType.
VLLM_API int vllm_norm(void* out, void* residual, const void* x, const void* weight, const void* bias, int64_t rows,
                       int64_t dim, int64_t x_stride, float eps, float offset, int32_t centred, int32_t dtype) {
    const NormArguments a = {out, residual, x, weight, bias, rows, dim, x_stride, eps, offset, centred};
    return guarded([&] {
        return run_kernel(threads_for(rows * dim), 1, [&](Team& team) { return norm(team, a, dtype); });
    });
}
