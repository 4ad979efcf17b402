// RMS and layer normalisation, alone or after a residual addition. Rows are independent: their results do not depend on the batch.
#include <cmath>

#include "api.h"
#include "parallel.h"
#include "simd.h"

namespace {

struct NormArguments {
    void* out;
    void* residual;  // or null; receives x + residual
    const void* x;
    const void* weight;  // or null
    const void* bias;    // or null
    int64_t rows, dim, x_stride;
    float eps, offset;
};

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
        sum += v * v;
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

// out may be x's own memory when x_stride == dim. Returns kOk, or kUnknownType for an unknown dtype.
VLLM_API int vllm_norm(void* out, void* residual, const void* x, const void* weight, const void* bias, int64_t rows,
                         int64_t dim, int64_t x_stride, float eps, float offset, int32_t centred, int32_t dtype) {
    const NormArguments a = {out, residual, x, weight, bias, rows, dim, x_stride, eps, offset};
    const bool known = with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for schedule(static) num_threads(threads_for(rows * dim))
        for (int64_t row = 0; row < rows; row++) norm_row<T>(a, row, centred != 0);
    });
    return known ? kOk : kUnknownType;
}
