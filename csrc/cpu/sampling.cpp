// What greedy sampling asks of logits: the place of each row's maximum, and whether the row is made of numbers; masks of tokens.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t kBlock = 1024;  // the maximum is found block by block, its place in one block

struct Survey {
    float top, sum;
};

Survey survey(const float* x, int64_t count) {
    vf top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)}, sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= count; i += 4 * W) {
        for (int j = 0; j < 4; j++) {
            const vf v = load(x + i + j * W);
            top[j] = vmax(top[j], v);
            sums[j] += v;
        }
    }
    float best = max_lanes(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < count; i++) best = std::max(best, x[i]), sum += x[i];
    return {best, sum};
}

// Whether a token can be chosen from a row: neither NaN nor +inf in it, which would stay in the sum, and a maximum. Tokens that a
// model bars (-inf, or the least number of a type) make the sum -inf at most.
bool usable(float top, float sum) { return sum < INFINITY && top > -INFINITY; }

// The lowest index of the maximum of x; some index if x holds NaN. finite: null, or whether x is usable.
int64_t place_of_max(const float* x, int64_t count, uint8_t* finite) {
    float best = -INFINITY, sum = 0;
    int64_t block = 0;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        const Survey found = survey(x + begin, std::min(kBlock, count - begin));
        if (found.top > best) best = found.top, block = begin;
        sum += found.sum;
    }
    if (finite) *finite = usable(best, sum);
    const int64_t end = std::min(count, block + kBlock);
    const int64_t place = std::find(x + block, x + end, best) - x;
    return place < end ? place : block;
}

// Make the tokens of x impossible whose bits are not set. bits: one per token, the lowest first.
void mask_row(float* x, int64_t count, const uint32_t* bits) {
    vi lane;
    for (int j = 0; j < W; j++) lane[j] = 1 << j;
    const auto masked = [&](vf v, int64_t i) { return splat_int(int32_t(bits[i / 32] >> (i % 32))) & lane ? v : splat(-INFINITY); };
    int64_t i = 0;
    for (; i + W <= count; i += W) store(x + i, masked(load(x + i), i));
    if (i < count) store_part(x + i, masked(load_part(x + i, count - i), i), count - i);
}

}  // namespace

// logits: [rows, vocab], rows `stride` apart. ids: [rows], the lowest index of each maximum. finite: null, or [rows], 0 where a row
// is not usable. Returns kOk or kOutOfMemory.
VLLM_API int vllm_greedy(const float* logits, int64_t rows, int64_t vocab, int64_t stride, int64_t* ids, uint8_t* finite) {
    return guarded([&] {
        return run_kernel(rows > 1 ? threads_for(rows * vocab / 4) : 1, 1, [&](Team& team) {
            team.share(rows, 1, [&](int64_t row, int64_t) {
                ids[row] = place_of_max(logits + row * stride, vocab, finite ? finite + row : nullptr);
            });
            return true;
        });
    });
}

// finite: [rows], as above.
VLLM_API int vllm_finite_rows(const float* logits, int64_t rows, int64_t vocab, int64_t stride, uint8_t* finite) {
    return guarded([&] {
        return run_kernel(rows > 1 ? threads_for(rows * vocab / 4) : 1, 1, [&](Team& team) {
            team.share(rows, 1, [&](int64_t row, int64_t) {
                const Survey found = survey(logits + row * stride, vocab);
                finite[row] = usable(found.top, found.sum);
            });
            return true;
        });
    });
}

// Applies masks in place. finite: null, or [rows], as above, of the logits before. which: [masked], rows, each at most once. bits:
// [masked, words], at least one bit per token.
VLLM_API int vllm_mask_rows(float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* which, int64_t masked,
                            const uint32_t* bits, int64_t words, uint8_t* finite) {
    return guarded([&] {
        return run_kernel(rows > 1 ? threads_for(rows * vocab / 4) : 1, 2, [&](Team& team) {
            team.share(finite ? rows : 0, 1, [&](int64_t row, int64_t) {
                const Survey found = survey(logits + row * stride, vocab);
                finite[row] = usable(found.top, found.sum);
            });
            team.share(masked, 1, [&](int64_t i, int64_t) { mask_row(logits + which[i] * stride, vocab, bits + i * words); });
            return true;
        });
    });
}

// Masks rows, as above, and finds the place of each row's maximum. finite: of the logits before.   possible: [rows], whether a token
// is left.
VLLM_API int vllm_greedy_masked(float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* which, int64_t masked,
                                const uint32_t* bits, int64_t words, int64_t* ids, uint8_t* finite, uint8_t* possible) {
    return guarded([&] {
        std::vector<const uint32_t*> mask_of(rows, nullptr);
        for (int64_t i = 0; i < masked; i++) mask_of[which[i]] = bits + i * words;
        return run_kernel(rows > 1 ? threads_for(rows * vocab / 4) : 1, 1, [&](Team& team) {
            team.share(rows, 1, [&](int64_t row, int64_t) {
                float* x = logits + row * stride;
                if (!mask_of[row]) {
                    ids[row] = place_of_max(x, vocab, finite + row);
                    possible[row] = finite[row];
                    return;
                }
                const Survey found = survey(x, vocab);
                finite[row] = usable(found.top, found.sum);
                mask_row(x, vocab, mask_of[row]);
                ids[row] = place_of_max(x, vocab, possible + row);
            });
            return true;
        });
    });
}
