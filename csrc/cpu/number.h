// The storage formats of weights, activations and cache, and their conversion to and from float, one number at a time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

// Part of the C interface: the Python side passes these codes.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3, kFloat8E5M2 = 4 };

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
// Of the cache alone. Four bits of exponent, three of mantissa, no infinity, up to 448; and a float16's upper half.
struct e4m3 {
    uint8_t bits;
};
struct e5m2 {
    uint8_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

inline float to_float(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
    const uint32_t rest = uint32_t(x.bits & 0x7fffu) << 13;
    if (rest >= 0x7c00u << 13) return bit_cast<float>(sign | 0x7f800000u | rest);  // infinity and NaN
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and makes subnormals normal, exactly.
    return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(rest) * 0x1p112f) | sign);
#endif
}

inline float to_float(e4m3 x) {
    const uint32_t sign = uint32_t(x.bits & 0x80u) << 24, rest = x.bits & 0x7fu;
    if (rest == 0x7fu) return bit_cast<float>(sign | 0x7fc00000u);
    // As above: 2^120 moves the bias from 7 to 127.
    return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(rest << 20) * 0x1p120f) | sign);
}

inline float to_float(e5m2 x) { return to_float(f16{uint16_t(x.bits << 8)}); }

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

// Round to nearest, ties to even.
template <>
inline bf16 from_float<bf16>(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((bits >> 16) | 0x40u)};  // keep a NaN a NaN
    return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline f16 from_float<f16>(float x) {
#if defined(__F16C__)
    return f16{uint16_t(_cvtss_sh(x, 0))};
#else
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return f16{uint16_t(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return f16{uint16_t(sign | 0x7c00u)};  // rounds beyond 65504
    if (magnitude < 0x38800000u) {                                       // subnormal: let the addition round
        const float rounded = bit_cast<float>(magnitude) + 0.5f;
        return f16{uint16_t(sign | (bit_cast<uint32_t>(rounded) - bit_cast<uint32_t>(0.5f)))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return f16{uint16_t(sign | ((rounded - (112u << 23)) >> 13))};
#endif
}

// The nearest number of `Mantissa` bits, ties to even, what is too large being the largest. 2^-Least is the smallest number.
template <int Mantissa, int Least>
inline uint8_t to_float8(float x, float largest, uint8_t nan) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint8_t sign = uint8_t((bits >> 24) & 0x80u);
    float size = bit_cast<float>(bits & 0x7fffffffu);
    if (size != size) return uint8_t(sign | nan);
    size = size < largest ? size : largest;
    const float unit = bit_cast<float>(uint32_t(127 + 23 - Least) << 23);  // its last bit is the smallest number
    constexpr uint32_t bias = uint32_t(127 - Least + Mantissa - 1) << 23;
    if (size < bit_cast<float>(bias + (1u << 23))) {  // subnormal: let the addition round
        return uint8_t(sign | (bit_cast<uint32_t>(size + unit) - bit_cast<uint32_t>(unit)));
    }
    constexpr int drop = 23 - Mantissa;
    const uint32_t whole = bit_cast<uint32_t>(size);
    const uint32_t rounded = whole + ((1u << (drop - 1)) - 1) + ((whole >> drop) & 1u);
    return uint8_t(sign | ((rounded - bias) >> drop));
}

template <>
inline e4m3 from_float<e4m3>(float x) {
    return e4m3{to_float8<3, 9>(x, 448.0f, 0x7f)};
}

template <>
inline e5m2 from_float<e5m2>(float x) {
    return e5m2{to_float8<2, 16>(x, 57344.0f, 0x7f)};
}

// Calls `body(T{})` with the type that `code` names; false if there is none.
template <class Body>
inline bool with_type(int32_t code, Body&& body) {
    switch (code) {
        case kFloat32: body(float{}); return true;
        case kBFloat16: body(bf16{}); return true;
        case kFloat16: body(f16{}); return true;
        default: return false;
    }
}

// ... of a cache.
template <class Body>
inline bool with_cache_type(int32_t code, Body&& body) {
    switch (code) {
        case kFloat8E4M3: body(e4m3{}); return true;
        case kFloat8E5M2: body(e5m2{}); return true;
        default: return with_type(code, body);
    }
}
