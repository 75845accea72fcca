// The router of a mixture of experts in one launch: gate, scores, selection. Argument meaning and checks:
// src/ops/moe_router/mod.rs. How it works and what was tried: docs/kernels/moe_router.md.
//
// Clusters of blocks compute the logits of 16 experts each (gate_gemm.cuh). The first block of a cluster turns them into scores
// and writes those to scratch memory; the one that finishes last selects for all tokens, a warp a token.
#include "gate_gemm.cuh"

namespace hotpath {
namespace {

enum Scoring : uint32_t { kSigmoid = 0, kSoftmax = 1 };
// How vLLM's grouped_topk computes for these sizes. Host twin: src/ops/moe_router/mod.rs, Selection.
enum Selection : uint32_t {
    kSingle = 0,  // scores in fp32, weights by one factor, what is not finite last and with weight zero
    kFew = 1,     // scores in fp32, weights divided; NaN above everything
    kMany = 2,    // scores and sums rounded to the logits' dtype, what is not finite is never selected
};

// Host twin: src/ops/moe_router/cuda.rs, RouterParams.
struct RouterParams {
    GateOperands gate;
    const float* bias;    // null without
    uint8_t* logits;      // null without; row stride in elements below
    uint2* scratch;       // [tokens, experts]: score (softmax: logit) and key; then [tokens, clusters]: best and second key
    float* weights;       // [tokens, top_k]
    int32_t* ids;         // [tokens, top_k]
    int64_t logits_row;
    double scaling;
    uint32_t cluster_log2;  // blocks of a cluster
    uint32_t ticket;      // which of the counters
    uint32_t top_k, groups, group_experts, top_groups;
    uint32_t scoring, selection, renormalize;
    uint32_t logits_bf16;
};
static_assert(sizeof(RouterParams) == 144, "the host's twin has this size");

// Clusters that have finished, by call. Each is zero between launches: the last cluster wraps it. The host hands them
// out (src/ops/moe_router/cuda.rs) so that no two launches that may run at once share one.
constexpr uint32_t kTickets = 1u << 18;
__device__ uint32_t moe_router_tickets[kTickets];

// How many clusters have finished before this one.
__device__ __forceinline__ uint32_t count_arrival(uint32_t ticket, uint32_t clusters) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(moe_router_tickets + ticket), "r"(clusters - 1)
                 : "memory");
    return before;
}

// Of the kernels for few tokens, by call: how many clusters have started, in the lower kStartBits bits, which are zero between
// launches; above, how many launches this counter has served.
__device__ uint32_t moe_router_starts[kTickets];
constexpr uint32_t kStartBits = 8;

// ---- Scores and their order ----------------------------------------------------------------------------------------

// As vLLM computes it, to the bit.
__device__ __forceinline__ float sigmoid(float x) { return fmaf(0.5f, tanhf(0.5f * x), 0.5f); }

// Unsigned integers in the order of the floats; positive NaN on top.
__device__ __forceinline__ uint32_t order_key(float v) {
    const uint32_t bits = __float_as_uint(v);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_order_key(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}
constexpr uint32_t kMinusInfinityKey = 0x007FFFFFu;
constexpr uint32_t kDropped = 0x80000000u;
constexpr uint32_t kNever = 0;  // key of what is not there or not to be selected

// With fewer experts in one group vLLM's kernel does not keep the score but subtracts the bias from the sum again.
constexpr uint32_t kScoreKeptExperts = 256;

// The score of a logit and the key of what it is selected by.
__device__ __forceinline__ uint2 scored(const RouterParams& p, float logit, float bias) {
    if (p.scoring == kSoftmax) return make_uint2(__float_as_uint(logit), kNever);
    float score = sigmoid(logit);
    if (p.selection == kSingle) {
        // What is not finite comes last, with weight zero.
        const float sum = score + bias;
        if (p.gate.experts < kScoreKeptExperts) score = sum - bias;
        const bool finite = fabsf(logit) < INFINITY && fabsf(sum) < INFINITY;
        return finite ? make_uint2(__float_as_uint(score), order_key(sum)) : make_uint2(0, kMinusInfinityKey);
    }
    if (p.selection == kFew) return make_uint2(__float_as_uint(score), order_key(score + bias));
    float sum;
    if (p.logits_bf16) {
        score = round_to_bf16(score);
        sum = round_to_bf16(score + round_to_bf16(bias));
    } else {
        sum = score + bias;
    }
    if (sum != sum) sum = -INFINITY;
    // A logit that is not finite counts in its group's score but is not selected: the sign of its score says so.
    const uint32_t dropped = fabsf(logit) < INFINITY ? 0 : kDropped;
    return make_uint2(__float_as_uint(score) | dropped, order_key(sum));
}

// As scored(), for sigmoid scores and kSingle or kFew.
__device__ __forceinline__ uint2 scored_few(const RouterParams& p, float logit, float bias) {
    float score = sigmoid(logit);
    const float sum = score + bias;
    if (p.selection == kSingle && p.gate.experts < kScoreKeptExperts) score = sum - bias;
    // What is not finite comes last, with weight zero.
    const bool counts = p.selection == kFew || (fabsf(logit) < INFINITY && fabsf(sum) < INFINITY);
    return counts ? make_uint2(__float_as_uint(score), order_key(sum)) : make_uint2(0, kMinusInfinityKey);
}

// ---- Selection: one warp, one token ----------------------------------------------------------------------------------

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr int kMaxTopK = 32;

// Key and expert in one number: higher keys first, then lower experts.
__device__ __forceinline__ uint64_t composite(uint32_t key, uint32_t expert) { return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~expert); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(kAll, v, mask);
    return v;
}

struct SelectionMemory {
    uint4 bests[8];        // a key a lane
    ulonglong2 order[16];  // composites of up to 32 candidates
    uint2 winners[kMaxTopK];  // expert and score
};

// The largest key that at least `count` of the lanes' keys reach; 1 when there are fewer.
__device__ __forceinline__ uint32_t bound_of(uint32_t key, uint32_t count, uint4 (&bests)[8]) {
    reinterpret_cast<uint32_t*>(bests)[threadIdx.x % 32] = key;
    __syncwarp();
    uint32_t reached[4] = {};
    // Code runs once a launch, so it is fetched as it runs: short beats unrolled, here and below.
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
        const uint4 four = bests[i];
        reached[0] += four.x >= key;
        reached[1] += four.y >= key;
        reached[2] += four.z >= key;
        reached[3] += four.w >= key;
    }
    const bool enough = reached[0] + reached[1] + (reached[2] + reached[3]) >= count;
    return max(__reduce_max_sync(kAll, enough ? key : kNever), 1u);
}

// As bound_of(), of the 16 pairs of lanes that are 16 apart: for counts up to 8. Each half of the warp compares with half of them.
__device__ __forceinline__ uint32_t bound_of_pairs(uint32_t key, uint32_t count, uint4 (&bests)[8]) {
    const uint32_t lane = threadIdx.x % 32;
    key = max(key, __shfl_xor_sync(kAll, key, 16));
    reinterpret_cast<uint32_t*>(bests)[lane] = key;
    __syncwarp();
    const uint4* half = bests + lane / 16 * 2;
    const uint4 a = half[0], b = half[1];
    const auto reached = [&](uint4 four) { return (four.x >= key) + (four.y >= key) + ((four.z >= key) + (four.w >= key)); };
    uint32_t all = reached(a) + reached(b);
    all += __shfl_xor_sync(kAll, all, 16);
    return max(__reduce_max_sync(kAll, all >= count ? key : kNever), 1u);
}

struct Candidates {
    uint32_t before, all;  // those of the lanes before; those of all lanes
};

// From the number of a lane's candidates, by the bits of the lanes' numbers.
template <int kSlots>
__device__ __forceinline__ Candidates count_candidates(uint32_t mine) {
    const uint32_t before = (1u << threadIdx.x % 32) - 1;
    Candidates n = {0, 0};
#pragma unroll
    for (int bit = 0; 1 << bit <= kSlots; ++bit) {
        const uint32_t lanes = __ballot_sync(kAll, mine >> bit & 1);
        n.before += __popc(lanes & before) << bit;
        n.all += __popc(lanes) << bit;
    }
    return n;
}

// For a token without candidates: the first experts, with equal weights; vLLM's kernels for one group give them only when
// they renormalise.
__device__ __forceinline__ void select_nothing(const RouterParams& p, uint32_t token) {
    const uint32_t lane = threadIdx.x % 32, k = p.top_k;
    if (lane < k) {
        p.ids[token * k + lane] = static_cast<int32_t>(lane);
        p.weights[token * k + lane] = p.selection == kSingle && !p.renormalize ? 0.0f : 1.0f / static_cast<float>(k);
    }
}

// Sets the keys of the experts outside the best groups to kNever, for groups of any size. Returns false when there are
// not enough groups.
template <int kSlots>
__device__ __forceinline__ bool select_groups(const RouterParams& p, uint32_t (&keys)[kSlots]) {
    const uint32_t lane = threadIdx.x % 32;
    // Two best of every group. Lane g keeps group g's score.
    uint32_t group_key = kNever;
    const bool pairs = p.bias != nullptr;
    const auto group_score = [&](uint32_t group, uint32_t best, uint32_t second) {
        const uint32_t top = __reduce_max_sync(kAll, best);
        const uint32_t holders = __ballot_sync(kAll, best == top);
        const bool owner = lane == static_cast<uint32_t>(__ffs(holders)) - 1;
        const uint32_t next = __reduce_max_sync(kAll, owner ? second : best);
        float score = from_order_key(top);
        if (pairs) score += next == kNever ? -INFINITY : from_order_key(next);
        if (p.selection == kMany && p.logits_bf16) score = round_to_bf16(score);
        if (lane == group) group_key = order_key(score);
    };
#pragma unroll 1
    for (uint32_t group = 0; group < p.groups; ++group) {
        uint32_t best = kNever, second = kNever;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            const uint32_t offset = j * 32 + lane - group * p.group_experts;
            if (offset < p.group_experts) {
                second = max(second, min(best, keys[j]));
                best = max(best, keys[j]);
            }
        }
        group_score(group, best, second);
    }
    uint32_t rank = 0;
#pragma unroll 1
    for (uint32_t g = 0; g < p.groups; ++g) {
        const uint32_t other = __shfl_sync(kAll, group_key, g);
        rank += other > group_key || (other == group_key && g < lane);
    }
    const bool chosen = lane < p.groups && rank < p.top_groups;
    const uint32_t groups = __ballot_sync(kAll, chosen);
    const bool enough = __all_sync(kAll, !chosen || group_key > kMinusInfinityKey);
    uint32_t group = lane / p.group_experts, offset = lane % p.group_experts;
    const uint32_t whole = 32 / p.group_experts, rest = 32 % p.group_experts;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        if (!(groups >> (group & 31) & 1)) keys[j] = kNever;
        group += whole;
        offset += rest;
        if (offset >= p.group_experts) offset -= p.group_experts, ++group;
    }
    return enough;
}

// As select_groups() for groups of whole clusters, from the clusters' best keys, a cluster a lane. `best` becomes kNever outside the
// best groups.
template <int kSlots>
__device__ __forceinline__ void select_groups_of_clusters(const RouterParams& p, uint32_t (&keys)[kSlots], uint32_t& best, uint32_t second) {
    const uint32_t lane = threadIdx.x % 32, size = p.group_experts / kGateRows;
    const uint32_t group = lane / size, first = group * size;
    uint32_t top = kNever, next = kNever;
#pragma unroll 1
    for (uint32_t i = 0; i < size; ++i) {
        const uint32_t other = __shfl_sync(kAll, best, first + i), other_second = __shfl_sync(kAll, second, first + i);
        next = max(max(next, other_second), min(top, other));
        top = max(top, other);
    }
    float score = from_order_key(top);
    if (p.bias) score += next == kNever ? -INFINITY : from_order_key(next);
    const uint32_t group_key = order_key(score);
    uint32_t rank = 0;
#pragma unroll 2
    for (uint32_t g = 0; g < p.groups; ++g) {
        const uint32_t other = __shfl_sync(kAll, group_key, g * size);
        rank += other > group_key || (other == group_key && g < group);
    }
    const bool chosen = group < p.groups && rank < p.top_groups;
    if (!chosen) best = kNever;
    const uint32_t clusters = __ballot_sync(kAll, chosen) >> lane / kGateRows;
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
        if (!(clusters >> (2 * j & 31) & 1)) keys[j] = kNever;
}

// The weight of a winner; `sum` is that of the winners' scores.
__device__ __forceinline__ float weight_of(const RouterParams& p, float score, float sum) {
    if (p.selection == kFew) {
        const float weight = static_cast<float>(score * p.scaling);
        if (!p.renormalize) return weight;
        // 1e-20 is lost in the double sum of anything larger, and a quotient of floats is the same in both precisions.
        return sum > 1e-3f ? __fdiv_rn(weight, sum) : static_cast<float>(weight / (static_cast<double>(sum) + 1e-20));
    }
    const float scale = static_cast<float>(p.scaling);
    return score * (p.renormalize ? __fdiv_rn(scale, 1e-20f + sum) : scale);
}

// Keys of a token are in lane's slots: expert j * 32 + lane in slot j. `best` and `second` are those of cluster `lane` (and,
// the best only, of cluster `lane + 32`).
template <int kSlots>
__device__ __forceinline__ void select(const RouterParams& p, uint32_t token, uint32_t (&keys)[kSlots], uint32_t dropped, uint32_t best,
                                       uint32_t second, SelectionMemory& m) {
    const uint32_t lane = threadIdx.x % 32, k = p.top_k;
    const uint32_t clusters = (p.gate.experts + kGateRows - 1) / kGateRows;
    const uint2* row = p.scratch + static_cast<uint64_t>(token) * p.gate.experts;
    // Disjoint sets of experts have their best in a lane each: the k-th of them bounds the k-th best of all from below.
    // Twice as many sets as places keep the candidates few.
    bool have_bests = clusters >= 2 * k && p.scoring == kSigmoid;
    if (p.groups > 1 && p.selection == kFew && p.scoring == kSigmoid && p.group_experts % kGateRows == 0 && clusters <= 32) {
        select_groups_of_clusters<kSlots>(p, keys, best, second);
        have_bests = p.group_experts / kGateRows * p.top_groups >= 2 * k;
    } else if (p.groups > 1 || p.selection == kMany) {
        have_bests = false;
        const bool enough = select_groups<kSlots>(p, keys);
        if (p.selection == kMany && !enough) {
            select_nothing(p, token);
            return;
        }
        if (p.selection == kMany) {
#pragma unroll
            for (int j = 0; j < kSlots; ++j)
                if (keys[j] <= kMinusInfinityKey || dropped >> j & 1) keys[j] = kNever;
        }
    }
    if (!have_bests) {
        best = kNever;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) best = max(best, keys[j]);
    }
    if (p.selection == kSingle && !__any_sync(kAll, best > kMinusInfinityKey)) {
        select_nothing(p, token);
        return;
    }
    const uint32_t bound = bound_of(best, k, m.bests);

    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) mine += keys[j] >= bound;
    const Candidates counted = count_candidates<kSlots>(mine);
    uint32_t at = counted.before, candidates = counted.all;
    uint64_t* order = reinterpret_cast<uint64_t*>(m.order);
    if (candidates <= 32) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j)
            if (keys[j] >= bound) order[at++] = composite(keys[j], j * 32 + lane);
        // Up to a multiple of four, composites below all others.
        if (lane >= candidates) order[lane] = 0;
        __syncwarp();
        const uint64_t candidate = order[lane];
        const uint32_t expert = ~static_cast<uint32_t>(candidate);
        const float score = __uint_as_float(load_u32_if(lane < candidates, row + expert));
        uint32_t place = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < candidates; i += 4) {
            const ulonglong2 low = m.order[i / 2], high = m.order[i / 2 + 1];
            place += (low.x > candidate) + (low.y > candidate) + (high.x > candidate) + (high.y > candidate);
        }
        if (lane < candidates && place < k) m.winners[place] = make_uint2(expert, __float_as_uint(score));
    } else {
        // Many equal keys: one after the other.
#pragma unroll 1
        for (uint32_t place = 0; place < k; ++place) {
            uint32_t key = kNever, slot = 0;
#pragma unroll
            for (int j = 0; j < kSlots; ++j)
                if (keys[j] > key) key = keys[j], slot = j;
            const uint32_t top = __reduce_max_sync(kAll, key);
            const uint32_t expert = slot * 32 + lane;
            const uint32_t winner = __reduce_min_sync(kAll, key == top ? expert : kAll);
            if (key == top && expert == winner) {
                m.winners[place] = make_uint2(expert, load_u32_if(true, row + expert));
#pragma unroll
                for (int j = 0; j < kSlots; ++j)
                    if (j == static_cast<int>(slot)) keys[j] = kNever;
            }
        }
        candidates = k;
    }
    __syncwarp();

    // Fewer candidates than places: expert 0 takes the rest.
    const uint2 winner = lane < min(candidates, k) ? m.winners[lane] : make_uint2(0, lane < k ? load_u32_if(true, row) : 0);
    float score = __uint_as_float(winner.y);
    if (p.selection == kMany) score = fabsf(score);
    const float weight = weight_of(p, score, p.renormalize ? warp_sum(score) : 0.0f);
    if (lane < k) {
        p.ids[token * k + lane] = static_cast<int32_t>(winner.x);
        p.weights[token * k + lane] = weight;
    }
    __syncwarp();
}

// ---- Selection for few tokens -----------------------------------------------------------------------------------------
// For what decoding asks for (src/ops/moe_router/cuda.rs, is_few): at most 8 tokens, sigmoid scores, kSingle or kFew in groups
// of 16 experts times a power of two. Selects what select() does, in fewer instructions.

// Where a token's experts lie in the lanes of a warp. In groups a lane has eight experts, one behind the other, and so belongs to one
// group.
template <int kSlots>
struct Lanes {
    // Calls with fewer experts take fewer slots.
    static constexpr int kAlwaysInside = kSlots == 8 ? 0 : kSlots - 4;
    bool grouped;
    uint32_t experts, pitch;

    __device__ __forceinline__ explicit Lanes(const RouterParams& p)
        : grouped(kSlots == 8 && p.groups > 1), experts(p.gate.experts), pitch(grouped ? experts / 8 : 32) {}
    // Of slot `slot` of this lane: its place in memory, where the lanes' are next to each other, whether it is one, and its expert.
    __device__ __forceinline__ uint32_t place(uint32_t slot) const { return slot * pitch + threadIdx.x % 32; }
    __device__ __forceinline__ bool inside(uint32_t slot) const {
        if (static_cast<int>(slot) < kAlwaysInside) return true;
        return grouped ? threadIdx.x % 32 < pitch : place(slot) < experts;
    }
    __device__ __forceinline__ uint32_t step() const { return grouped ? 1 : 32; }
    __device__ __forceinline__ uint32_t expert(uint32_t slot) const { return threadIdx.x % 32 * (grouped ? 8 : 1) + slot * step(); }
};
// The place of an expert.
__device__ __forceinline__ uint32_t place_of(const RouterParams& p, uint32_t expert) {
    return p.groups > 1 ? expert % 8 * (p.gate.experts / 8) + expert / 8 : expert;
}

// An expert of a token: x the complement of its number in the lowest 10 bits, ones or the same for all above; y key; z score.
using Entry = uint4;
__device__ __forceinline__ uint32_t expert_of(uint32_t x) { return ~x & 1023; }

struct FewMemory {
    uint4 bests[8];         // a key a lane
    Entry candidates[32];   // zero but during a selection
    uint2 winners[kMaxTopK];  // expert and score
};

// By a warp, before its first selection.
__device__ __forceinline__ void clear_candidates(FewMemory& m) {
    m.candidates[threadIdx.x % 32] = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

// Sets the keys of the lanes outside the best groups, and their best, to kNever.
__device__ __forceinline__ void select_groups_of_lanes(const RouterParams& p, Entry (&entries)[8], uint32_t& lane_best) {
    const uint32_t lane = threadIdx.x % 32, lanes = p.gate.experts / 8, size = p.group_experts / 8, first = lane & ~(size - 1);
    uint32_t best = entries[0].y, second = kNever;
#pragma unroll
    for (int j = 1; j < 8; ++j) {
        second = max(second, min(best, entries[j].y));
        best = max(best, entries[j].y);
    }
#pragma unroll 1
    for (uint32_t mask = 1; mask < size; mask *= 2) {
        const uint32_t other = __shfl_xor_sync(kAll, best, mask), other_second = __shfl_xor_sync(kAll, second, mask);
        second = max(max(second, other_second), min(best, other));
        best = max(best, other);
    }
    float score = from_order_key(best);
    if (p.bias) score += from_order_key(second);
    const uint32_t key = order_key(score);
    uint32_t rank = 0;
#pragma unroll 2
    for (uint32_t g = 0; g < lanes; g += size) {
        const uint32_t other = __shfl_sync(kAll, key, g);
        rank += other > key || (other == key && g < first);
    }
    if (lane >= lanes || rank >= p.top_groups) {
        lane_best = kNever;
#pragma unroll
        for (int j = 0; j < 8; ++j) entries[j].y = kNever;
    }
}

// Stores an entry whose key reaches the bound and moves on.
__device__ __forceinline__ void append_candidate(uint32_t& at, const Entry& v, uint32_t bound) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ge.u32 p, %2, %5;\n\t@p st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n\t@p add.u32 %0, %0, 16;\n\t}"
        : "+r"(at)
        : "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bound)
        : "memory");
}

// Selects for a token. The lane's entries are in its slots, with key kNever where there is none. Writes only if `real`.
template <int kSlots>
__device__ __forceinline__ void select_few(const RouterParams& p, uint32_t token, Entry (&entries)[kSlots], bool real, FewMemory& m) {
    const uint32_t lane = threadIdx.x % 32, k = p.top_k;
    uint32_t best = kNever;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) best = max(best, entries[j].y);
    if (p.groups > 1) {
        if constexpr (kSlots == 8) select_groups_of_lanes(p, entries, best);
    } else if (!__any_sync(kAll, best > kMinusInfinityKey)) {
        if (real) select_nothing(p, token);
        return;
    }
    // The lanes' experts have their best: the k-th of them bounds the k-th best of all from below.
    const uint32_t bound = k <= 8 && p.groups == 1 ? bound_of_pairs(best, k, m.bests) : bound_of(best, k, m.bests);
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) mine += entries[j].y >= bound;
    const Candidates candidates = count_candidates<kSlots>(mine);
    if (candidates.all <= 32) {
        uint32_t at = shared_address(m.candidates + candidates.before);
#pragma unroll
        for (int j = 0; j < kSlots; ++j) append_candidate(at, entries[j], bound);
        __syncwarp();
        const Entry own = m.candidates[lane];
        const uint64_t candidate = static_cast<uint64_t>(own.y) << 32 | own.x;
        uint32_t place = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < candidates.all; i += 4) {
#pragma unroll
            for (int j = 0; j < 4; ++j) place += *reinterpret_cast<const uint64_t*>(&m.candidates[i + j]) > candidate;
        }
        if (lane < candidates.all && place < k) m.winners[place] = make_uint2(expert_of(own.x), own.z);
    } else {
        // Many equal keys: one after the other.
#pragma unroll 1
        for (uint32_t place = 0; place < k; ++place) {
            uint32_t key = kNever, x = 0, score = 0;
            // A lane's experts are in order.
#pragma unroll
            for (int j = 0; j < kSlots; ++j)
                if (entries[j].y > key) key = entries[j].y, x = entries[j].x, score = entries[j].z;
            const uint32_t top = __reduce_max_sync(kAll, key);
            const uint32_t winner = __reduce_max_sync(kAll, key == top ? x : 0);
            if (key == top && x == winner) {
                m.winners[place] = make_uint2(expert_of(x), score);
#pragma unroll
                for (int j = 0; j < kSlots; ++j)
                    if (entries[j].x == x) entries[j].y = kNever;
            }
        }
    }
    __syncwarp();

    const uint2 winner = lane < k ? m.winners[lane] : make_uint2(0, 0);
    // For the next selection.
    clear_candidates(m);
    const float score = __uint_as_float(winner.y);
    float sum = score;
    // The lanes from k on are zero and change no sum.
    if (k > 8) {
        sum += __shfl_xor_sync(kAll, sum, 16);
        sum += __shfl_xor_sync(kAll, sum, 8);
    }
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
    const float weight = weight_of(p, score, sum);
    if (lane < k && real) {
        p.ids[token * k + lane] = static_cast<int32_t>(winner.x);
        p.weights[token * k + lane] = weight;
    }
}

// Turns the logits of a token into scores and keys, in place. Each lane reads them back where it wrote them.
template <int kSlots>
__device__ __forceinline__ void softmax(const RouterParams& p, uint2* row) {
    const uint32_t lane = threadIdx.x % 32;
    float values[kSlots], top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        values[j] = __uint_as_float(load_u32_if(j * 32 + lane < p.gate.experts, row + j * 32 + lane));
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
        if (j * 32 + lane < p.gate.experts) top = fmaxf(top, values[j]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        values[j] = j * 32 + lane < p.gate.experts ? expf(values[j] - top) : 0.0f;
        sum += values[j];
    }
    const float scale = __frcp_rn(warp_sum(sum));
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const uint32_t expert = j * 32 + lane;
        if (expert < p.gate.experts) {
            const float score = values[j] * scale;
            store_8(row + expert, make_uint2(__float_as_uint(score), order_key(score + (p.bias ? load_f32(p.bias + expert) : 0.0f))));
        }
    }
}

// Tokens `first`, `first + step`, ...
template <int kSlots>
__device__ __forceinline__ void select_tokens(const RouterParams& p, uint32_t first, uint32_t step, SelectionMemory& memory) {
    const uint32_t lane = threadIdx.x % 32, clusters = (p.gate.experts + kGateRows - 1) / kGateRows;
    for (uint32_t token = first; token < p.gate.tokens; token += step) {
        uint2* row = p.scratch + static_cast<uint64_t>(token) * p.gate.experts;
        const uint2* bests = p.scratch + static_cast<uint64_t>(p.gate.tokens) * p.gate.experts + token * clusters;
        if (p.scoring == kSoftmax) softmax<kSlots>(p, row);
        const uint2 best = load_8_if(lane < clusters, bests + lane);
        const uint32_t other_best = load_u32_if(lane + 32 < clusters, bests + lane + 32);
        uint32_t keys[kSlots], dropped = 0;
        constexpr int kInFlight = kSlots < 16 ? kSlots : 16;
#pragma unroll
        for (int start = 0; start < kSlots; start += kInFlight) {
            uint2 entries[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                static_assert(kNever == 0);
                const uint32_t expert = (start + i) * 32 + lane;
                entries[i] = load_8_if(expert < p.gate.experts, row + expert);
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                keys[start + i] = entries[i].y;
                dropped |= entries[i].x >> 31 << (start + i);
            }
        }
        select<kSlots>(p, token, keys, dropped, max(best.x, other_best), best.y, memory);
    }
}

// ---- The kernel ------------------------------------------------------------------------------------------------------

template <int kTiles>
struct RouterMemory {
    union {
        WarpSums<kTiles> warps;
        SelectionMemory selection[kGateWarps];
    };
    BlockSums<kTiles> blocks;
    uint32_t last;
};

template <typename Weight, int kTiles, bool kAligned, int kBatch>
__device__ __forceinline__ void route(const RouterParams& p) {
    __shared__ RouterMemory<kTiles> memory;
    const uint32_t blocks = 1u << p.cluster_log2, cluster = blockIdx.x >> p.cluster_log2, rank = blockIdx.x & (blocks - 1);
    const uint32_t first_expert = cluster * kGateRows, warp = threadIdx.x / 32;
    constexpr int kValues = kGateValues<kTiles>;
    constexpr bool kShare = kTiles > 1;
    expect_block_sums<kTiles>(memory.blocks, blocks);
    // A bias is a weight: no kernel before writes it.
    const uint32_t row = threadIdx.x % kGateRows;
    const float bias = __uint_as_float(load_u32_if(p.bias && first_expert + row < p.gate.experts, p.bias + first_expert + row));

    GateSums<kTiles> sums;
    gate_slice<Weight, kTiles, kAligned, kBatch>(p.gate, first_expert, rank * kGateWarps + warp, p.cluster_log2 + kGateWarpsLog2, sums);
    launch_dependent_grids();
    send_block_sums<kTiles>(sums, memory.warps, memory.blocks, rank);
    // With many tokens the other blocks of the last cluster select, too.
    if (!kShare && rank != 0) return;

    if (rank == 0) {
        wait_for_bytes(&memory.blocks.arrived);
#pragma unroll
        for (int first = 0; first < kValues; first += kGateThreads) {
            const uint32_t value = first + threadIdx.x;
            const uint32_t token = value / kGateRows, expert = first_expert + row;
            uint32_t key = kNever;
            if (token < p.gate.tokens && expert < p.gate.experts) {
                float logit = sum_of_blocks<kTiles>(memory.blocks, value, blocks);
                if (p.logits_bf16) logit = round_to_bf16(logit);
                if (p.logits) store_logit(p.logits, token * p.logits_row + expert, logit, p.logits_bf16);
                const uint2 entry = scored(p, logit, bias);
                store_8(p.scratch + static_cast<uint64_t>(token) * p.gate.experts + expert, entry);
                key = entry.y;
            }
            // The cluster's best and second key of the token, from its 16 lanes.
            uint32_t best = key, second = kNever;
#pragma unroll
            for (int mask = 1; mask < kGateRows; mask *= 2) {
                const uint32_t other = __shfl_xor_sync(kAll, best, mask);
                if (p.groups > 1) second = max(max(second, __shfl_xor_sync(kAll, second, mask)), min(best, other));
                best = max(best, other);
            }
            if (row == 0 && token < p.gate.tokens)
                store_8(p.scratch + static_cast<uint64_t>(p.gate.tokens) * p.gate.experts + token * (gridDim.x >> p.cluster_log2) + cluster,
                        make_uint2(best, second));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            const uint32_t clusters = gridDim.x >> p.cluster_log2;
            const uint32_t last = count_arrival(p.ticket, clusters) == clusters - 1;
            if constexpr (kShare) {
                for (uint32_t b = 0; b < blocks; ++b) store_to_block(&memory.last, b, last);
            } else {
                memory.last = last;
            }
        }
    }
    if constexpr (kShare) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (!memory.last) return;
    SelectionMemory& mine = memory.selection[warp];
    const uint32_t first = kShare ? warp * blocks + rank : warp, step = kShare ? kGateWarps * blocks : kGateWarps;
    if (p.gate.experts <= 256) {
        select_tokens<8>(p, first, step, mine);
    } else if (p.gate.experts <= 384) {
        select_tokens<12>(p, first, step, mine);
    } else {
        select_tokens<32>(p, first, step, mine);
    }
}

// ---- The kernel for few tokens ------------------------------------------------------------------------------------------
// Nobody counts at the end: the cluster that started last selects, and it waits for the entries themselves. An entry is stored and
// loaded whole, and two of its words say which launch it is of, so a word of the workspace that holds anything else, an entry
// of an earlier launch too, is not taken for one. All clusters run by then: waiting keeps none from starting.

// What the entries of a launch carry: x for expert 0, and w.
struct Marks {
    uint32_t x, w;
};

constexpr uint32_t kExpertBits = 10, kEpochLowBits = 14, kTicketBits = 18;
static_assert(kTickets == 1u << kTicketBits && kTicketBits + kEpochLowBits == 32);

// `start` is the counter's value that a cluster found. Launches of one counter differ in the epoch, others in the ticket.
__device__ __forceinline__ Marks marks_of(uint32_t ticket, uint32_t start) {
    const uint32_t epoch = start >> kStartBits;
    constexpr uint32_t kMagic = 0x5A7u << 20;
    return {kMagic | epoch >> kEpochLowBits << kExpertBits | ((1u << kExpertBits) - 1), ticket << kEpochLowBits | (epoch & ((1u << kEpochLowBits) - 1))};
}

__device__ __forceinline__ void store_entry(Entry* at, const Entry& v) {
    asm volatile(
        "{\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tmov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\tmov.b128 all, {low, high};\n\t"
        "st.relaxed.gpu.global.b128 [%0], all;\n\t}" ::"l"(at),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
__device__ __forceinline__ Entry load_entry(const Entry* at) {
    Entry v;
    asm volatile(
        "{\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tld.relaxed.gpu.global.b128 all, [%4];\n\tmov.b128 {low, high}, all;\n\t"
        "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
    return v;
}
// Leaves `v` as it is unless `condition`.
__device__ __forceinline__ void load_entry_if(bool condition, const Entry* at, Entry& v) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.b64 low, {%0, %1};\n\tmov.b64 high, {%2, %3};\n\t"
        "mov.b128 all, {low, high};\n\t@p ld.relaxed.gpu.global.b128 all, [%4];\n\tmov.b128 {low, high}, all;\n\t"
        "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(at), "r"(static_cast<uint32_t>(condition))
        : "memory");
}

// The threads that compute the gate, of a block that has more.
__device__ __forceinline__ void sync_gate_threads() { asm volatile("barrier.sync.aligned 1, %0;" ::"n"(kGateThreads) : "memory"); }

struct FewShared {
    WarpSums<1> warps;
    BlockSums<1> sums;
    FewMemory selection;
    uint64_t told;  // barrier of `start`
    Marks marks;    // of the first block, sent with the sums
    uint32_t start;
};

// By the last warp of a block: selects for the token that has the block's rank, if the cluster is the last to start.
template <int kSlots>
__device__ __forceinline__ void select_when_there(const RouterParams& p, uint32_t token, Marks marks, FewMemory& m) {
    const Lanes<kSlots> lanes(p);
    const Entry* first = reinterpret_cast<const Entry*>(p.scratch) + token * p.gate.experts + threadIdx.x % 32;
    clear_candidates(m);
    // Once on made-up keys while the weight is on its way, so that the instructions are there when they count.
#pragma unroll 1
    for (uint32_t pass = 0; pass < 2; ++pass) {
        Entry entries[kSlots];
        // What is no expert stays as it is.
#pragma unroll
        for (int j = 0; j < kSlots; ++j) entries[j] = make_uint4(0, kNever, 0, 0);
        if (pass == 0) {
            entries[0].y = ~threadIdx.x;
        } else {
            wait_for_prior_grids();
            uint32_t wrong;
            do {
                uint32_t x = 0, w = 0;
#pragma unroll
                for (int j = 0; j < kSlots; ++j) {
                    if (j < lanes.kAlwaysInside) {
                        entries[j] = load_entry(first + lanes.pitch * j);
                    } else {
                        load_entry_if(lanes.inside(j), first + lanes.pitch * j, entries[j]);
                    }
                }
#pragma unroll
                for (int j = 0; j < kSlots; ++j) {
                    if (!lanes.inside(j)) continue;
                    x |= entries[j].x ^ marks.x;
                    w |= entries[j].w ^ marks.w;
                }
                // The lowest bits are the expert's.
                wrong = x >> kExpertBits | w;
            } while (__any_sync(kAll, wrong != 0));
        }
        select_few<kSlots>(p, token, entries, pass == 1, m);
    }
}

// The block's warps share the gate's work but the last, which finds out whether to select. Clusters have 8 blocks, as many as tokens.
constexpr int kFewBlocksLog2 = 3, kFewBlocks = 1 << kFewBlocksLog2;
static_assert(kFewBlocks == kMaxClusterBlocks && kFewBlocks == kGateTokens);

__device__ __forceinline__ void select_if_last(const RouterParams& p, uint32_t rank, FewShared& memory) {
    const uint32_t lane = threadIdx.x % 32, clusters = gridDim.x / kFewBlocks;
    uint32_t start = 0;
    if (rank == 0 && lane == 0) {
        uint32_t* counter = moe_router_starts + p.ticket;
        start = atomicAdd(counter, 1);
        // The last one leaves it as the next launch wants it.
        if (start % (1u << kStartBits) == clusters - 1) atomicAdd(counter, (1u << kStartBits) - clusters);
    }
    cluster_wait();
    if (rank == 0) {
        start = __shfl_sync(kAll, start, 0);
        if (lane < p.gate.tokens) store_async(address_in_block(&memory.start, lane), start, address_in_block(&memory.told, lane));
        if (lane == 31) {
            const Marks marks = marks_of(p.ticket, start);
            const uint32_t barrier = address_in_block(&memory.sums.arrived, 0);
            store_async(address_in_block(&memory.marks.x, 0), marks.x, barrier);
            store_async(address_in_block(&memory.marks.w, 0), marks.w, barrier);
        }
    }
    if (rank >= p.gate.tokens) return;
    wait_for_shared_bytes(&memory.told);
    start = memory.start;
    if (start % (1u << kStartBits) != clusters - 1) return;
    const Marks marks = marks_of(p.ticket, start);
    if (p.gate.experts <= 256) {
        select_when_there<8>(p, rank, marks, memory.selection);
    } else {
        select_when_there<12>(p, rank, marks, memory.selection);
    }
}

template <typename Weight, int kBatch>
__device__ __forceinline__ void route_few(const RouterParams& p) {
    __shared__ FewShared memory;
    const uint32_t cluster = blockIdx.x / kFewBlocks, rank = blockIdx.x % kFewBlocks, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        init_barrier(&memory.told);
        expect_bytes(&memory.told, sizeof memory.start);
    }
    expect_block_sums<1>(memory.sums, kFewBlocks, sizeof memory.marks);
    if (warp == kGateWarps) {
        select_if_last(p, rank, memory);
        return;
    }

    const uint32_t token = threadIdx.x / kGateRows, expert = cluster * kGateRows + threadIdx.x % kGateRows;
    const bool scores = rank == 0 && token < p.gate.tokens && expert < p.gate.experts;
    Entry* entry = reinterpret_cast<Entry*>(p.scratch) + token * p.gate.experts + place_of(p, expert);
    float bias = 0.0f;
    GateSums<1> sums;
    gate_slice_few<Weight, kBatch>(p.gate, cluster * kGateRows, rank * kGateWarps + warp, kFewBlocksLog2 + kGateWarpsLog2, sums, [&] {
        // A bias is a weight: no kernel before writes it.
        bias = __uint_as_float(load_u32_if(p.bias && scores, p.bias + expert));
        // The blocks of the cluster run.
        cluster_wait();
    });
    store_warp_sums<1>(sums, memory.warps);
    sync_gate_threads();
    send_stored_sums<1>(memory.warps, memory.sums, rank);
    // A block that only selects lets the next kernel start here; without, that one would start when the selection is done.
    if (rank != 0) launch_dependent_grids();
    if (!scores) return;

    wait_for_shared_bytes(&memory.sums.arrived);
    float logit = sum_of_blocks<1>(memory.sums, threadIdx.x, kFewBlocks);
    if (p.logits_bf16) logit = round_to_bf16(logit);
    const uint2 scored = scored_few(p, logit, bias);
    store_entry(entry, make_uint4(memory.marks.x - expert, scored.y, scored.x, memory.marks.w));
    launch_dependent_grids();
    if (p.logits) store_logit(p.logits, token * p.logits_row + expert, logit, p.logits_bf16);
}

#define HOTPATH_ROUTER(NAME, WEIGHT, TILES, ALIGNED, BATCH)                                                                \
    extern "C" __global__ void __launch_bounds__(kGateThreads, 2) moe_router_##NAME(const __grid_constant__ RouterParams p) { \
        route<WEIGHT, TILES, ALIGNED, BATCH>(p);                                                                           \
    }
HOTPATH_ROUTER(bf16_8, uint16_t, 1, true, 4)
HOTPATH_ROUTER(bf16_16, uint16_t, 2, true, 4)
HOTPATH_ROUTER(bf16_32, uint16_t, 4, true, 2)
HOTPATH_ROUTER(bf16_any, uint16_t, 4, false, 1)
HOTPATH_ROUTER(fp32_8, float, 1, true, 2)
HOTPATH_ROUTER(fp32_32, float, 4, true, 1)
HOTPATH_ROUTER(fp32_any, float, 4, false, 1)

#define HOTPATH_ROUTER_FEW(NAME, WEIGHT, BATCH)                                                                            \
    extern "C" __global__ void __launch_bounds__(kGateThreads + 32, 2) moe_router_##NAME(const __grid_constant__ RouterParams p) { \
        route_few<WEIGHT, BATCH>(p);                                                                                       \
    }
HOTPATH_ROUTER_FEW(bf16_few, uint16_t, 4)
HOTPATH_ROUTER_FEW(fp32_few, float, 2)

}  // namespace
}  // namespace hotpath
