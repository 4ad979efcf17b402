// One token per row of logits: temperature, min-p, top-k, top-p and the draw, to the letter of vllm/ops/draw.py.
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
#include "logits.h"
#include "scratch.h"

namespace {

constexpr int64_t kNucleusGroups = 64;  // a nucleus is sought in this many groups first

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
        shared_.finite[i * chunks_ + chunk] = sum_lanes(sum) < INFINITY;  // -inf: tokens that the model bars
    }

    void draw_limited(int64_t i) {
        const float peak = max_of(shared_.tops + i * groups_, groups_);
        shared_.peaks[i] = peak;
        const uint8_t* finite = shared_.finite + i * chunks_;
        const bool numbers = std::all_of(finite, finite + chunks_, [](uint8_t f) { return f != 0; });
        if (a_.finite) a_.finite[i] = numbers && peak > -INFINITY;
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
// vllm/ops/draw.py. ids: always below vocab; any for rows without a finite maximum. finite: null, or [rows], as
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
