// Head norm, rotary position embedding and cache write in one pass over the tokens.
#include <cmath>

#include "api.h"
#include "parallel.h"
#include "simd.h"

namespace {

// Pairs (i, i + half).
template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
    for_each_vector(half, [&](int64_t i, int64_t n) {
        const vf a = load_some(x + i, n), b = load_some(x + half + i, n);
        const vf c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(x + i, a * c - b * s, n);
        store_some(x + half + i, b * c + a * s, n);
    });
}

// Pairs (2i, 2i + 1).
template <class T>
void rotate_neighbours(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
        x[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);
        x[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);
    }
}

template <class From, class To>
void copy_head(To* to, const From* from, int64_t count) {
    for_each_vector(count, [&](int64_t i, int64_t n) { store_some(to + i, load_some(from + i, n), n); });
}

template <class T>
void copy_head(T* to, const T* from, int64_t count) {
    std::memcpy(to, from, size_t(count) * sizeof(T));
}

// x / rms(x) * (weight + offset), in place.
template <class T>
void normalise_head(T* x, const T* weight, int64_t dim, float eps, float offset) {
    vf sum = {};
    for_each_vector(dim, [&](int64_t i, int64_t n) {
        const vf v = load_some(x + i, n);
        sum += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum_lanes(sum) / float(dim) + eps);
    for_each_vector(dim, [&](int64_t i, int64_t n) {
        store_some(x + i, load_some(x + i, n) * scale * (load_some(weight + i, n) + offset), n);
    });
}

struct WriteArguments {
    void* x;            // [tokens, heads + 2 kv_heads, head_dim], rows `stride` elements apart; rotated in place
    int64_t tokens, stride;
    int64_t heads, kv_heads, head_dim;
    const int64_t* positions;  // or null: nothing is rotated
    const float* cos_sin;      // [positions, rotary_dim]
    int64_t rotary_dim;
    bool interleaved;
    void* cache;  // [2, blocks, kv_heads, block_size, head_dim], or null: nothing is stored
    int64_t blocks, block_size;
    const int64_t* slots;
    const void *q_weight, *k_weight;  // [head_dim], or null: heads are not normalised
    float eps, offset;
};

template <class T, class C>
void token(const WriteArguments& a, int64_t t) {
    T* x = (T*)a.x + t * a.stride;
    if (a.q_weight) {
        for (int64_t h = 0; h < a.heads + a.kv_heads; h++) {
            const T* weight = (const T*)(h < a.heads ? a.q_weight : a.k_weight);
            normalise_head(x + h * a.head_dim, weight, a.head_dim, a.eps, a.offset);
        }
    }
    if (a.positions) {
        const int64_t half = a.rotary_dim / 2;
        const float* cos = a.cos_sin + a.positions[t] * a.rotary_dim;
        for (int64_t h = 0; h < a.heads + a.kv_heads; h++) {
            if (a.interleaved) {
                rotate_neighbours(x + h * a.head_dim, cos, cos + half, half);
            } else {
                rotate_halves(x + h * a.head_dim, cos, cos + half, half);
            }
        }
    }
    if (!a.cache) return;
    const int64_t block = a.slots[t] / a.block_size, slot = a.slots[t] % a.block_size;
    for (int64_t kv = 0; kv < 2; kv++) {
        C* cache = (C*)a.cache + (kv * a.blocks + block) * a.kv_heads * a.block_size * a.head_dim;
        const T* from = x + (a.heads + kv * a.kv_heads) * a.head_dim;
        for (int64_t h = 0; h < a.kv_heads; h++) {
            copy_head(cache + (h * a.block_size + slot) * a.head_dim, from + h * a.head_dim, a.head_dim);
        }
    }
}

}  // namespace

// With cache null and kv_heads 0 this rotates `heads` heads. Returns kOk or kUnknownType.
VLLM_API int vllm_rotate_and_write(void* x, int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads,
                                     int64_t head_dim, const int64_t* positions, const float* cos_sin,
                                     int64_t rotary_dim, int32_t interleaved, void* cache, int64_t blocks,
                                     int64_t block_size, const int64_t* slots, const void* q_weight, const void* k_weight,
                                     float eps, float offset, int32_t dtype, int32_t cache_dtype) {
    const WriteArguments a = {x,          tokens,           stride, heads,    kv_heads, head_dim,
                              positions,  cos_sin,          rotary_dim,       interleaved != 0, cache, blocks,
                              block_size, slots,            q_weight, k_weight, eps, offset};
    bool known_cache = true;
    const bool known = with_type(dtype, [&](auto type) {
        known_cache = with_type(cache_dtype, [&](auto cache_type) {
#pragma omp parallel for schedule(static) num_threads(threads_for(tokens * (heads + 2 * kv_heads) * head_dim))
            for (int64_t t = 0; t < tokens; t++) token<decltype(type), decltype(cache_type)>(a, t);
        });
    });
    return known && known_cache ? kOk : kUnknownType;
}

// k, v: [tokens, kv_heads, head_dim], token rows k_stride and v_stride elements apart.
VLLM_API int vllm_write_kv(const void* k, const void* v, int64_t tokens, int64_t k_stride, int64_t v_stride,
                             int64_t kv_heads, int64_t head_dim, void* cache, int64_t blocks, int64_t block_size,
                             const int64_t* slots, int32_t dtype, int32_t cache_dtype) {
    bool known_cache = true;
    const bool known = with_type(dtype, [&](auto type) {
        known_cache = with_type(cache_dtype, [&](auto cache_type) {
            using T = decltype(type);
            using C = decltype(cache_type);
#pragma omp parallel for schedule(static) num_threads(threads_for(2 * tokens * kv_heads * head_dim))
            for (int64_t t = 0; t < tokens; t++) {
                const int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
                for (int64_t kv = 0; kv < 2; kv++) {
                    C* to = (C*)cache + ((kv * blocks + block) * kv_heads * block_size + slot) * head_dim;
                    const T* from = kv ? (const T*)v + t * v_stride : (const T*)k + t * k_stride;
                    for (int64_t h = 0; h < kv_heads; h++) {
                        copy_head(to + h * block_size * head_dim, from + h * head_dim, head_dim);
                    }
                }
            }
        });
    });
    return known && known_cache ? kOk : kUnknownType;
}
