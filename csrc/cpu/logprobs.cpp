// The most likely tokens of rows of logits, their logprobs, and those of given tokens: vllm/ops/logprobs.py.
#include <functional>

#include "kernels.h"
#include "logits.h"
#include "scratch.h"

namespace {

struct LogprobArguments {
    const float* logits;
    int64_t rows, vocab, stride, count;
    const int64_t* token_ids;  // [rows]
    int64_t* ids;              // [rows, 1 + count]
    float* logprobs;           // [rows, 1 + count]
    int64_t* ranks;            // [rows]
};

// The `count` tokens that come first in the order (y descending, id ascending), best first, as (key, ~id); sorted in place.
uint64_t* first_tokens(const Row<float>& row, int64_t count, Tokens& tokens) {
    gather(row, count <= row.groups() ? bound_of(row, count) : -INFINITY, tokens);
    uint64_t* order = (uint64_t*)tokens.masses;
    for (int64_t i = 0; i < tokens.count; i++) order[i] = uint64_t(tokens.keys[i]) << 32 | uint32_t(~tokens.ids[i]);
    std::partial_sort(order, order + count, order + tokens.count, std::greater<uint64_t>());
    return order;
}

void find_logprobs(const LogprobArguments& a, int64_t i, float* tops, Tokens& tokens) {
    Row<float> row = {a.logits + i * a.stride, a.vocab, 0, 1.0f, 0.0f, 1.0f, 0.0f, tops, 0.0f};
    int64_t* ids = a.ids + i * (1 + a.count);
    float* logprobs = a.logprobs + i * (1 + a.count);
    const float own = row.logits[a.token_ids[i]];
    int64_t rank = 1;
    bool numbers = true;
    for (int64_t group = 0; group < row.groups(); group++) {
        vf top = splat(-INFINITY);
        row.each_vector(group, [&](int64_t at, int64_t n) {
            const vf y = row.scaled(at, n);
            top = vmax(top, y);
            const uint32_t all = (1u << n) - 1, not_above = lanes_at_least(-y, -own) & all;
            rank += __builtin_popcount(all & ~not_above);
            numbers = numbers && (lanes_at_least(y, -INFINITY) & all) == all;
        });
        tops[group] = max_lanes(top);
    }
    row.peak = max_of(tops, row.groups());
    ids[0] = a.token_ids[i];
    a.ranks[i] = rank;
    if (!numbers || !std::isfinite(row.peak)) {  // the request fails
        for (int64_t j = 0; j < a.count; j++) ids[1 + j] = j;
        std::fill(logprobs, logprobs + 1 + a.count, NAN);
        return;
    }
    int64_t total = 0;
    for (int64_t group = 0; group < row.groups(); group++) {
        if (tops[group] < row.lowest()) continue;
        MassSum sum;
        row.each_vector(group, [&](int64_t at, int64_t n) { sum.add(row.weight(row.scaled(at, n))); });
        total += sum.total();
    }
    const double norm = double(row.peak) + std::log(double(total) * 0x1p-40);
    logprobs[0] = float(double(own) - norm);
    if (a.count == 0) return;
    const uint64_t* order = first_tokens(row, a.count, tokens);
    for (int64_t j = 0; j < a.count; j++) {
        ids[1 + j] = uint32_t(~order[j]);
        logprobs[1 + j] = float(double(from_key(uint32_t(order[j] >> 32))) - norm);
    }
}

}  // namespace

// logits: [rows, vocab], rows `stride` apart; count: at most vocab; token_ids: [rows], below vocab; the others as in
// vllm/ops/logprobs.py. Returns kOk or kOutOfMemory.
VLLM_API int vllm_top_logprobs(const float* logits, int64_t rows, int64_t vocab, int64_t stride, int64_t count,
                               const int64_t* token_ids, int64_t* ids, float* logprobs, int64_t* ranks) {
    return guarded([&] {
        const LogprobArguments a = {logits, rows, vocab, stride, count, token_ids, ids, logprobs, ranks};
        const int threads = rows > 1 ? threads_for(rows * vocab / 4) : 1;
        const size_t groups = size_t((vocab + kGroup - 1) / kGroup), tops = (groups * sizeof(float) + 63) / 64 * 64;
        const size_t each = Tokens::bytes(vocab) + tops;
        thread_local Scratch memory;
        char* shared = (char*)memory.reserve(size_t(threads) * each);
        return run_kernel(threads, 1, [&](Team& team) {
            char* mine = shared + size_t(team.thread()) * each;
            Tokens tokens(mine + tops, vocab);
            team.share(rows, 1, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; i++) find_logprobs(a, i, (float*)mine, tokens);
            });
            return true;
        });
    });
}
