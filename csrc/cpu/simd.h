// One vector of floats for every instruction set: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere (SSE, NEON).
// Compiled once per instruction set; arithmetic is GCC's vector extension, intrinsics only where that is not enough.
#pragma once

#include <cstdint>
#include <cstring>

#include "number.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

inline vf splat(float x) { return x - vf{}; }
inline vi splat_int(int32_t x) { return x - vi{}; }

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

inline vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, sizeof(h));
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
    return v;
#endif
}

inline vf load(const e4m3* p) {
#if defined(__AVX512F__)
    const vu code = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const vu code = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vu code;
    for (int i = 0; i < W; i++) code[i] = p[i].bits;
#endif
    const vu rest = code & 0x7fu, sign = (code & 0x80u) << 24;
    const vu value = (vu)((vf)(rest << 20) * 0x1p120f) | sign;
    return (vf)(value | ((vu)(rest == 0x7fu) & 0x7fc00000u));
}

inline vf load(const e5m2* p) {
    f16 lanes[W];
    for (int i = 0; i < W; i++) lanes[i].bits = uint16_t(p[i].bits << 8);
    return load(lanes);
}

inline void store(e4m3* p, vf v) {
    for (int i = 0; i < W; i++) p[i] = from_float<e4m3>(v[i]);
}

inline void store(e5m2* p, vf v) {
    for (int i = 0; i < W; i++) p[i] = from_float<e5m2>(v[i]);
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

inline void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    const vu bits = (vu)v;
    const vu nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
    const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vh h = __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40u) & nan), vh);
    std::memcpy(p, &h, sizeof(h));
#endif
}

inline void store(f16* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < W; i++) p[i] = from_float<f16>(v[i]);
#endif
}

// The first n < W lanes; the others are zero.
template <class T>
inline vf load_part(const T* p, int64_t n) {
    T lanes[W] = {};
    std::memcpy(lanes, p, size_t(n) * sizeof(T));
    return load(lanes);
}

template <class T>
inline void store_part(T* p, vf v, int64_t n) {
    T lanes[W];
    store(lanes, v);
    std::memcpy(p, lanes, size_t(n) * sizeof(T));
}

// Calls body(i, n) for every whole vector (n == W) and for the rest (n < W) of `count` elements.
template <class Body>
inline void for_each_vector(int64_t count, Body&& body) {
    int64_t i = 0;
    for (; i + W <= count; i += W) body(i, int64_t(W));
    if (i < count) body(i, count - i);
}

template <class T>
inline vf load_some(const T* p, int64_t n) {
    return n == W ? load(p) : load_part(p, n);
}

template <class T>
inline void store_some(T* p, vf v, int64_t n) {
    if (n == W) {
        store(p, v);
    } else {
        store_part(p, v, n);
    }
}

// a * b + c, rounded once where the machine can. The compiler is told not to contract by itself (-ffp-contract=off): whether it does
// may differ between two pieces of code that must give the same bits.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }

// v as it comes back after being stored as T.
inline vf rounded_to(float, vf v) { return v; }

inline vf rounded_to(bf16, vf v) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#else
    bf16 lanes[W];
    store(lanes, v);
    return load(lanes);
#endif
}

inline vf rounded_to(f16, vf v) {
    f16 lanes[W];
    store(lanes, v);
    return load(lanes);
}

// Sums and maxima over lanes, in one fixed order.
inline float sum_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[W];
    store(lanes, v);
    for (int half = W / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
#endif
}

inline float max_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lanes[W];
    store(lanes, v);
    for (int half = W / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
    return lanes[0];
#endif
}

inline vi lane_numbers() {
    vi v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

// e^x to about 1e-7 relative; exactly 0 below -87, saturating near 3e38 above 88.
// x = n ln 2 + r with n an integer and |r| <= ln 2 / 2; e^r by its Taylor-like polynomial (Cephes' coefficients), 2^n by exponent bits.
inline vf vexp(vf x) {
    const vf clamped = vmin(x, splat(88.0f));
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    const vf shifted = fma(clamped, splat(1.44269504088896341f), splat(12582912.0f));
    const vf n = shifted - 12582912.0f;
    const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    const vf power = (vf)(((vu)shifted << 23) + 0x3f800000u);
    return x < -87.0f ? vf{} : p * power;
}

inline vf vtanh(vf x) {
    // Saturated beyond 9 in fp32; the bound keeps e^(2x) finite.
    const vf e = vexp(2.0f * vmin(vmax(x, splat(-10.0f)), splat(10.0f)));
    return 1.0f - 2.0f / (e + 1.0f);
}

// 2^x for x <= 0 (or hardly above), to about 2e-7 relative; exactly 1 at 0 and exactly 0 below -150.
// x = n + f with n an integer and |f| <= 1/2; 2^f by its Taylor polynomial, 2^n by exponent bits.
inline vf vexp2_negative(vf x) {
#if defined(__AVX512F__)
    const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf f = x - (vf)n;
#else
    const vf shifted = x + 12582912.0f;  // 1.5 * 2^23: the rounded integer is in the low bits
    const vf f = x - (shifted - 12582912.0f);
#endif
    vf p = splat(1.5403530e-4f);
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, n);
#else
    const vf power = (vf)(((vu)shifted << 23) + 0x3f800000u);
    return x < -125.0f ? vf{} : p * power;
#endif
}
