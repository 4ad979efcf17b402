// Head norm, rotary position embedding and cache write in one pass over the tokens.
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace {

// Pairs (i, i + half).
template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
    for_each_vector(half, [&](int64_t i, int64_t n) {
        const vf a = load_some(x + i, n), b = load_some(x + half + i, n);
        const vf c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(x + i, fma(a, c, -(b * s)), n);
        store_some(x + half + i, fma(b, c, a * s), n);
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

// scale: what float8 numbers stand for is a multiple of it.
template <class From, class To>
void copy_head(To* to, const From* from, int64_t count, float scale) {
    for_each_vector(count, [&](int64_t i, int64_t n) {
        const vf v = load_some(from + i, n);
        store_some(to + i, sizeof(To) == 1 ? v / splat(scale) : v, n);
    });
}

template <class T>
void copy_head(T* to, const T* from, int64_t count, float) {
    std::memcpy(to, from, size_t(count) * sizeof(T));
}

// x / rms(x) * (weight + offset), in place.
template <class T>
void normalise_head(T* x, const T* weight, int64_t dim, float eps, float offset) {
    vf sum = {};
    for_each_vector(dim, [&](int64_t i, int64_t n) {
        const vf v = load_some(x + i, n);
        sum = fma(v, v, sum);
    });
    const float scale = 1.0f / std::sqrt(sum_lanes(sum) / float(dim) + eps);
    for_each_vector(dim, [&](int64_t i, int64_t n) {
        store_some(x + i, load_some(x + i, n) * scale * (load_some(weight + i, n) + offset), n);
    });
}

// Where one token's keys and values go in [blocks, 2, kv_heads, block_size, head_dim].
template <class C>
class CacheSlot {
  public:
    CacheSlot(void* cache, int64_t block_stride, int64_t block_size, int64_t kv_heads, int64_t head_dim, int64_t slot)
        : kv_stride_(kv_heads * block_size * head_dim),
          head_stride_(block_size * head_dim),
          kv_heads_(kv_heads),
          head_dim_(head_dim),
          first_((C*)cache + slot / block_size * block_stride + slot % block_size * head_dim) {}

    // kv: 0 keys, 1 values; from: [kv_heads, head_dim].
    template <class T>
    void write(int64_t kv, const T* from, float scale) const {
        for (int64_t h = 0; h < kv_heads_; h++) {
            copy_head(first_ + kv * kv_stride_ + h * head_stride_, from + h * head_dim_, head_dim_, scale);
        }
    }

  private:
    int64_t kv_stride_, head_stride_, kv_heads_, head_dim_;
    C* first_;
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
    const CacheSlot<C> to(a.cache, a.block_stride, a.block_size, a.kv_heads, a.head_dim, a.slots[t]);
    to.write(0, x + a.heads * a.head_dim, a.k_scale);
    to.write(1, x + (a.heads + a.kv_heads) * a.head_dim, a.v_scale);
}

}  // namespace

bool rotate_and_write(Team& team, const WriteArguments& a, int32_t dtype, int32_t cache_dtype) {
    const int64_t elements = (a.heads + 2 * a.kv_heads) * a.head_dim;
    bool known = true;
    return with_type(dtype, [&](auto type) {
        known = with_cache_type(cache_dtype, [&](auto cache_type) {
            team.share(a.tokens, team.grain(a.tokens, 1 + 8192 / elements), [&](int64_t t, int64_t end) {
                for (; t < end; t++) token<decltype(type), decltype(cache_type)>(a, t);
            });
        });
    }) && known;
}

// With cache null and kv_heads 0 this rotates `heads` heads. Returns kOk or kUnknownType.
VLLM_API int vllm_rotate_and_write(void* x, int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads,
                                   int64_t head_dim, const int64_t* positions, const float* cos_sin, int64_t rotary_dim,
                                   int32_t interleaved, void* cache, int64_t block_stride, int64_t block_size,
                                   const int64_t* slots, const void* q_weight, const void* k_weight, float eps,
                                   float offset, float k_scale, float v_scale, int32_t dtype, int32_t cache_dtype) {
    const WriteArguments a = {x,          tokens, stride,           heads,    kv_heads, head_dim,
                              positions,  cos_sin, rotary_dim,      interleaved != 0, cache, block_stride,
                              block_size, slots,  q_weight,         k_weight, eps,      offset,   k_scale, v_scale};
    return guarded([&] {
        return run_kernel(threads_for(tokens * (heads + 2 * kv_heads) * head_dim), 1, [&](Team& team) { return rotate_and_write(team, a, dtype, cache_dtype); });
    });
}

// k, v: [tokens, kv_heads, head_dim], token rows k_stride and v_stride elements apart.
VLLM_API int vllm_write_kv(const void* k, const void* v, int64_t tokens, int64_t k_stride, int64_t v_stride,
                             int64_t kv_heads, int64_t head_dim, void* cache, int64_t block_stride, int64_t block_size,
                             const int64_t* slots, float k_scale, float v_scale, int32_t dtype, int32_t cache_dtype) {
    return guarded([&] {
        return run_kernel(threads_for(2 * tokens * kv_heads * head_dim), 1, [&](Team& team) {
            bool known = true;
            return with_type(dtype, [&](auto type) {
                known = with_cache_type(cache_dtype, [&](auto cache_type) {
                    using T = decltype(type);
                    using C = decltype(cache_type);
                    team.share(tokens, team.grain(tokens, 8), [&](int64_t t, int64_t end) {
                        for (; t < end; t++) {
                            const CacheSlot<C> to(cache, block_stride, block_size, kv_heads, head_dim, slots[t]);
                            to.write(0, (const T*)k + t * k_stride, k_scale);
                            to.write(1, (const T*)v + t * v_stride, v_scale);
                        }
                    });
                });
            }) && known;
        });
    });
}
