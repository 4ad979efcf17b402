// The operations as one thread of a team runs its share of them; the C interface (api.h) opens a team for each.
//
// A thread may arrive late, when the others have finished an operation and gone on. So nothing outside a claimed piece may write to
// memory that threads share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "api.h"
#include "parallel.h"

// Runs body(team), which says whether it knew the types, on a team. phases: at least as many as body has.
template <class Body>
int run_kernel(int threads, int64_t phases, Body&& body) {
    std::atomic<bool> known{true};
    run_team(threads, phases, [&](Team& team) {
        if (!body(team)) known = false;
    });
    return known ? kOk : kUnknownType;
}

// Turns exceptions into a status.
template <class Body>
int guarded(Body&& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
}

// ---- norm.cpp: one phase

struct NormArguments {
    void* out;       // may be x when x_stride == dim
    void* residual;  // or null; receives x + residual
    const void* x;
    const void* weight;  // or null
    const void* bias;    // or null
    int64_t rows, dim, x_stride;
    float eps, offset;
    int32_t centred;
};
bool norm(Team& team, const NormArguments& a, int32_t dtype);

// ---- activation.cpp: one phase

struct ActivationArguments {
    void* out;      // [rows, dim]; may be x when not gated
    const void* x;  // [rows, gated ? 2 dim : dim], rows x_stride elements apart
    int64_t rows, dim, x_stride;
    int32_t gated, kind;
};
bool activate(Team& team, const ActivationArguments& a, int32_t dtype);

// ---- rotary.cpp: one phase

struct WriteArguments {
    void* x;  // [tokens, heads + 2 kv_heads, head_dim], rows `stride` elements apart; normalised and rotated in place
    int64_t tokens, stride;
    int64_t heads, kv_heads, head_dim;
    const int64_t* positions;  // or null: nothing is rotated
    const float* cos_sin;      // [positions, rotary_dim]
    int64_t rotary_dim;
    bool interleaved;
    void* cache;  // [blocks, 2, kv_heads, block_size, head_dim], or null: nothing is stored
    int64_t block_stride, block_size;  // block_stride: elements from one block to the next
    const int64_t* slots;
    const void *q_weight, *k_weight;  // [head_dim], or null: heads are not normalised
    float eps, offset;
    float k_scale, v_scale;  // of a float8 cache: stored = value / scale
};
bool rotate_and_write(Team& team, const WriteArguments& a, int32_t dtype, int32_t cache_dtype);

// ---- linear.cpp: two phases

// Weights that a later product of the same format will read.
struct NextWeights {
    const void* packed;  // or null
    int64_t n, k;
};

struct Product {
    void* out;  // may be x: all of x is copied before the first result is written
    const void* x;
    const void* packed;
    const void* bias;  // or null
    int64_t m, n, k;
    int64_t x_stride, out_stride;
    NextWeights next = {};
};
bool linear(Team& team, const Product& a, void* scratch, int32_t dtype, int32_t out_dtype);
size_t linear_scratch_bytes(int64_t m, int64_t k);

// ---- lora.cpp: two phases

constexpr int64_t kLoraParts = 16;

// Shared with the Python side, field by field (vllm/ops/cpu/library.py).
struct LoraArguments {
    void* out;                // [rows, outputs], rows out_stride elements apart; added to
    const void* x;            // [rows, inputs], rows x_stride elements apart
    const void *a, *b;        // [slots, parts, rank, inputs], [slots, rank, outputs]
    const int32_t* adapters;  // [rows], the slot of each row's adapter, below 0 for none
    const int32_t* ranks;     // [slots]: how many of the rank's rows are used
    float* small;             // [rows, parts, rank]: working memory
    int64_t rows, inputs, outputs, rank, parts;
    int64_t x_stride, out_stride;
    int64_t starts[kLoraParts], counts[kLoraParts];  // outputs of each part
};
bool add_lora(Team& team, const LoraArguments& a, int32_t dtype, int32_t out_dtype);
size_t lora_scratch_bytes(int64_t rows, int64_t parts, int64_t rank);

// ---- attention.cpp: two phases

// One tile: `tokens` query tokens from `first` of a request, one kv head.
struct Tile {
    int64_t request, kv_head, first, tokens;
    int64_t begin, end;  // keys that some row sees: [begin, end)
    int64_t rows;        // tokens * group
    int64_t cost() const { return rows * (end - begin); }
};

// A tile's keys in one segment, when segments are computed apart.
struct TilePart {
    int64_t tile, begin, end;
};

// What a batch's attention consists of; the same for all layers of one shape and window.
struct AttentionPlan {
    std::vector<Tile> tiles;
    std::vector<TilePart> parts;      // empty: tiles are not split
    std::vector<int64_t> first_part;  // [tiles + 1]
    int64_t max_rows = 0, cost = 0;
};
AttentionPlan plan_attention(const AttentionCall& call, int threads);
size_t attention_scratch_bytes(const AttentionCall& call, const AttentionPlan& plan, int threads);
bool attend(Team& team, const AttentionCall& call, const AttentionPlan& plan, void* scratch);
