// Rows of GGUF's blocks, as a file stores them, into the panels of linear_groups.cpp with nothing in between: a file is read once.
// Layouts of blocks: ggml-common.h of llama.cpp; gguf_blocks.py has all of them, and the codes and scales that they stand for.
#include <cmath>

#include "groups.h"

namespace {

inline float half_at(const uint8_t* p) {
    f16 half;
    std::memcpy(&half, p, 2);
    return to_float(half);
}

// 32 codes below 16, a byte each in four words, as four quads of two codes a byte.
inline void write_nibbles(uint8_t* out, const uint64_t* codes) {
    for (int i = 0; i < 4; i++) {
        const uint32_t quad = uint32_t(codes[i]) | uint32_t(codes[i] >> 32) << 4;
        std::memcpy(out + 4 * i, &quad, 4);
    }
}

constexpr uint64_t kLowHalves = 0x0f0f0f0f0f0f0f0f;

// A block format says how many values a block has, in how many bytes, and as what they are packed: the bits of a code, the values
// that share a scale, the zero. scales, offsets: one for each group, `stride` apart. codes: as a panel's quads, but for one output.

struct Q4_0 {
    static constexpr int kValues = 32, kBytes = 18, kBits = 4, kGroup = 32;
    static constexpr bool kOffsets = false;
    static void scales(const uint8_t* block, float* scales, float*, int) { scales[0] = half_at(block); }
    static void codes(const uint8_t* block, uint8_t* out) {
        uint64_t packed[2], codes[4];
        std::memcpy(packed, block + 2, 16);
        for (int i = 0; i < 2; i++) {
            codes[i] = packed[i] & kLowHalves;
            codes[2 + i] = packed[i] >> 4 & kLowHalves;
        }
        write_nibbles(out, codes);
    }
};

struct Q8_0 {
    static constexpr int kValues = 32, kBytes = 34, kBits = 8, kGroup = 32;
    static constexpr bool kOffsets = false;
    static void scales(const uint8_t* block, float* scales, float*, int) { scales[0] = half_at(block); }
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int i = 0; i < 32; i++) out[i] = block[2 + i] ^ 128;
    }
};

// Eight scales and eight minima of 6 bits, and fp16 factors of both.
inline void scales_and_minima(const uint8_t* block, float* scales, float* offsets, int stride) {
    const float d = half_at(block), least = half_at(block + 2);
    const uint8_t* packed = block + 4;
    for (int i = 0; i < 4; i++) {
        const int a = packed[i], b = packed[4 + i], c = packed[8 + i];
        scales[i * stride] = d * float(a & 63);
        scales[(4 + i) * stride] = d * float((c & 15) | (a >> 6) << 4);
        offsets[i * stride] = -least * float(b & 63);
        offsets[(4 + i) * stride] = -least * float(c >> 4 | (b >> 6) << 4);
    }
}

struct Q4_K {
    static constexpr int kValues = 256, kBytes = 144, kBits = 4, kGroup = 32;
    static constexpr bool kOffsets = true;
    static void scales(const uint8_t* block, float* scales, float* offsets, int stride) { scales_and_minima(block, scales, offsets, stride); }
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int run = 0; run < 4; run++) {
            uint64_t packed[4], low[4], high[4];
            std::memcpy(packed, block + 16 + 32 * run, 32);
            for (int i = 0; i < 4; i++) {
                low[i] = packed[i] & kLowHalves;
                high[i] = packed[i] >> 4 & kLowHalves;
            }
            write_nibbles(out + 32 * run, low);
            write_nibbles(out + 32 * run + 16, high);
        }
    }
};

struct Q5_K {
    static constexpr int kValues = 256, kBytes = 176, kBits = 8, kGroup = 32;
    static constexpr bool kOffsets = true;
    static void scales(const uint8_t* block, float* scales, float* offsets, int stride) { scales_and_minima(block, scales, offsets, stride); }
    static void codes(const uint8_t* block, uint8_t* out) {
        const uint8_t *fifth = block + 16, *packed = block + 48;
        for (int run = 0; run < 4; run++) {
            for (int i = 0; i < 32; i++) {
                const int byte = packed[32 * run + i], tops = fifth[i] >> (2 * run);
                out[64 * run + i] = uint8_t((byte & 15) | (tops & 1) << 4);
                out[64 * run + 32 + i] = uint8_t(byte >> 4 | (tops & 2) << 3);
            }
        }
    }
};

struct Q6_K {
    static constexpr int kValues = 256, kBytes = 210, kBits = 8, kGroup = 16;
    static constexpr bool kOffsets = false;
    static void scales(const uint8_t* block, float* scales, float*, int stride) {
        const float d = half_at(block + 208);
        for (int i = 0; i < 16; i++) scales[i * stride] = d * float(int8_t(block[192 + i]));
    }
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int half = 0; half < 2; half++, out += 128) {
            const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
            for (int i = 0; i < 32; i++) {
                out[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
                out[32 + i] = uint8_t((low[32 + i] & 15) | (high[i] & 12) << 2);
                out[64 + i] = uint8_t(low[i] >> 4 | (high[i] & 48));
                out[96 + i] = uint8_t(low[32 + i] >> 4 | (high[i] & 192) >> 2);
            }
        }
    }
};

// Quads of codes of kPanel outputs, `in` output by output, to where a panel has them: kSteps a group, groups `group_bytes` apart.
template <int kQuads, int kSteps>
inline void spread_quads(uint8_t* out, int64_t group_bytes, const uint8_t* in) {
    const auto place = [&](int quad) { return out + quad / kSteps * group_bytes + quad % kSteps * kPanel * 4; };
    if constexpr (kQuads % W == 0) {
        for (int quad = 0; quad < kQuads; quad += W) {
            for (int c = 0; c < kPanel; c += W) {
                vf square[W];
                for (int i = 0; i < W; i++) square[i] = load((const float*)(in + ((c + i) * kQuads + quad) * 4));
                transpose(square);
                for (int i = 0; i < W; i++) store((float*)place(quad + i) + c, square[i]);
            }
        }
    } else {
        for (int quad = 0; quad < kQuads; quad++) {
            for (int c = 0; c < kPanel; c++) std::memcpy(place(quad) + 4 * c, in + (c * kQuads + quad) * 4, 4);
        }
    }
}

template <class F>
GroupShape shape_of(int64_t n, int64_t k) {
    return {n, k, F::kGroup, F::kBits, 0, F::kOffsets};
}

template <class F>
void pack_rows(uint8_t* to, const uint8_t* const* rows, int64_t count, int64_t k) {
    constexpr int kGroups = F::kValues / F::kGroup, kCodes = F::kValues * F::kBits / 8;
    const GroupShape a = shape_of<F>(count, k);
    auto* factors = (float*)(to + a.groups() * a.group_bytes());
    float inverse[kPanel] = {};
    for (int c = 0; c < kPanel; c++) {
        float largest = 0;
        for (int64_t b = 0; c < count && b < k / F::kValues; b++) {
            float scales[kGroups], offsets[kGroups] = {};
            F::scales(rows[c] + b * F::kBytes, scales, offsets, 1);
            for (int g = 0; g < kGroups; g++) largest = std::max(largest, std::max(std::fabs(scales[g]), std::fabs(offsets[g])));
        }
        factors[c] = largest;
        inverse[c] = largest > 0 ? 1.0f / largest : 0.0f;
    }
    alignas(64) float scales[kGroups * kPanel] = {}, offsets[kGroups * kPanel] = {};
    alignas(64) uint8_t codes[kPanel * kCodes] = {};
    for (int64_t b = 0; b < k / F::kValues; b++) {
        for (int64_t c = 0; c < count; c++) {
            const uint8_t* block = rows[c] + b * F::kBytes;
            F::scales(block, scales + c, offsets + c, kPanel);
            F::codes(block, codes + c * kCodes);
        }
        spread_quads<kCodes / 4, F::kGroup * F::kBits / 32>(to + a.header_bytes(), a.group_bytes(), codes);
        for (int g = 0; g < kGroups; g++, to += a.group_bytes()) {
            for (int c = 0; c < kPanel; c += W) {
                const vf factor = load(inverse + c);
                store((f16*)to + c, load(scales + g * kPanel + c) * factor);
                if (F::kOffsets) store((f16*)to + kPanel + c, load(offsets + g * kPanel + c) * factor);
            }
        }
    }
}

// RowPieces of rows, one behind the other.
struct RowPieces {
    const uint8_t* const* at;
    const int64_t* rows;

    const uint8_t* row(int64_t index, int64_t row_bytes) const {
        int64_t piece = 0;
        for (; index >= rows[piece]; piece++) index -= rows[piece];
        return at[piece] + index * row_bytes;
    }
};

template <class F>
int pack(uint8_t* packed, const RowPieces& pieces, int64_t n, int64_t k) {
    if (k % F::kValues) return kOutOfRange;
    const GroupShape a = shape_of<F>(n, k);
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads_for(n * k))
    for (int64_t panel = 0; panel < a.panels(); panel++) {
        const uint8_t* rows[kPanel];
        const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, n - first);
        for (int64_t c = 0; c < count; c++) rows[c] = pieces.row(first + c, k / F::kValues * F::kBytes);
        pack_rows<F>(packed + panel * a.panel_bytes(), rows, count, k);
    }
    return kOk;
}

}  // namespace

// What vllm_pack_groups makes of a weight [n, k], of its blocks. pieces, rows: where its rows lie, one piece behind the other, and how
// many lie there. type: GGUF's number of the block format. Returns kOk, kUnknownType, or kOutOfRange for a k that is not whole blocks.
VLLM_API int vllm_pack_blocks(void* packed, const uint8_t* const* pieces, const int64_t* rows, int64_t n, int64_t k, int32_t type) {
    auto* to = (uint8_t*)packed;
    const RowPieces from = {pieces, rows};
    switch (type) {
        case 2: return pack<Q4_0>(to, from, n, k);
        case 8: return pack<Q8_0>(to, from, n, k);
        case 12: return pack<Q4_K>(to, from, n, k);
        case 13: return pack<Q5_K>(to, from, n, k);
        case 14: return pack<Q6_K>(to, from, n, k);
        default: return kUnknownType;
    }
}
