// A run of decoder layers in one call: the same functions in the same order as the layers' Python code, so the same bits,
// without some ten calls from Python per layer.
#include <algorithm>
#include <new>

#include "api.h"
#include "number.h"
#include "scratch.h"

// Shared with the Python side, field by field (vllm/ops/cpu/blocks.py).
struct LinearWeights {
    const void *packed, *bias;  // bias may be null
    int64_t out, in;
};

struct NormWeights {
    const void *weight, *bias;  // may be null
    float eps, offset;
    int32_t centred;
};

// x + A(N1 x), then x + F(N2 x).
struct BlockWeights {
    NormWeights norm1, norm2;
    LinearWeights qkv, o, up, down;  // up: gate and up in one when gated
    const void *q_norm, *k_norm;     // RMS norm of each head, or null
    const float* cos_sin;            // or null: nothing is rotated
    void* cache;
    int64_t heads, kv_heads, head_dim, rotary_dim;
    int64_t window;
    int64_t group;  // which block table
    float scale, softcap, qk_eps, qk_offset;
    int32_t interleaved, gated, activation;
};

struct GroupTables {
    const int64_t* slots;        // [tokens]
    const int32_t* block_table;  // [requests, table_stride]
    int64_t table_stride;
};

struct BlocksCall {
    const BlockWeights* layers;
    const GroupTables* groups;
    void* residual;  // [tokens, hidden]: the stream, updated in place
    void* out;       // [tokens, hidden]: what is still to be added to it
    const int64_t* positions;
    const int32_t *query_starts, *seq_lens;
    int64_t count, tokens, hidden, requests;
    int64_t blocks, block_size;
    int32_t dtype, cache_dtype;
};

namespace {

// The feed-forward layer of a long prompt goes in parts of this many tokens: its hidden state is the largest there is.
constexpr int64_t kFeedForwardTokens = 512;

int64_t bytes_of(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

class Runner {
  public:
    explicit Runner(const BlocksCall& call) : c_(call), element_(bytes_of(call.dtype)) {}

    int run() {
        for (int64_t i = 0; i < c_.count && status_ == kOk; i++) {
            const BlockWeights& b = c_.layers[i];
            // The first layer's stream is complete; later ones still have to add the last one's output.
            norm(b.norm1, i == 0 ? nullptr : c_.residual, i == 0 ? c_.residual : c_.out);
            attention(b);
            norm(b.norm2, c_.residual, c_.out);
            feed_forward(b);
        }
        return status_;
    }

  private:
    void check(int status) {
        if (status_ == kOk) status_ = status;
    }

    void norm(const NormWeights& w, void* residual, const void* x) {
        check(vllm_norm(c_.out, residual, x, w.weight, w.bias, c_.tokens, c_.hidden, c_.hidden, w.eps, w.offset, w.centred,
                        c_.dtype));
    }

    void linear(void* out, const void* x, const LinearWeights& w, int64_t rows) {
        check(vllm_linear(out, x, w.packed, w.bias, rows, w.out, w.in, w.in, w.out, c_.dtype, c_.dtype));
    }

    void attention(const BlockWeights& b) {
        thread_local Scratch scratch;
        const int64_t qkv_bytes = (c_.tokens * b.qkv.out * element_ + 63) / 64 * 64;
        char* qkv = (char*)scratch.reserve(size_t(qkv_bytes + c_.tokens * b.o.in * element_));
        const GroupTables& tables = c_.groups[b.group];
        linear(qkv, c_.out, b.qkv, c_.tokens);
        check(vllm_rotate_and_write(qkv, c_.tokens, b.qkv.out, b.heads, b.kv_heads, b.head_dim,
                                    b.cos_sin ? c_.positions : nullptr, b.cos_sin, b.rotary_dim, b.interleaved, b.cache,
                                    c_.blocks, c_.block_size, tables.slots, b.q_norm, b.k_norm, b.qk_eps, b.qk_offset,
                                    c_.dtype, c_.cache_dtype));
        AttentionCall call = {};
        call.out = qkv + qkv_bytes;
        call.q = qkv;
        call.cache = b.cache;
        call.block_table = tables.block_table;
        call.query_starts = c_.query_starts;
        call.seq_lens = c_.seq_lens;
        call.q_stride = b.qkv.out;
        call.table_stride = tables.table_stride;
        call.requests = c_.requests;
        call.heads = b.heads;
        call.kv_heads = b.kv_heads;
        call.head_dim = b.head_dim;
        call.blocks = c_.blocks;
        call.block_size = c_.block_size;
        call.window = b.window;
        call.scale = b.scale;
        call.softcap = b.softcap;
        call.v_scale = 1.0f;
        call.dtype = c_.dtype;
        call.cache_dtype = c_.cache_dtype;
        check(vllm_attend(&call));
        linear(c_.out, call.out, b.o, c_.tokens);
    }

    void feed_forward(const BlockWeights& b) {
        thread_local Scratch scratch;
        const int64_t part = std::min(c_.tokens, kFeedForwardTokens);
        const int64_t up_bytes = (part * b.up.out * element_ + 63) / 64 * 64;
        char* up = (char*)scratch.reserve(size_t(up_bytes + part * b.down.in * element_));
        for (int64_t token = 0; token < c_.tokens; token += part) {
            const int64_t rows = std::min(part, c_.tokens - token);
            char* x = (char*)c_.out + token * c_.hidden * element_;
            linear(up, x, b.up, rows);
            check(vllm_activate(up + up_bytes, up, rows, b.down.in, b.up.out, b.gated, b.activation, c_.dtype));
            linear(x, up + up_bytes, b.down, rows);
        }
    }

    const BlocksCall& c_;
    const int64_t element_;
    int status_ = kOk;
};

}  // namespace

// Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_run_blocks(const BlocksCall* call) {
    try {
        return Runner(*call).run();
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
}
