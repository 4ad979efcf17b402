// Rows of logits as draws and logprobs look at them: groups of neighbours and their maxima, masses, the tokens above a bound.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace {

constexpr int64_t kGroup = 128;
constexpr int64_t kChunk = 32 * kGroup;  // masses are summed by chunks; 32-bit lanes hold that many
constexpr float kReach = 28.0f;          // beyond 40 ln 2 = 27.7 below the largest logit a token has no mass
constexpr float kBucketsPerNat = 16.0f;
constexpr int64_t kBuckets = 512;  // those without mass are in the last

// The order of floats as that of unsigned integers; both zeros are one number.
uint32_t key_of(float y) {
    const uint32_t bits = bit_cast<uint32_t>(y + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float from_key(uint32_t key) { return bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Bit i: v[i] >= bound.
uint32_t lanes_at_least(vf v, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)(v >= splat(bound))));
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= uint32_t(v[i] >= bound) << i;
    return bits;
#endif
}

// The first n lanes of v; the others are -infinity.
vf first_lanes(vf v, int64_t n) { return n == W ? v : lane_numbers() < splat_int(int32_t(n)) ? v : splat(-INFINITY); }

int64_t mass_of(float weight) { return int64_t(weight * 0x1p40f); }

// The sum of mass_of over up to kChunk weights of at most 1, in halves of 20 bits each.
class MassSum {
  public:
    void add(vf weight) {
        const vf scaled = weight * 0x1p20f;
        const vi whole = __builtin_convertvector(scaled, vi);
        high_ += whole;
        low_ += __builtin_convertvector((scaled - __builtin_convertvector(whole, vf)) * 0x1p20f, vi);
    }

    int64_t total() const {
        int64_t high = 0, low = 0;
        for (int i = 0; i < W; i++) high += high_[i], low += low_[i];
        return (high << 20) + low;
    }

  private:
    vi high_ = {}, low_ = {};
};

// One row and what is asked of it. A token's y is its logit divided by the temperature.
template <class T>
struct Row {
    const T* logits;
    int64_t vocab, top_k;  // top_k: 0 for off
    float temperature, min_p, top_p, uniform;
    float* tops;  // [groups] the largest y of each
    float peak;   // the largest y

    int64_t groups() const { return (vocab + kGroup - 1) / kGroup; }
    int64_t size_of(int64_t group) const { return std::min(kGroup, vocab - group * kGroup); }
    float lowest() const { return peak - kReach; }  // nothing below has mass

    // y of the n <= W tokens from i; the other lanes are -infinity.
    vf scaled(int64_t i, int64_t n) const {
        return first_lanes(load_some(logits + i, n) / splat(temperature), n);
    }

    // The probability relative to the most likely token; 0 below min_p. Never above 1, not even for NaN.
    vf weight(vf y) const {
        const vf w = vexp(vmin(y - splat(peak), vf{}));
        return w >= splat(min_p) ? w : vf{};
    }

    int64_t mass(float y) const { return mass_of(weight(splat(y))[0]); }

    // The distance from the largest y in buckets; the bucket is its whole part.
    vf distance(vf y) const {
        const vf exact = (splat(peak) - y) * splat(kBucketsPerNat);
        return vmax(vmin(exact, splat(kBuckets - 1)), vf{});
    }

    // Calls body(i, n) for the vectors of a group; i counts from the beginning of the row.
    template <class Body>
    void each_vector(int64_t group, Body&& body) const {
        const int64_t begin = group * kGroup;
        for_each_vector(size_of(group), [&](int64_t i, int64_t n) { body(begin + i, n); });
    }
};

// A thread's working memory: tokens in ascending order of their ids.
struct Tokens {
    float* y;
    int32_t* ids;
    uint32_t* keys;
    int64_t* masses;
    int64_t count = 0;

    static size_t bytes(int64_t vocab) { return size_t(padded(vocab)) * 20; }

    Tokens(char* memory, int64_t vocab) {
        const int64_t room = padded(vocab);
        masses = (int64_t*)memory;
        y = (float*)(masses + room);
        ids = (int32_t*)(y + room);
        keys = (uint32_t*)(ids + room);
    }

    // Appends the tokens from `first` whose bits are set.
    void put_lanes(vf values, int64_t first, uint32_t lanes) {
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            y[count] = values[lane];
            ids[count++] = int32_t(first + lane);
        }
    }

    // Fills in keys and masses.
    template <class T>
    void weigh(const Row<T>& row) {
        for (int64_t i = 0; i < count; i += W) {
            const vf w = row.weight(load(y + i));
            for (int64_t j = 0; j < std::min<int64_t>(W, count - i); j++) {
                masses[i + j] = mass_of(w[j]);
                keys[i + j] = key_of(y[i + j]);
            }
        }
    }

    int64_t mass() const {
        int64_t sum = 0;
        for (int64_t i = 0; i < count; i++) sum += masses[i];
        return sum;
    }

  private:
    static int64_t padded(int64_t vocab) { return (vocab + 2 * W - 1) / W * W; }
};

float max_of(const float* x, int64_t count) {
    vf top = splat(-INFINITY);
    for_each_vector(count, [&](int64_t i, int64_t n) { top = vmax(top, first_lanes(load_some(x + i, n), n)); });
    return max_lanes(top);
}

// A value that at least `wanted` and not many more of the row's groups reach. wanted: at most all.
template <class T>
float bound_of(const Row<T>& row, int64_t wanted) {
    const int64_t groups = row.groups();
    uint32_t low = key_of(-INFINITY), high = key_of(row.peak);
    while (low < high) {
        const uint32_t middle = uint32_t((uint64_t(low) + high + 1) / 2);
        const float y = from_key(middle);
        int64_t reached = 0;
        for_each_vector(groups, [&](int64_t i, int64_t n) {
            reached += __builtin_popcount(lanes_at_least(load_some(row.tops + i, n), y) & ((1u << n) - 1));
        });
        if (reached >= wanted) {
            low = middle;
            if (reached <= wanted + wanted / 4) break;
        } else {
            high = middle - 1;
        }
    }
    return from_key(low);
}

// All tokens with y >= bound.
template <class T>
void gather(const Row<T>& row, float bound, Tokens& tokens) {
    tokens.count = 0;
    for (int64_t group = 0; group < row.groups(); group++) {
        if (!(row.tops[group] >= bound)) continue;
        row.each_vector(group, [&](int64_t i, int64_t n) {
            const vf y = row.scaled(i, n);
            tokens.put_lanes(y, i, lanes_at_least(y, bound) & ((1u << n) - 1));
        });
    }
    tokens.weigh(row);
}

}  // namespace
