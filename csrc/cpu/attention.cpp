// Paged attention for mixed batches: decode, prefill and anything between, over the cache [blocks, 2, kv_heads, block_size, head_dim].
//
// The query heads that share a kv head are extra query rows. A task is a tile of rows of one request and one kv head; it walks
// the keys in chunks with an online softmax. Every kSegment keys the running sums are merged into a total and started anew, so
// that a long request's segments can run on several threads and be merged afterwards with the same arithmetic. Chunks and
// segments begin at fixed positions of the sequence: a token's result depends on its own request up to that token only - not
// on the batch, on how its prompt was cut into chunks, or on the number of threads.
#include <algorithm>

#include "kernels.h"
#include "scratch.h"
#include "simd.h"
#include "transpose.h"

namespace {

constexpr int kChunk = 128;      // keys whose scores are held at once
constexpr int kSegment = 1024;   // keys between two merges
constexpr int kTileRows = 64;    // query rows of a task, if one token has no more
constexpr float kMasked = -1e30f;
constexpr float kLog2E = 1.44269504088896341f;

#if defined(__AVX512F__)
constexpr int kRows = 6, kValueVectors = 4;  // register tile: rows, and vectors of the value product
#elif defined(__AVX2__)
constexpr int kRows = 4, kValueVectors = 2;
#else
constexpr int kRows = 4, kValueVectors = 2;
#endif
constexpr int kKeyVectors = 2;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A step along head_dim (scores) or along keys (values) of the two products: one number in fp32 ...
template <class Cache>
struct FloatMath {
    using Element = float;
    using Stored = Cache;
    static constexpr int kStep = 1;
    static vf multiply(vf sum, const float* row, const Element* column) { return fma(splat(*row), load(column), sum); }
    static vf load_keys(const Stored* key, int64_t count) { return count >= W ? load(key) : load_part(key, count); }
    static void store_value(Element* to, const Stored* const* values, int64_t head_dim) {
        for_each_vector(head_dim, [&](int64_t i, int64_t n) { store(to + i, load_some(values[0] + i, n)); });
    }
    // Makes zero what lies outside of [first, last], counted from the step's own first number.
    static void clip(Element*, int64_t, int64_t) {}
};

#if defined(__AVX512BF16__)
struct Pair {
    bf16 low, high;
};

// ... or a pair of bf16 numbers.
struct DotMath {
    using Element = Pair;
    using Stored = bf16;
    static constexpr int kStep = 2;
    static vf multiply(vf sum, const Pair* row, const Element* column) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(bit_cast<int32_t>(*row)),
                                    (__m512bh)_mm512_loadu_si512(column));
    }
    static vf load_keys(const bf16* key, int64_t count) {
        if (count >= 2 * W) return load((const float*)key);
        bf16 lanes[2 * W] = {};
        std::memcpy(lanes, key, size_t(count) * sizeof(bf16));
        return load((const float*)lanes);
    }
    static void store_value(Element* to, const bf16* const* values, int64_t head_dim) {
        for_each_vector(head_dim, [&](int64_t i, int64_t n) {
            bf16 low[W] = {}, high[W] = {};
            const bf16 *a = values[0] + i, *b = values[1] + i;
            if (n < W) {
                std::memcpy(low, a, size_t(n) * sizeof(bf16));
                std::memcpy(high, b, size_t(n) * sizeof(bf16));
                a = low, b = high;
            }
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
            _mm512_storeu_si512(to + i, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        });
    }
    static void clip(Element* values, int64_t first, int64_t last) {
        for (int i = 0; i < W; i++) {
            if (first > 0) values[i].low = bf16{};
            if (last < 1) values[i].high = bf16{};
        }
    }
};
#endif

// How many elements and steps a task's buffers need.
template <class Math>
struct Shape {
    int64_t head_dim;     // as in the cache
    int64_t padded_dim;   // columns of the output sums: whole vectors
    int64_t key_steps;    // steps along head_dim, whole transposes
    explicit Shape(int64_t dim)
        : head_dim(dim), padded_dim(round_up(dim, W)), key_steps(round_up((dim + Math::kStep - 1) / Math::kStep, W)) {}
};

// The running softmax of some rows, in powers of two: with t = score * log2(e), out = sum 2^(t - max) v and
// weight = sum 2^(t - max), the latter as W partial sums that are added up at the very end.
struct Sums {
    float* out;     // [rows, padded_dim]
    float* max;     // [rows]
    float* weight;  // [rows, W]
    static int64_t floats(int64_t rows, int64_t padded_dim) { return rows * (padded_dim + W) + round_up(rows, W); }
    Sums(float* memory, int64_t rows, int64_t padded_dim)
        : out(memory), max(memory + rows * padded_dim), weight(max + round_up(rows, W)) {}
    void clear(int64_t rows, int64_t padded_dim) const {
        std::fill_n(out, rows * padded_dim, 0.0f);
        std::fill_n(max, rows, kMasked);
        std::fill_n(weight, rows * W, 0.0f);
    }
    // Adds what another range of keys gave. A range without a visible key changes nothing, exactly.
    void merge(const Sums& other, int64_t rows, int64_t padded_dim) const {
        for (int64_t r = 0; r < rows; r++) {
            const float top = std::max(max[r], other.max[r]);
            const vf mine = vexp2_negative(splat(max[r] - top)), theirs = vexp2_negative(splat(other.max[r] - top));
            for (int64_t i = 0; i < padded_dim; i += W) {
                float* at = out + r * padded_dim + i;
                store(at, load(at) * mine + load(other.out + r * padded_dim + i) * theirs);
            }
            store(weight + r * W, load(weight + r * W) * mine + load(other.weight + r * W) * theirs);
            max[r] = top;
        }
    }
};

// A thread's buffers for one tile.
template <class Math>
struct Workspace {
    using Element = typename Math::Element;
    Element* keys;    // [key_steps, kChunk]
    Element* values;  // [kChunk / kStep, padded_dim]
    Element* q;       // [rows + kRows, key_steps]
    float* scores;    // [kRows, kChunk]
    Element* probs;   // [kRows, kChunk / kStep]
    float* partial;   // Sums
    float* total;     // Sums
    const typename Math::Stored** key_rows;  // [2 kChunk]: where the chunk at hand and the next one lie
    typename Math::Stored* zeros;              // [head_dim]

    static constexpr int64_t kAlign = 64;

    // Lays the buffers out from `memory`, or only counts when it is null.
    static int64_t layout(Workspace* w, char* memory, const Shape<Math>& shape, int64_t rows) {
        int64_t used = 0;
        auto take = [&](auto*& pointer, int64_t count) {
            using T = std::remove_reference_t<decltype(*pointer)>;
            pointer = memory ? (T*)(memory + used) : nullptr;
            used += round_up(count * int64_t(sizeof(T)), kAlign);
        };
        take(w->keys, shape.key_steps * kChunk);
        take(w->values, kChunk / Math::kStep * shape.padded_dim);
        take(w->q, (rows + kRows) * shape.key_steps);
        take(w->scores, kRows * kChunk);
        take(w->probs, kRows * kChunk / Math::kStep);
        take(w->partial, Sums::floats(rows + kRows, shape.padded_dim));
        take(w->total, Sums::floats(rows + kRows, shape.padded_dim));
        take(w->key_rows, 2 * kChunk);
        take(w->zeros, shape.head_dim);
        return used;
    }
};

template <class Math>
class Attention {
  public:
    using Element = typename Math::Element;
    using Stored = typename Math::Stored;

    Attention(const AttentionCall& call, const Workspace<Math>& buffers)
        : c_(call), w_(buffers), shape_(call.head_dim), group_(call.heads / call.kv_heads) {}

    // Sums over the keys [begin, end) of a segment, into `sums`. then: the tile that this thread may compute after `tile`, or null;
    // its first chunk is asked for meanwhile.
    void segment(const Tile& tile, int64_t begin, int64_t end, const Sums& sums, const Tile* then) {
        sums.clear(tile.rows, shape_.padded_dim);
        const Stored **here = w_.key_rows, **next = w_.key_rows + kChunk;
        locate(tile, begin / kChunk * kChunk, end, here);
        for (int64_t chunk = begin / kChunk * kChunk; chunk < end; chunk += kChunk, std::swap(here, next)) {
            const int64_t keys = std::min<int64_t>(kChunk, end - chunk);
            // The last chunk of a segment asks for the first of the next one, whoever computes it; that of a tile for the next tile's.
            const bool last = chunk + kChunk >= tile.end;
            if (!last) {
                locate(tile, chunk + kChunk, tile.end, next);
            } else if (then) {
                locate(*then, then->begin / kChunk * kChunk, then->end, next);
            }
            load_chunk(keys, here, last && !then ? nullptr : next);
            // Zero times what is no number is none: where rows see different keys, those that one does not see must not be touched.
            const bool differ = tile.tokens > 1 && (c_.window || position(tile, 0) < chunk + keys - 1);
            careful_ = differ && !values_are_finite(round_up(keys, kKeyVectors * W));
            // Groups of rows that differ by at most one: a group of one or two would not keep the arithmetic units busy.
            const int64_t groups = (tile.rows + kRows - 1) / kRows;
            for (int64_t g = 0; g < groups; g++) {
                const int64_t row = tile.rows * g / groups;
                with_rows<kRows>(tile.rows * (g + 1) / groups - row, [&](auto rows) {
                    chunk_rows<decltype(rows)::value>(tile, row, chunk, keys, sums);
                });
            }
        }
    }

    // The tile's queries, as the products want them. The first to be called for a claimed piece: before that, other threads may be
    // elsewhere already and use this memory.
    void load_queries(const Tile& tile) {
        std::fill_n(w_.zeros, c_.head_dim, Stored{});
        std::fill_n((float*)w_.q, (tile.rows + kRows) * shape_.key_steps, 0.0f);
        for (int64_t row = 0; row < tile.rows; row++) {
            const int64_t at = query_offset(tile, row, c_.q_stride);
            if (c_.dtype == kFloat32) {
                load_query(w_.q + row * shape_.key_steps, (const float*)c_.q + at);
            } else if (c_.dtype == kBFloat16) {
                load_query(w_.q + row * shape_.key_steps, (const bf16*)c_.q + at);
            } else {
                load_query(w_.q + row * shape_.key_steps, (const f16*)c_.q + at);
            }
        }
    }

    void write_out(const Tile& tile, const Sums& sums) {
        for (int64_t row = 0; row < tile.rows; row++) {
            const int64_t at = query_offset(tile, row, c_.heads * c_.head_dim);
            const float weight = sum_lanes(load(sums.weight + row * W));
            const float scale = weight > 0.0f ? c_.v_scale / weight : 0.0f;
            with_type(c_.dtype, [&](auto type) {
                auto* out = (decltype(type)*)c_.out + at;
                for_each_vector(c_.head_dim, [&](int64_t i, int64_t n) {
                    store_some(out + i, load(sums.out + row * shape_.padded_dim + i) * scale, n);
                });
            });
        }
    }

    // A whole tile: its segments in order. then: as in `segment`.
    void tile(const Tile& tile, const Tile* then) {
        load_queries(tile);
        const Sums partial(w_.partial, tile.rows, shape_.padded_dim), total(w_.total, tile.rows, shape_.padded_dim);
        total.clear(tile.rows, shape_.padded_dim);
        for (int64_t begin = tile.begin; begin < tile.end;) {
            const int64_t end = std::min(tile.end, (begin / kSegment + 1) * kSegment);
            segment(tile, begin, end, partial, then);
            total.merge(partial, tile.rows, shape_.padded_dim);
            begin = end;
        }
        write_out(tile, total);
    }

  private:
    template <int N, class Body>
    static void with_rows(int64_t rows, Body&& body) {
        if constexpr (N > 0) {
            if (rows == N) {
                body(std::integral_constant<int, N>{});
            } else {
                with_rows<N - 1>(rows, body);
            }
        }
    }

    // Row r of a tile is query head r % group of token r / group.
    int64_t query_offset(const Tile& tile, int64_t row, int64_t stride) const {
        const int64_t token = c_.query_starts[tile.request] + tile.first + row / group_;
        return token * stride + (tile.kv_head * group_ + row % group_) * c_.head_dim;
    }

    int64_t position(const Tile& tile, int64_t row) const {
        const int64_t queries = c_.query_starts[tile.request + 1] - c_.query_starts[tile.request];
        return c_.seq_lens[tile.request] - queries + tile.first + row / group_;
    }

    template <class T>
    void load_query(Element* to, const T* from) {
        if constexpr (Math::kStep == 2) {
            // Only bf16 queries take the bf16 products.
            std::memcpy((void*)to, (const void*)from, size_t(c_.head_dim) * sizeof(bf16));
        } else {
            for_each_vector(c_.head_dim, [&](int64_t i, int64_t n) { store(to + i, load_some(from + i, n)); });
        }
    }

    // Where the keys of the chunk lie; those outside [tile.begin, end) are zeros. Before the window the table may name the null
    // block, whose contents are not numbers.
    void locate(const Tile& tile, int64_t chunk, int64_t end, const Stored** rows) const {
        const int32_t* table = c_.block_table + tile.request * c_.table_stride;
        const Stored* base = (const Stored*)c_.cache + tile.kv_head * c_.block_size * c_.head_dim;
        const int64_t first = std::clamp<int64_t>(tile.begin - chunk, 0, kChunk);
        const int64_t last = std::clamp<int64_t>(end - chunk, first, kChunk);
        std::fill(rows, rows + first, w_.zeros);
        int64_t block = (chunk + first) / c_.block_size, slot = (chunk + first) % c_.block_size;
        for (int64_t i = first; i < last; block++, slot = 0) {
            const Stored* at = base + table[block] * c_.block_stride + slot * c_.head_dim;
            const int64_t stop = std::min(last, i + c_.block_size - slot);
            for (; i < stop; i++, at += c_.head_dim) rows[i] = at;
        }
        std::fill(rows + last, rows + kChunk, w_.zeros);
    }

    const Stored* value_of(const Stored* key) const {
        return key == w_.zeros ? key : key + c_.kv_heads * c_.block_size * c_.head_dim;
    }

    void prefetch(const Stored* row) const {
        for (int64_t byte = 0; byte < c_.head_dim * int64_t(sizeof(Stored)); byte += 64) {
            __builtin_prefetch((const char*)row + byte, 0, 2);
        }
    }

    // Copies a chunk's keys transposed and its values, both as the products want them; meanwhile asks for the next chunk's, if any.
    void load_chunk(int64_t keys, const Stored* const* here, const Stored* const* next) {
        const int64_t padded = round_up(keys, kKeyVectors * W);
        const int64_t asked = next ? kChunk * W / padded : 0;  // keys of the next chunk, for each vector of this one's
        for (int64_t key = 0; key < padded; key += W) {
            for (int64_t i = 0; i < asked; i++) prefetch(next[key / W * asked + i]);
            for (int64_t step = 0; step < shape_.key_steps; step += W) {
                const int64_t left = c_.head_dim - step * Math::kStep;
                vf rows[W];
                for (int i = 0; i < W; i++) rows[i] = Math::load_keys(here[key + i] + step * Math::kStep, left);
                transpose(rows);
                for (int i = 0; i < W; i++) store((float*)(w_.keys + (step + i) * kChunk + key), rows[i]);
            }
        }
        for (int64_t key = 0; key < padded; key += Math::kStep) {
            const Stored* values[Math::kStep];
            for (int i = 0; i < Math::kStep; i++) {
                values[i] = value_of(here[key + i]);
            }
            if (key % W == 0) {
                for (int64_t i = 0; i < asked; i++) prefetch(value_of(next[key / W * asked + i]));
            }
            Math::store_value(w_.values + key / Math::kStep * shape_.padded_dim, values, c_.head_dim);
        }
    }

    // Scores, softmax and the weighted sum of values for `Rows` rows against the loaded chunk.
    template <int Rows>
    void chunk_rows(const Tile& tile, int64_t row, int64_t chunk, int64_t keys, const Sums& sums) {
        const int64_t padded = round_up(keys, kKeyVectors * W);
        const Element* q = w_.q + row * shape_.key_steps;
        const int64_t steps = (c_.head_dim + Math::kStep - 1) / Math::kStep;
        for (int64_t key = 0; key < padded; key += kKeyVectors * W) {
            vf sum[Rows][kKeyVectors] = {};
            const Element* column = w_.keys + key;
            for (int64_t s = 0; s < steps; s++, column += kChunk) {
                for (int r = 0; r < Rows; r++) {
                    for (int v = 0; v < kKeyVectors; v++) {
                        sum[r][v] = Math::multiply(sum[r][v], q + r * shape_.key_steps + s, column + v * W);
                    }
                }
            }
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kKeyVectors; v++) store(w_.scores + r * kChunk + key + v * W, sum[r][v]);
            }
        }
        float decay[W];
        softmax_rows<Rows>(tile, row, chunk, padded, decay, sums);
        if (careful_) {
            for (int r = 0; r < Rows; r++) add_seen_values(tile, row, r, chunk, keys, decay[r], sums);
            return;
        }
        int64_t column = 0;
        for (; column + kValueVectors * W <= shape_.padded_dim; column += kValueVectors * W) {
            add_values<Rows, kValueVectors>(row, column, padded, decay, sums);
        }
        for (; column < shape_.padded_dim; column += W) add_values<Rows, 1>(row, column, padded, decay, sums);
    }

    template <int Rows, int Vectors>
    void add_values(int64_t row, int64_t column, int64_t padded, const float* decay, const Sums& sums) {
        vf sum[Rows][Vectors];
        float* out = sums.out + row * shape_.padded_dim + column;
        for (int r = 0; r < Rows; r++) {
            for (int v = 0; v < Vectors; v++) sum[r][v] = load(out + r * shape_.padded_dim + v * W) * decay[r];
        }
        const Element* values = w_.values + column;
        for (int64_t s = 0; s < padded / Math::kStep; s++, values += shape_.padded_dim) {
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < Vectors; v++) {
                    sum[r][v] = Math::multiply(sum[r][v], w_.probs + r * (kChunk / Math::kStep) + s, values + v * W);
                }
            }
        }
        for (int r = 0; r < Rows; r++) {
            for (int v = 0; v < Vectors; v++) store(out + r * shape_.padded_dim + v * W, sum[r][v]);
        }
    }

    bool values_are_finite(int64_t padded) const {
        const Element zero{};
        constexpr int kSums = 4;  // independent, so that none waits for another
        vf sums[kSums] = {};
        const int64_t count = padded / Math::kStep * shape_.padded_dim;  // padded / kStep is a multiple of kSums
        for (int64_t i = 0; i < count; i += kSums * W) {
            for (int k = 0; k < kSums; k++) sums[k] = Math::multiply(sums[k], &zero, w_.values + i + k * W);
        }
        return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) == 0.0f;
    }

    // `add_values` for row `row + r`, with the same roundings, of the values that it sees and no others.
    void add_seen_values(const Tile& tile, int64_t row, int r, int64_t chunk, int64_t keys, float decay, const Sums& sums) {
        const Range seen = visible(tile, row + r, chunk);
        const int64_t last = std::min<int64_t>(seen.last, keys - 1);
        const Element* probs = w_.probs + r * (kChunk / Math::kStep);
        for (int64_t column = 0; column < shape_.padded_dim; column += W) {
            float* out = sums.out + (row + r) * shape_.padded_dim + column;
            vf sum = load(out) * decay;
            for (int64_t key = seen.first / Math::kStep * Math::kStep; key <= last; key += Math::kStep) {
                Element values[W];
                std::copy_n(w_.values + key / Math::kStep * shape_.padded_dim + column, W, values);
                Math::clip(values, seen.first - key, last - key);
                sum = Math::multiply(sum, probs + key / Math::kStep, values);
            }
            store(out, sum);
        }
    }

    // The keys of a chunk that a row sees: [first, last].
    struct Range {
        int32_t first, last;
        bool all(int64_t padded) const { return first <= 0 && last >= padded - 1; }
        vf select(int64_t key, vf yes, vf no) const {
            const vi number = lane_numbers() + int32_t(key);
            return ((number >= splat_int(first)) & (number <= splat_int(last))) ? yes : no;
        }
    };

    Range visible(const Tile& tile, int64_t row, int64_t chunk) const {
        const int64_t last = position(tile, row) - chunk, first = c_.window ? last - c_.window + 1 : 0;
        return {int32_t(std::clamp<int64_t>(first, 0, kChunk)), int32_t(std::clamp<int64_t>(last, -1, kChunk))};
    }

    // Turns raw products into probabilities relative to each row's new maximum. decay: what its old sums are worth under it.
    template <int Rows>
    void softmax_rows(const Tile& tile, int64_t row, int64_t chunk, int64_t padded, float* decay, const Sums& sums) {
        static_assert(Rows <= W, "the rows' decays are computed as one vector");
        const bool plain = c_.softcap <= 0.0f && !c_.alibi_slopes;
        // With a soft-cap or ALiBi `scores` is rewritten to final values in powers of two, and the factor is 1.
        const float factor = plain ? c_.scale * kLog2E : 1.0f;
        Range range[Rows];
        float old[W] = {}, now[W] = {};
        for (int r = 0; r < Rows; r++) {
            float* scores = w_.scores + r * kChunk;
            range[r] = visible(tile, row + r, chunk);
            if (!plain) cap_and_bias(tile, row + r, chunk, padded, scores);
            vf top = splat(kMasked);
            if (range[r].all(padded)) {
                for (int64_t i = 0; i < padded; i += W) top = vmax(top, load(scores + i));
            } else {
                for (int64_t i = 0; i < padded; i += W) top = vmax(top, range[r].select(i, load(scores + i), splat(kMasked)));
            }
            old[r] = sums.max[row + r];
            now[r] = range[r].last < range[r].first ? old[r] : std::max(old[r], max_lanes(top) * factor);
            sums.max[row + r] = now[r];
        }
        store(decay, vexp2_negative(load(old) - load(now)));
        for (int r = 0; r < Rows; r++) {
            const float* scores = w_.scores + r * kChunk;
            auto* probs = (Prob*)(w_.probs + r * (kChunk / Math::kStep));
            vf total = load(sums.weight + (row + r) * W) * decay[r];
            if (range[r].all(padded)) {
                for (int64_t i = 0; i < padded; i += W) {
                    const vf p = vexp2_negative(fma(load(scores + i), splat(factor), splat(-now[r])));
                    total += p;
                    store(probs + i, p);
                }
            } else {
                for (int64_t i = 0; i < padded; i += W) {
                    const vf p = vexp2_negative(fma(load(scores + i), splat(factor), splat(-now[r])));
                    const vf seen = range[r].select(i, p, vf{});
                    total += seen;
                    store(probs + i, seen);
                }
            }
            store(sums.weight + (row + r) * W, total);
        }
    }

    void cap_and_bias(const Tile& tile, int64_t row, int64_t chunk, int64_t padded, float* scores) const {
        const float slope = c_.alibi_slopes ? c_.alibi_slopes[tile.kv_head * group_ + row % group_] : 0.0f;
        const int32_t at = int32_t(position(tile, row) - chunk);
        for (int64_t i = 0; i < padded; i += W) {
            vf s = load(scores + i) * c_.scale;
            if (c_.softcap > 0.0f) s = c_.softcap * vtanh(s / c_.softcap);
            if (c_.alibi_slopes) s += slope * __builtin_convertvector(lane_numbers() + (int32_t(i) - at), vf);
            store(scores + i, s * kLog2E);
        }
    }

    using Prob = std::conditional_t<Math::kStep == 2, bf16, float>;

    const AttentionCall& c_;
    const Workspace<Math>& w_;
    const Shape<Math> shape_;
    const int64_t group_;
    bool careful_ = false;  // the chunk at hand has values that are not finite, and not every row sees all keys
};

int64_t segments_of(const Tile& tile) {
    return tile.end == 0 ? 0 : (tile.end - 1) / kSegment - tile.begin / kSegment + 1;
}

// A thread's part of the scratch memory, and the sums of one tile's part.
template <class Math>
int64_t workspace_bytes(const Shape<Math>& shape, int64_t max_rows) {
    Workspace<Math> counted;
    return round_up(Workspace<Math>::layout(&counted, nullptr, shape, max_rows), 4096);
}

template <class Math>
int64_t part_floats(const Shape<Math>& shape, int64_t max_rows) {
    return Sums::floats(max_rows + kRows, shape.padded_dim);
}

template <class Math>
void run(Team& team, const AttentionCall& c, const AttentionPlan& plan, char* scratch) {
    const Shape<Math> shape(c.head_dim);
    const int64_t bytes = workspace_bytes(shape, plan.max_rows), floats = part_floats(shape, plan.max_rows);
    float* sums = (float*)(scratch + bytes * team.threads());
    Workspace<Math> w;
    Workspace<Math>::layout(&w, scratch + bytes * team.thread(), shape, plan.max_rows);
    Attention<Math> attention(c, w);
    auto sums_of = [&](int64_t part, const Tile& tile) { return Sums(sums + part * floats, tile.rows, shape.padded_dim); };
    if (plan.parts.empty()) {
        const int64_t tiles = int64_t(plan.tiles.size());
        team.share(tiles, 1, [&](int64_t t, int64_t) {
            // A tile of many rows computes long enough as it is.
            const Tile& tile = plan.tiles[size_t(t)];
            const int64_t then = t + team.threads();
            attention.tile(tile, then < tiles && tile.rows < kTileRows / 2 ? &plan.tiles[size_t(then)] : nullptr);
        });
        return;
    }
    team.share(int64_t(plan.parts.size()), 1, [&](int64_t p, int64_t) {
        const TilePart& part = plan.parts[size_t(p)];
        const Tile& tile = plan.tiles[size_t(part.tile)];
        attention.load_queries(tile);
        attention.segment(tile, part.begin, part.end, sums_of(p, tile), nullptr);
    });
    team.share(int64_t(plan.tiles.size()), 1, [&](int64_t t, int64_t) {
        const Tile& tile = plan.tiles[size_t(t)];
        const Sums total(w.total, tile.rows, shape.padded_dim);
        total.clear(tile.rows, shape.padded_dim);
        for (int64_t p = plan.first_part[size_t(t)]; p < plan.first_part[size_t(t) + 1]; p++) {
            total.merge(sums_of(p, tile), tile.rows, shape.padded_dim);
        }
        attention.write_out(tile, total);
    });
}

// Calls body with the arithmetic that the call's types take.
template <class Body>
bool with_math(const AttentionCall& c, Body&& body) {
    if (c.dtype < kFloat32 || c.dtype > kFloat16) return false;
#if defined(__AVX512BF16__)
    if (c.dtype == kBFloat16 && c.cache_dtype == kBFloat16) {
        body(DotMath{});
        return true;
    }
#endif
    return with_cache_type(c.cache_dtype, [&](auto type) { body(FloatMath<decltype(type)>{}); });
}

}  // namespace

AttentionPlan plan_attention(const AttentionCall& c, int threads) {
    const int64_t group = c.heads / c.kv_heads, tile_tokens = std::max<int64_t>(1, kTileRows / group);
    AttentionPlan plan;
    int64_t segments = 0;
    for (int64_t r = 0; r < c.requests; r++) {
        const int64_t queries = c.query_starts[r + 1] - c.query_starts[r], before = c.seq_lens[r] - queries;
        for (int64_t first = 0; first < queries; first += tile_tokens) {
            const int64_t tokens = std::min(tile_tokens, queries - first), end = before + first + tokens;
            const int64_t begin = c.window ? std::max<int64_t>(0, before + first - c.window + 1) : 0;
            const Tile tile = {r, 0, first, tokens, begin, end, tokens * group};
            for (int64_t h = 0; h < c.kv_heads; h++) {
                plan.tiles.push_back(tile);
                plan.tiles.back().kv_head = h;
            }
            plan.max_rows = std::max(plan.max_rows, tile.rows);
            plan.cost += tile.cost() * c.kv_heads;
            segments = std::max(segments, segments_of(tile));
        }
    }
    // The longest first, so that threads finish together.
    std::stable_sort(plan.tiles.begin(), plan.tiles.end(), [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });
    if (segments <= 1 || int64_t(plan.tiles.size()) >= 4 * threads) return plan;
    // Few long tiles: every segment of every tile is a task of its own, merged afterwards.
    for (size_t t = 0; t < plan.tiles.size(); t++) {
        plan.first_part.push_back(int64_t(plan.parts.size()));
        for (int64_t begin = plan.tiles[t].begin; begin < plan.tiles[t].end;) {
            const int64_t end = std::min(plan.tiles[t].end, (begin / kSegment + 1) * kSegment);
            plan.parts.push_back({int64_t(t), begin, end});
            begin = end;
        }
    }
    plan.first_part.push_back(int64_t(plan.parts.size()));
    return plan;
}

size_t attention_scratch_bytes(const AttentionCall& call, const AttentionPlan& plan, int threads) {
    size_t bytes = 0;
    with_math(call, [&](auto math) {
        const Shape<decltype(math)> shape(call.head_dim);
        bytes = size_t(workspace_bytes(shape, plan.max_rows) * threads +
                       int64_t(plan.parts.size()) * part_floats(shape, plan.max_rows) * int64_t(sizeof(float)));
    });
    return bytes;
}

bool attend(Team& team, const AttentionCall& call, const AttentionPlan& plan, void* scratch) {
    return with_math(call, [&](auto math) { run<decltype(math)>(team, call, plan, (char*)scratch); });
}

// Causal: the last of a request's query tokens sits at seq_len - 1. Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_attend(const AttentionCall* call) {
    return guarded([&] {
        thread_local Scratch scratch;
        const AttentionPlan plan = plan_attention(*call, omp_get_max_threads());
        if (plan.tiles.empty()) return kOk;
        const int threads = threads_for(plan.cost * call->head_dim);
        void* memory = scratch.reserve(attention_scratch_bytes(*call, plan, threads));
        return run_kernel(threads, 2, [&](Team& team) { return attend(team, *call, plan, memory); });
    });
}
