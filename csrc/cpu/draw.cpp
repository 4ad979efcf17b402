// One token per row of logits: temperature, min-p, top-k, top-p and the draw, to the letter of vllm/worker/sample/draw.py.
//
// Mass is counted in integers, as there: multiples of 2^-40 of the most likely token. Their sums do not depend on an order, so a
// row's token is the same in any batch and with any number of threads.
//
// Logits are read once to find the maximum of each group of neighbours. The k-th largest of these maxima bounds the k-th largest logit
// from below, so that the first k stand in few groups, and only these are looked at again. Without top-k a second pass sums all
// masses, and a nucleus is sought in the groups of the largest maxima first. One that reaches further is found by counting the row's
// logits in buckets by their distance from the largest, and looking closely at one bucket.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "scratch.h"
#include "simd.h"

namespace {

constexpr int64_t kGroup = 128;
constexpr int64_t kChunk = 32 * kGroup;  // masses are summed by chunks; 32-bit lanes hold that many
constexpr int64_t kNucleusGroups = 64;   // a nucleus is sought in this many groups first
constexpr float kReach = 28.0f;          // beyond 40 ln 2 = 27.7 below the largest logit a token has no mass
constexpr float kBucketsPerNat = 16.0f;
constexpr int64_t kBuckets = 512;  // those without mass are in the last

// The order of floats as that of unsigned integers; both zeros are one number.
uint32_t key_of(float y) {
    const uint32_t bits = bit_cast<uint32_t>(y + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float from_key(uint32_t key) { return bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Bit i: v[i] >= bound.
uint32_t lanes_at_least(vf v, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)(v >= splat(bound))));
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= uint32_t(v[i] >= bound) << i;
    return bits;
#endif
}

// The first n lanes of v; the others are -infinity.
vf first_lanes(vf v, int64_t n) { return n == W ? v : lane_numbers() < splat_int(int32_t(n)) ? v : splat(-INFINITY); }

int64_t mass_of(float weight) { return int64_t(weight * 0x1p40f); }

// The sum of mass_of over up to kChunk weights of at most 1, in halves of 20 bits each.
class MassSum {
  public:
    void add(vf weight) {
        const vf scaled = weight * 0x1p20f;
        const vi whole = __builtin_convertvector(scaled, vi);
        high_ += whole;
        low_ += __builtin_convertvector((scaled - __builtin_convertvector(whole, vf)) * 0x1p20f, vi);
    }

    int64_t total() const {
        int64_t high = 0, low = 0;
        for (int i = 0; i < W; i++) high += high_[i], low += low_[i];
        return (high << 20) + low;
    }

  private:
    vi high_ = {}, low_ = {};
};

// One row and what is asked of it. A token's y is its logit divided by the temperature.
template <class T>
struct Row {
    const T* logits;
    int64_t vocab, top_k;  // top_k: 0 for off
    float temperature, min_p, top_p, uniform;
    float* tops;  // [groups] the largest y of each
    float peak;   // the largest y

    int64_t groups() const { return (vocab + kGroup - 1) / kGroup; }
    int64_t size_of(int64_t group) const { return std::min(kGroup, vocab - group * kGroup); }
    float lowest() const { return peak - kReach; }  // nothing below has mass

    // y of the n <= W tokens from i; the other lanes are -infinity.
    vf scaled(int64_t i, int64_t n) const {
        return first_lanes(load_some(logits + i, n) / splat(temperature), n);
    }

    // The probability relative to the most likely token; 0 below min_p. Never above 1, not even for NaN.
    vf weight(vf y) const {
        const vf w = vexp(vmin(y - splat(peak), vf{}));
        return w >= splat(min_p) ? w : vf{};
    }

    int64_t mass(float y) const { return mass_of(weight(splat(y))[0]); }

    // The distance from the largest y in buckets; the bucket is its whole part.
    vf distance(vf y) const {
        const vf exact = (splat(peak) - y) * splat(kBucketsPerNat);
        return vmax(vmin(exact, splat(kBuckets - 1)), vf{});
    }

    // Calls body(i, n) for the vectors of a group; i counts from the beginning of the row.
    template <class Body>
    void each_vector(int64_t group, Body&& body) const {
        const int64_t begin = group * kGroup;
        for_each_vector(size_of(group), [&](int64_t i, int64_t n) { body(begin + i, n); });
    }
};

// A thread's working memory: tokens in ascending order of their ids.
struct Tokens {
    float* y;
    int32_t* ids;
    uint32_t* keys;
    int64_t* masses;
    int64_t count = 0;

    static size_t bytes(int64_t vocab) { return size_t(padded(vocab)) * 20; }

    Tokens(char* memory, int64_t vocab) {
        const int64_t room = padded(vocab);
        masses = (int64_t*)memory;
        y = (float*)(masses + room);
        ids = (int32_t*)(y + room);
        keys = (uint32_t*)(ids + room);
    }

    // Appends the tokens from `first` whose bits are set.
    void put_lanes(vf values, int64_t first, uint32_t lanes) {
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            y[count] = values[lane];
            ids[count++] = int32_t(first + lane);
        }
    }

    // Fills in keys and masses.
    template <class T>
    void weigh(const Row<T>& row) {
        for (int64_t i = 0; i < count; i += W) {
            const vf w = row.weight(load(y + i));
            for (int64_t j = 0; j < std::min<int64_t>(W, count - i); j++) {
                masses[i + j] = mass_of(w[j]);
                keys[i + j] = key_of(y[i + j]);
            }
        }
    }

    int64_t mass() const {
        int64_t sum = 0;
        for (int64_t i = 0; i < count; i++) sum += masses[i];
        return sum;
    }

  private:
    static int64_t padded(int64_t vocab) { return (vocab + 2 * W - 1) / W * W; }
};

// A prefix of the order (y descending, id ascending): all above `edge`, and of those equal to it the first `ties`.
struct Cut {
    float edge = -INFINITY;
    int64_t ties = 0;
    int64_t mass = 0;  // of the tokens it was made from
};

// The largest key such that it and all above weigh `needed` or more, and what those above it weigh. needed: at most what all weigh.
struct Edge {
    uint32_t key;
    int64_t above;
};

template <class Weight>
Edge edge_of(const uint32_t* keys, int64_t count, int64_t needed, Weight&& weight) {
    uint32_t all = ~0u, any = 0;
    for (int64_t i = 0; i < count; i++) all &= keys[i], any |= keys[i];
    int shift = 0;  // keys differ below this bit
    while (shift < 32 && (uint64_t(all ^ any) >> shift)) shift++;
    uint64_t prefix = uint64_t(any) >> shift << shift;
    int64_t above = 0;
    while (shift > 0) {
        const int width = std::min(shift, 8), before = shift;
        shift -= width;
        int64_t sums[256] = {};
        for (int64_t i = 0; i < count; i++) {
            if (((keys[i] ^ prefix) >> before) == 0) sums[(keys[i] >> shift) & ((1u << width) - 1)] += weight(i);
        }
        int64_t digit = (1 << width) - 1;
        for (; digit > 0 && above + sums[digit] < needed; digit--) above += sums[digit];
        prefix |= uint64_t(digit) << shift;
    }
    return {uint32_t(prefix), above};
}

int64_t mass_above(const Tokens& tokens, uint32_t key) {
    int64_t sum = 0;
    for (int64_t i = 0; i < tokens.count; i++) sum += tokens.keys[i] > key ? tokens.masses[i] : 0;
    return sum;
}

// The first `needed` tokens; needed: from 1 to all.
template <class T>
Cut cut_by_count(const Row<T>& row, const Tokens& tokens, int64_t needed) {
    const Edge edge = edge_of(tokens.keys, tokens.count, needed, [](int64_t) { return int64_t(1); });
    const float y = from_key(edge.key);
    const int64_t ties = needed - edge.above;
    return {y, ties, mass_above(tokens, edge.key) + ties * row.mass(y)};
}

// The shortest prefix that weighs `needed` or more; needed: from 1 to the mass of all.
template <class T>
Cut cut_by_mass(const Row<T>& row, const Tokens& tokens, int64_t needed) {
    const Edge edge = edge_of(tokens.keys, tokens.count, needed, [&](int64_t i) { return tokens.masses[i]; });
    const float y = from_key(edge.key);
    const int64_t each = std::max<int64_t>(1, row.mass(y)), ties = (needed - edge.above + each - 1) / each;
    return {y, ties, edge.above + ties * each};
}

// The mass that a nucleus must reach: never more than there is, never nothing.
int64_t share_of(float top_p, int64_t kept) {
    return std::max<int64_t>(1, std::min(kept, int64_t(std::ceil(double(top_p) * double(kept)))));
}

int64_t target_of(float uniform, int64_t total) { return std::min(int64_t(double(uniform) * double(total)), total - 1); }

// A value that at least `wanted` and not many more of the row's groups reach. wanted: at most all.
template <class T>
float bound_of(const Row<T>& row, int64_t wanted) {
    const int64_t groups = row.groups();
    uint32_t low = key_of(-INFINITY), high = key_of(row.peak);
    while (low < high) {
        const uint32_t middle = uint32_t((uint64_t(low) + high + 1) / 2);
        const float y = from_key(middle);
        int64_t reached = 0;
        for_each_vector(groups, [&](int64_t i, int64_t n) {
            reached += __builtin_popcount(lanes_at_least(load_some(row.tops + i, n), y) & ((1u << n) - 1));
        });
        if (reached >= wanted) {
            low = middle;
            if (reached <= wanted + wanted / 4) break;
        } else {
            high = middle - 1;
        }
    }
    return from_key(low);
}

// All tokens with y >= bound.
template <class T>
void gather(const Row<T>& row, float bound, Tokens& tokens) {
    tokens.count = 0;
    for (int64_t group = 0; group < row.groups(); group++) {
        if (!(row.tops[group] >= bound)) continue;
        row.each_vector(group, [&](int64_t i, int64_t n) {
            const vf y = row.scaled(i, n);
            tokens.put_lanes(y, i, lanes_at_least(y, bound) & ((1u << n) - 1));
        });
    }
    tokens.weigh(row);
}

// The draw from the tokens within the cut, all of which are here.
int64_t draw_among(const Tokens& tokens, const Cut& cut, float uniform) {
    const int64_t target = target_of(uniform, cut.mass);
    int64_t sum = 0, ties = 0;
    for (int64_t i = 0; i < tokens.count; i++) {
        const float y = tokens.y[i];
        if (y > cut.edge || (y == cut.edge && ties++ < cut.ties)) sum += tokens.masses[i];
        if (sum > target) return tokens.ids[i];
    }
    return tokens.ids[tokens.count - 1];
}

// The draw from the groups with the largest maxima; -1 if they may not hold all of the nucleus. total: of the row, if without top-k.
template <class T>
int64_t draw_from_few(const Row<T>& row, int64_t total, Tokens& tokens) {
    const int64_t wanted = row.top_k > 0 ? row.top_k : std::min(kNucleusGroups, row.groups());
    gather(row, std::max(bound_of(row, wanted), row.lowest()), tokens);
    Cut cut;
    cut.mass = row.top_k > 0 ? tokens.mass() : total;
    // With fewer than k tokens here, the others of the first k have no mass.
    if (row.top_k > 0 && tokens.count > row.top_k) cut = cut_by_count(row, tokens, row.top_k);
    if (row.top_p < 1.0f) {
        const int64_t needed = share_of(row.top_p, cut.mass);
        if (row.top_k == 0 && tokens.mass() < needed) return -1;
        cut = cut_by_mass(row, tokens, needed);
    }
    return draw_among(tokens, cut, row.uniform);
}

// The draw from all of a row's tokens within the cut. sums: the masses of chunks if nothing is cut, else null.
template <class T>
int64_t draw_from_all(const Row<T>& row, const Cut& cut, const int64_t* sums) {
    const int64_t target = target_of(row.uniform, cut.mass), groups = row.groups();
    int64_t before = 0, ties = 0, group = 0;
    if (sums) {
        const int64_t last = (row.vocab - 1) / kChunk;
        int64_t chunk = 0;
        for (; chunk < last && before + sums[chunk] <= target; chunk++) before += sums[chunk];
        group = chunk * (kChunk / kGroup);
    }
    const int64_t each = row.mass(cut.edge);
    for (; group < groups; group++) {
        if (!(row.tops[group] >= cut.edge)) continue;
        MassSum above;
        int64_t equal = 0;
        row.each_vector(group, [&](int64_t i, int64_t n) {
            const vf y = row.scaled(i, n);
            above.add(y > splat(cut.edge) ? row.weight(y) : vf{});
            const uint32_t lanes = lanes_at_least(y, cut.edge) & ((1u << n) - 1);
            if (lanes) equal += __builtin_popcount(lanes & lanes_at_least(-y, -cut.edge));
        });
        const int64_t kept = std::max<int64_t>(0, std::min(equal, cut.ties - ties));
        const int64_t here = above.total() + kept * each;
        if (before + here > target) break;
        before += here;
        ties += equal;
    }
    int64_t found = row.vocab - 1;
    if (group == groups) return found;
    bool done = false;
    row.each_vector(group, [&](int64_t i, int64_t n) {
        const vf y = row.scaled(i, n), w = row.weight(y);
        for (int64_t j = 0; j < n && !done; j++) {
            if (y[j] > cut.edge || (y[j] == cut.edge && ties++ < cut.ties)) before += mass_of(w[j]);
            done = before > target;
            if (done) found = i + j;
        }
    });
    return found;
}

// How many tokens are in each bucket (counted only for top-k), and their mass.
struct Buckets {
    int64_t counts[kBuckets] = {}, masses[kBuckets] = {};

    template <class T>
    explicit Buckets(const Row<T>& row) {
        // Neighbours are often in the same bucket, and an addition would wait for the one before: two sets take turns.
        int64_t odd_masses[kBuckets] = {};
        for (int64_t group = 0; group < row.groups(); group++) {
            float weights[kGroup + W];
            int32_t buckets[kGroup + W];
            const int64_t begin = group * kGroup, size = row.size_of(group);
            for_each_vector(size, [&](int64_t i, int64_t n) {
                const vf y = row.scaled(begin + i, n);
                const vi bucket = __builtin_convertvector(row.distance(y), vi);
                store(weights + i, row.weight(y));
                std::memcpy(buckets + i, &bucket, sizeof(bucket));
            });
            int64_t i = 0;
            for (; i + 2 <= size; i += 2) {
                masses[buckets[i]] += mass_of(weights[i]);
                odd_masses[buckets[i + 1]] += mass_of(weights[i + 1]);
            }
            if (i < size) masses[buckets[i]] += mass_of(weights[i]);
            for (i = 0; row.top_k > 0 && i < size; i++) counts[buckets[i]]++;
        }
        for (int64_t i = 0; i < kBuckets; i++) masses[i] += odd_masses[i];
    }
};

template <class T>
void gather_bucket(const Row<T>& row, int64_t bucket, Tokens& tokens) {
    const float nearest = float(bucket), beyond = float(bucket + 1);
    tokens.count = 0;
    for (int64_t group = 0; group < row.groups(); group++) {
        if (row.distance(splat(row.tops[group]))[0] >= beyond) continue;
        row.each_vector(group, [&](int64_t i, int64_t n) {
            const vf y = row.scaled(i, n), distance = row.distance(y);
            const uint32_t inside = lanes_at_least(distance, nearest) & ~lanes_at_least(distance, beyond);
            tokens.put_lanes(y, i, inside & ((1u << n) - 1));
        });
    }
    tokens.weigh(row);
}

// The first of the buckets, from 0, with which the running sum reaches `needed`, and the sum before it; the last if none does.
std::pair<int64_t, int64_t> reach(const int64_t* sums, int64_t needed) {
    int64_t bucket = 0, before = 0;
    for (; bucket < kBuckets - 1 && before + sums[bucket] < needed; bucket++) before += sums[bucket];
    return {bucket, before};
}

// The draw by top-k or top-p of any size.
template <class T>
int64_t draw_from_many(const Row<T>& row, Tokens& tokens) {
    const Buckets buckets(row);
    Cut cut;
    for (const int64_t mass : buckets.masses) cut.mass += mass;
    if (row.top_k > 0) {
        const auto [bucket, before] = reach(buckets.counts, row.top_k);
        if (bucket < kBuckets - 1) {  // beyond is no mass to cut
            gather_bucket(row, bucket, tokens);
            cut = cut_by_count(row, tokens, row.top_k - before);
            for (int64_t i = 0; i < bucket; i++) cut.mass += buckets.masses[i];
        }
    }
    if (row.top_p < 1.0f) {
        const int64_t needed = share_of(row.top_p, cut.mass);
        const auto [bucket, before] = reach(buckets.masses, needed);
        gather_bucket(row, bucket, tokens);
        cut = cut_by_mass(row, tokens, needed - before);
        cut.mass += before;
    }
    return draw_from_all(row, cut, nullptr);
}

float max_of(const float* x, int64_t count) {
    vf top = splat(-INFINITY);
    for_each_vector(count, [&](int64_t i, int64_t n) { top = vmax(top, first_lanes(load_some(x + i, n), n)); });
    return max_lanes(top);
}

struct DrawArguments {
    const void* logits;
    int64_t rows, vocab, stride;
    const float *temperatures, *min_ps, *top_ps, *uniforms;
    const int32_t* top_ks;
    int64_t* ids;
    uint8_t* finite;  // or null
};

// What threads share.
struct Shared {
    uint8_t* finite;  // [rows, chunks]
    float* tops;    // [rows, groups]
    float* peaks;   // [rows]
    int64_t* sums;  // [rows, chunks]
    char* tokens;   // [threads, Tokens::bytes]
};

// One thread's part.
template <class T>
class Drawing {
  public:
    Drawing(Team& team, const DrawArguments& a, const Shared& shared)
        : team_(team), a_(a), shared_(shared), groups_((a.vocab + kGroup - 1) / kGroup),
          chunks_((a.vocab + kChunk - 1) / kChunk),
          tokens_(shared.tokens + size_t(team.thread()) * Tokens::bytes(a.vocab), a.vocab) {}

    void run() {
        share_chunks([&](int64_t row, int64_t chunk) { find_tops(row, chunk); });
        share_rows([&](int64_t row) { draw_limited(row); });
        if (std::all_of(a_.top_ks, a_.top_ks + a_.rows, [&](int32_t k) { return limited(k); })) return;
        share_chunks([&](int64_t row, int64_t chunk) { sum_masses(row, chunk); });
        share_rows([&](int64_t row) { draw_unlimited(row); });
    }

  private:
    template <class Body>
    void share_chunks(Body&& body) {
        const int64_t count = a_.rows * chunks_;
        team_.share(count, team_.grain(count, 1), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) body(i / chunks_, i % chunks_);
        });
    }

    template <class Body>
    void share_rows(Body&& body) {
        team_.share(a_.rows, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) body(i);
        });
    }

    bool limited(int32_t top_k) const { return top_k > 0 && top_k < a_.vocab; }

    Row<T> row(int64_t i) const {
        return {(const T*)a_.logits + i * a_.stride, a_.vocab, limited(a_.top_ks[i]) ? a_.top_ks[i] : 0, a_.temperatures[i],
                a_.min_ps[i], a_.top_ps[i], a_.uniforms[i], shared_.tops + i * groups_, shared_.peaks[i]};
    }

    // Dividing by the temperature keeps the order of logits: the maximum's y is the largest.
    void find_tops(int64_t i, int64_t chunk) {
        const Row<T> r = row(i);
        const int64_t first = chunk * (kChunk / kGroup), end = std::min(groups_, first + kChunk / kGroup);
        vf sum = {};
        for (int64_t g = first; g < end; g++) {
            vf top = splat(-INFINITY);
            r.each_vector(g, [&](int64_t at, int64_t n) {
                const vf x = load_some(r.logits + at, n);
                sum += x;
                top = vmax(top, first_lanes(x, n));
            });
            r.tops[g] = max_lanes(top) / r.temperature;
        }
        shared_.finite[i * chunks_ + chunk] = std::isfinite(sum_lanes(sum));
    }

    void draw_limited(int64_t i) {
        const float peak = max_of(shared_.tops + i * groups_, groups_);
        shared_.peaks[i] = peak;
        const uint8_t* finite = shared_.finite + i * chunks_;
        if (a_.finite) a_.finite[i] = std::all_of(finite, finite + chunks_, [](uint8_t f) { return f != 0; });
        if (!std::isfinite(peak)) {
            a_.ids[i] = 0;
            return;
        }
        const Row<T> r = row(i);
        if (r.top_k == 0) return;
        a_.ids[i] = r.top_k <= groups_ / 2 ? draw_from_few(r, 0, tokens_) : draw_from_many(r, tokens_);
    }

    void sum_masses(int64_t i, int64_t chunk) {
        const Row<T> r = row(i);
        if (r.top_k > 0 || !std::isfinite(r.peak)) return;
        const int64_t first = chunk * (kChunk / kGroup), end = std::min(groups_, first + kChunk / kGroup);
        MassSum sum;
        for (int64_t g = first; g < end; g++) {
            if (r.tops[g] < r.lowest()) continue;
            r.each_vector(g, [&](int64_t at, int64_t n) { sum.add(r.weight(r.scaled(at, n))); });
        }
        shared_.sums[i * chunks_ + chunk] = sum.total();
    }

    void draw_unlimited(int64_t i) {
        const Row<T> r = row(i);
        if (r.top_k > 0 || !std::isfinite(r.peak)) return;
        const int64_t* sums = shared_.sums + i * chunks_;
        Cut all;
        for (int64_t c = 0; c < chunks_; c++) all.mass += sums[c];
        int64_t id;
        if (r.top_p >= 1.0f) {
            id = draw_from_all(r, all, sums);
        } else {
            id = draw_from_few(r, all.mass, tokens_);
            if (id < 0) id = draw_from_many(r, tokens_);
        }
        a_.ids[i] = id;
    }

    Team& team_;
    const DrawArguments& a_;
    const Shared& shared_;
    int64_t groups_, chunks_;
    Tokens tokens_;
};

}  // namespace

// Draws one token per row. logits: [rows, vocab], rows `stride` elements apart, of type `dtype`; the others: [rows], as DrawParams in
// vllm/worker/sample/draw.py. ids: always below vocab; any for rows without a finite maximum. finite: null, or [rows], as
// vllm_finite_rows gives it. Returns kOk, kUnknownType or kOutOfMemory.
VLLM_API int vllm_draw(const void* logits, int64_t rows, int64_t vocab, int64_t stride, const float* temperatures,
                       const float* min_ps, const int32_t* top_ks, const float* top_ps, const float* uniforms, int64_t* ids,
                       uint8_t* finite, int32_t dtype) {
    return guarded([&] {
        const DrawArguments a = {logits, rows, vocab, stride, temperatures, min_ps, top_ps, uniforms, top_ks, ids, finite};
        const int threads = threads_for(rows * vocab / 4);
        const size_t groups = size_t((vocab + kGroup - 1) / kGroup), chunks = size_t((vocab + kChunk - 1) / kChunk);
        const size_t tokens = size_t(threads) * Tokens::bytes(vocab), row = chunks * 9 + (groups + 1) * sizeof(float);
        thread_local Scratch memory;
        Shared shared;
        shared.tokens = (char*)memory.reserve(tokens + size_t(rows) * row);
        shared.sums = (int64_t*)(shared.tokens + tokens);
        shared.tops = (float*)(shared.sums + size_t(rows) * chunks);
        shared.peaks = shared.tops + size_t(rows) * groups;
        shared.finite = (uint8_t*)(shared.peaks + rows);
        return run_kernel(threads, 4, [&](Team& team) {
            return with_type(dtype, [&](auto type) { Drawing<decltype(type)>(team, a, shared).run(); });
        });
    });
}
