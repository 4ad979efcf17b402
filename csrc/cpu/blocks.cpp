// A run of decoder layers in one call: the same functions in the same order as the layers' Python code, so the same bits,
// without some ten calls from Python and parallel regions per layer.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "number.h"
#include "scratch.h"

// Shared with the Python side, field by field (vllm/ops/cpu/blocks.py).
struct LinearWeights {
    const void *packed, *bias;  // bias may be null
    int64_t out, in;
    const LoraArguments* lora;  // the adapters' matrices, all else open; null without adapters
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
    int64_t block_stride;  // of the cache: elements from one block to the next
    int64_t heads, kv_heads, head_dim, rotary_dim;
    int64_t window;
    int64_t group;  // which block table
    float scale, softcap, qk_eps, qk_offset, k_scale, v_scale;
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
    const int64_t* rows;  // [num_rows] tokens whose output is wanted, each once: the first rows of out; null for all
    void* kept;           // [num_rows, hidden]: their part of the stream, if there are rows
    const int32_t *adapters, *kept_adapters;  // of tokens, of rows: slots of adapters, below 0 for none; null: none has one
    int64_t count, tokens, hidden, requests;
    int64_t block_size;
    int64_t num_rows;
    int32_t dtype, cache_dtype;
};

namespace {

// The feed-forward layer of a long prompt goes in parts of this many tokens: its hidden state is the largest there is.
constexpr int64_t kFeedForwardTokens = 512;

int64_t bytes_of(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t lora_bytes(int64_t rows, const LinearWeights& w) {
    return w.lora ? aligned(lora_scratch_bytes(rows, w.lora->parts, w.lora->rank)) : 0;
}

AttentionCall attention_call(const BlocksCall& c, const BlockWeights& b) {
    AttentionCall call = {};
    call.cache = b.cache;
    call.block_table = c.groups[b.group].block_table;
    call.table_stride = c.groups[b.group].table_stride;
    call.query_starts = c.query_starts;
    call.seq_lens = c.seq_lens;
    call.q_stride = b.qkv.out;
    call.requests = c.requests;
    call.heads = b.heads;
    call.kv_heads = b.kv_heads;
    call.head_dim = b.head_dim;
    call.block_stride = b.block_stride;
    call.block_size = c.block_size;
    call.window = b.window;
    call.scale = b.scale * b.k_scale;
    call.softcap = b.softcap;
    call.v_scale = b.v_scale;
    call.dtype = c.dtype;
    call.cache_dtype = c.cache_dtype;
    return call;
}

// What all threads share: how the layers' attention is cut up, and working memory for the largest layer.
class Preparation {
  public:
    Preparation(const BlocksCall& c, int threads) : call_(c) {
        const size_t element = size_t(bytes_of(c.dtype));
        const size_t part = size_t(std::min(c.tokens, kFeedForwardTokens));
        size_t qkv = 0, context = 0, up = 0, activated = 0, scratch = 0, small = 0;
        for (int64_t i = 0; i < c.count; i++) {
            const BlockWeights& b = c.layers[i];
            const size_t plan = plan_of(b, threads);
            plan_.push_back(plan);
            qkv = std::max(qkv, aligned(size_t(c.tokens * b.qkv.out) * element));
            context = std::max(context, aligned(size_t(c.tokens * b.o.in) * element));
            up = std::max(up, aligned(part * size_t(b.up.out) * element));
            activated = std::max(activated, aligned(part * size_t(b.down.in) * element));
            if (c.adapters) {
                small = std::max({small, lora_bytes(c.tokens, b.qkv), lora_bytes(c.tokens, b.o), lora_bytes(int64_t(part), b.up),
                                  lora_bytes(int64_t(part), b.down)});
            }
            scratch = std::max({scratch, linear_scratch_bytes(c.tokens, std::max(b.qkv.in, b.o.in)),
                                linear_scratch_bytes(int64_t(part), std::max(b.up.in, b.down.in)),
                                attention_scratch_bytes(attention_call(c, b), plans_[plan].plan, threads)});
        }
        thread_local Scratch memory;
        // Attention's and the feed-forward layer's intermediate results are never needed at once.
        const size_t between = std::max(qkv + context, up + activated);
        first = (char*)memory.reserve(between + small + scratch + 4096);
        this->context = first + qkv;
        this->activated = first + up;
        this->small = (float*)(first + between);
        this->scratch = first + (between + small + 4095) / 4096 * 4096;
    }

    const AttentionPlan& plan(int64_t layer) const { return plans_[plan_[size_t(layer)]].plan; }

    char *first, *context, *activated, *scratch;
    float* small;  // of adapters

  private:
    struct Planned {
        int64_t window, heads, kv_heads, head_dim;
        AttentionPlan plan;
    };

    size_t plan_of(const BlockWeights& b, int threads) {
        for (size_t i = 0; i < plans_.size(); i++) {
            const Planned& p = plans_[i];
            if (p.window == b.window && p.heads == b.heads && p.kv_heads == b.kv_heads && p.head_dim == b.head_dim) return i;
        }
        plans_.push_back({b.window, b.heads, b.kv_heads, b.head_dim, plan_attention(attention_call(call_, b), threads)});
        return plans_.size() - 1;
    }

    const BlocksCall& call_;
    std::vector<Planned> plans_;
    std::vector<size_t> plan_;  // of each layer
};

// One thread's walk through the layers.
class Walk {
  public:
    Walk(Team& team, const BlocksCall& call, const Preparation& shared)
        : team_(team), c_(call), shared_(shared), element_(bytes_of(call.dtype)), stream_(call.residual), rows_(call.tokens), adapters_(call.adapters) {}

    static int64_t phases(const BlocksCall& c) {
        const int64_t parts = (c.tokens + kFeedForwardTokens - 1) / kFeedForwardTokens;
        const int64_t adapters = c.adapters ? 2 + 2 + 4 * parts : 0;
        // rows; norms, qkv, rotation, attention, o; up, activation, down
        return 1 + c.count * (2 + 2 + 1 + 2 + 2 + 5 * parts + adapters);
    }

    bool run() {
        for (int64_t i = 0; i < c_.count && known_; i++) {
            const BlockWeights& b = c_.layers[i];
            // The first layer's stream is complete; later ones still have to add the last one's output.
            normalise(b.norm1, i == 0 ? nullptr : stream_, i == 0 ? stream_ : c_.out);
            const bool narrow = c_.rows && i + 1 == c_.count;
            write_keys(b);
            if (narrow && !c_.num_rows) break;
            const char* context = attention(b, shared_.plan(i));
            if (narrow) context = keep_rows(b, context);
            multiply(c_.out, context, b.o, rows_, &b.up);
            normalise(b.norm2, stream_, c_.out);
            feed_forward(b, i + 1 < c_.count ? &c_.layers[i + 1].qkv : nullptr);
        }
        return known_;
    }

  private:
    void check(bool known) { known_ = known_ && known; }

    void normalise(const NormWeights& w, void* residual, const void* x) {
        check(norm(team_, {c_.out, residual, x, w.weight, w.bias, rows_, c_.hidden, c_.hidden, w.eps, w.offset, w.centred},
                   c_.dtype));
    }

    // next: the weights of the product after this one, or null.   first: the number of the first row.
    void multiply(void* out, const void* x, const LinearWeights& w, int64_t rows, const LinearWeights* next, int64_t first = 0) {
        Product product = {out, x, w.packed, w.bias, rows, w.out, w.in, w.in, w.out, {}};
        if (next) product.next = {next->packed, next->out, next->in};
        check(linear(team_, product, shared_.scratch, c_.dtype, c_.dtype));
        if (!adapters_ || !w.lora) return;
        LoraArguments lora = *w.lora;
        lora.out = out;
        lora.x = x;
        lora.adapters = adapters_ + first;
        lora.small = shared_.small;
        lora.rows = rows;
        lora.x_stride = w.in;
        lora.out_stride = w.out;
        check(add_lora(team_, lora, c_.dtype, c_.dtype));
    }

    void write_keys(const BlockWeights& b) {
        char* qkv = shared_.first;
        multiply(qkv, c_.out, b.qkv, c_.tokens, &b.o);
        check(rotate_and_write(team_, {qkv, c_.tokens, b.qkv.out, b.heads, b.kv_heads, b.head_dim,
                                       b.cos_sin ? c_.positions : nullptr, b.cos_sin, b.rotary_dim, b.interleaved != 0, b.cache,
                                       b.block_stride, c_.block_size, c_.groups[b.group].slots, b.q_norm, b.k_norm, b.qk_eps,
                                       b.qk_offset, b.k_scale, b.v_scale},
                               c_.dtype, c_.cache_dtype));
    }

    const char* attention(const BlockWeights& b, const AttentionPlan& plan) {
        AttentionCall call = attention_call(c_, b);
        call.out = shared_.context;
        call.q = shared_.first;
        check(attend(team_, call, plan, shared_.scratch));
        return shared_.context;
    }

    // Goes on with the wanted rows only; their context moves to where the queries were.
    const char* keep_rows(const BlockWeights& b, const char* context) {
        const size_t width = size_t(b.o.in * element_), hidden = size_t(c_.hidden * element_);
        team_.share(c_.num_rows, 64, [&](int64_t i, int64_t end) {
            for (; i < end; i++) {
                memcpy(shared_.first + size_t(i) * width, context + size_t(c_.rows[i]) * width, width);
                memcpy((char*)c_.kept + size_t(i) * hidden, (const char*)c_.residual + size_t(c_.rows[i]) * hidden, hidden);
            }
        });
        stream_ = c_.kept;
        if (adapters_) adapters_ = c_.kept_adapters;
        rows_ = c_.num_rows;
        return shared_.first;
    }

    void feed_forward(const BlockWeights& b, const LinearWeights* next) {
        for (int64_t token = 0; token < rows_; token += kFeedForwardTokens) {
            const int64_t rows = std::min(kFeedForwardTokens, rows_ - token);
            char* x = (char*)c_.out + token * c_.hidden * element_;
            multiply(shared_.first, x, b.up, rows, &b.down, token);
            check(activate(team_, {shared_.activated, shared_.first, rows, b.down.in, b.up.out, b.gated, b.activation}, c_.dtype));
            multiply(x, shared_.activated, b.down, rows, next, token);
        }
    }

    Team& team_;
    const BlocksCall& c_;
    const Preparation& shared_;
    const int64_t element_;
    void* stream_;
    int64_t rows_;
    const int32_t* adapters_;
    bool known_ = true;
};

}  // namespace

// Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_run_blocks(const BlocksCall* call) {
    return guarded([&] {
        const BlockWeights& b = call->layers[0];
        const int threads = threads_for(call->hidden * (b.qkv.out + b.up.out) / 8);
        const Preparation shared(*call, threads);
        return run_kernel(threads, Walk::phases(*call), [&](Team& team) { return Walk(team, *call, shared).run(); });
    });
}
