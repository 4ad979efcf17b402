// The library's C interface, as vllm/ops/cpu/library.py declares it. Functions return a status; they never throw and never print.
#pragma once

#include <cstdint>

#define VLLM_API extern "C" __attribute__((visibility("default")))

constexpr int kOk = 0, kUnknownType = 1, kOutOfMemory = 2, kOutOfRange = 3;

// norm.cpp
VLLM_API int vllm_norm(void* out, void* residual, const void* x, const void* weight, const void* bias, int64_t rows,
                       int64_t dim, int64_t x_stride, float eps, float offset, int32_t centred, int32_t dtype);

// activation.cpp
VLLM_API int vllm_activate(void* out, const void* x, int64_t rows, int64_t dim, int64_t x_stride, int32_t gated,
                           int32_t kind, int32_t dtype);

// linear.cpp
VLLM_API int vllm_linear(void* out, const void* x, const void* packed, const void* bias, int64_t m, int64_t n, int64_t k,
                         int64_t x_stride, int64_t out_stride, int32_t dtype, int32_t out_dtype);

// rotary.cpp
VLLM_API int vllm_rotate_and_write(void* x, int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads,
                                   int64_t head_dim, const int64_t* positions, const float* cos_sin, int64_t rotary_dim,
                                   int32_t interleaved, void* cache, int64_t block_stride, int64_t block_size,
                                   const int64_t* slots, const void* q_weight, const void* k_weight, float eps,
                                   float offset, float k_scale, float v_scale, int32_t dtype, int32_t cache_dtype);

// attention.cpp
struct AttentionCall {
    void* out;                    // [tokens, heads, head_dim]
    const void* q;                // [tokens, heads, head_dim], tokens q_stride elements apart
    const void* cache;            // [blocks, 2, kv_heads, block_size, head_dim]
    const int32_t* block_table;   // [requests, table_stride]
    const int32_t* query_starts;  // [requests + 1]
    const int32_t* seq_lens;      // [requests]
    const float* alibi_slopes;    // [heads] or null
    int64_t q_stride, table_stride;
    int64_t requests, heads, kv_heads, head_dim, block_stride, block_size;  // block_stride: elements from one block to the next
    int64_t window;                 // keys a query sees, itself included; 0: all
    float scale, softcap, v_scale;  // scale includes the cache's key scale; softcap 0: none
    int32_t dtype, cache_dtype;
};
VLLM_API int vllm_attend(const AttentionCall* call);
