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
    kFew = 0,   // scores in fp32, NaN above everything
    kMany = 1,  // scores and sums rounded to the logits' dtype, what is not finite is never selected
};

// Host twin: src/ops/moe_router/cuda.rs, RouterParams.
struct RouterParams {
    GateOperands gate;
    const float* bias;    // null without
    uint8_t* logits;      // null without; row stride in elements below
    uint2* scratch;       // [tokens, experts]: score (softmax: logit) and selection key
    float* weights;       // [tokens, top_k]
    int32_t* ids;         // [tokens, top_k]
    int64_t logits_row;
    double scaling;
    uint32_t cluster;     // blocks
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

// ---- Thread-block clusters -----------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Stores to the shared memory of the cluster's first block, at the address that `address` has here.
__device__ __forceinline__ void store_to_first_block(float* address, float value) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(at)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(0));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

// ---- Scores and their order ----------------------------------------------------------------------------------------

__device__ __forceinline__ float round_to_bf16(float v) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

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

// The score of a logit and the key of what it is selected by.
__device__ __forceinline__ uint2 scored(const RouterParams& p, float logit, float bias) {
    if (p.scoring == kSoftmax) return make_uint2(__float_as_uint(logit), kNever);
    float score = sigmoid(logit);
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
    ulonglong2 order[16];  // composites of 32 lanes
    uint32_t winners[kMaxTopK];
};

// How many of the first `count` composites in `order` are above `mine`.
__device__ __forceinline__ uint32_t rank_among(const ulonglong2* order, uint32_t count, uint64_t mine) {
    uint32_t rank = 0;
    for (uint32_t i = 0; i < (count + 1) / 2; ++i) {
        const ulonglong2 two = order[i];
        rank += (two.x > mine) + (two.y > mine);
    }
    return rank;
}

// Sets the keys of the experts outside the best groups to kNever. Returns false when there are not enough groups.
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
    // Groups of a slot each, as DeepSeek-V3's, side by side.
    constexpr bool kSlotGroups = kSlots <= 12;
    if (kSlotGroups && p.group_experts == 32) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            if (j < static_cast<int>(p.groups)) group_score(j, keys[j], kNever);
        }
    } else {
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
    }
    uint32_t rank = 0;
    for (uint32_t g = 0; g < p.groups; ++g) {
        const uint32_t other = __shfl_sync(kAll, group_key, g);
        rank += other > group_key || (other == group_key && g < lane);
    }
    const bool chosen = lane < p.groups && rank < p.top_groups;
    const uint32_t groups = __ballot_sync(kAll, chosen);
    const bool enough = __all_sync(kAll, !chosen || group_key > kMinusInfinityKey);
    if (kSlotGroups && p.group_experts == 32) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j)
            if (!(groups >> (j & 31) & 1)) keys[j] = kNever;
    } else {
        uint32_t group = lane / p.group_experts, offset = lane % p.group_experts;
        const uint32_t whole = 32 / p.group_experts, rest = 32 % p.group_experts;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            if (!(groups >> (group & 31) & 1)) keys[j] = kNever;
            group += whole;
            offset += rest;
            if (offset >= p.group_experts) offset -= p.group_experts, ++group;
        }
    }
    return enough;
}

// Keys of a token are in lane's slots: expert j * 32 + lane in slot j.
template <int kSlots>
__device__ __forceinline__ void select(const RouterParams& p, uint32_t token, uint32_t (&keys)[kSlots], uint32_t dropped,
                                       SelectionMemory& m) {
    const uint32_t lane = threadIdx.x % 32, k = p.top_k;
    if (p.groups > 1 || p.selection == kMany) {
        const bool enough = select_groups<kSlots>(p, keys);
        if (p.selection == kMany && !enough) {
            if (lane < k) {
                p.ids[token * k + lane] = lane;
                p.weights[token * k + lane] = 1.0f / static_cast<float>(k);
            }
            return;
        }
    }
    if (p.selection == kMany) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j)
            if (keys[j] <= kMinusInfinityKey || dropped >> j & 1) keys[j] = kNever;
    }

    // The k-th best of the lanes' best bounds the k-th best of all from below: few candidates are left.
    uint32_t best_key = kNever, best_slot = 0;
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
        if (keys[j] > best_key) best_key = keys[j], best_slot = j;
    const uint64_t best = composite(best_key, best_slot * 32 + lane);
    uint64_t* order = reinterpret_cast<uint64_t*>(m.order);
    order[lane] = best;
    __syncwarp();
    const uint32_t rank = rank_among(m.order, 32, best);
    const uint64_t bound = __shfl_sync(kAll, best, __ffs(__ballot_sync(kAll, rank == k - 1)) - 1);
    __syncwarp();

    // Of equal keys, experts up to the bound's: in this lane, slots up to a last one.
    const uint32_t bound_key = bound >> 32, bound_expert = ~static_cast<uint32_t>(bound);
    const int last_slot = bound_expert >= lane ? static_cast<int>((bound_expert - lane) / 32) : -1;
    const uint32_t before = (1u << lane) - 1;
    uint32_t candidates = 0;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const bool stays = keys[j] != kNever && (keys[j] > bound_key || (keys[j] == bound_key && j <= last_slot));
        const uint32_t stay = __ballot_sync(kAll, stays);
        const uint32_t at = candidates + __popc(stay & before);
        if (stays && at < 32) order[at] = composite(keys[j], j * 32 + lane);
        candidates += __popc(stay);
    }
    __syncwarp();
    if (candidates <= 32) {
        // A composite of an odd last pair: below all others.
        if (lane == 0 && candidates % 2 == 1) order[candidates] = 0;
        __syncwarp();
        if (lane < candidates) {
            const uint64_t mine = order[lane];
            const uint32_t place = rank_among(m.order, candidates, mine);
            if (place < k) m.winners[place] = ~static_cast<uint32_t>(mine);
        }
    } else {
        // Many candidates: one after the other.
        for (uint32_t place = 0; place < k; ++place) {
            uint32_t key = kNever, slot = 0;
#pragma unroll
            for (int j = 0; j < kSlots; ++j)
                if (keys[j] > key) key = keys[j], slot = j;
            const uint32_t top = __reduce_max_sync(kAll, key);
            const uint32_t expert = slot * 32 + lane;
            const uint32_t winner = __reduce_min_sync(kAll, key == top ? expert : kAll);
            if (key == top && expert == winner) {
                m.winners[place] = expert;
#pragma unroll
                for (int j = 0; j < kSlots; ++j)
                    if (j == static_cast<int>(slot)) keys[j] = kNever;
            }
        }
        candidates = k;
    }
    __syncwarp();

    // Fewer candidates than places: expert 0 takes the rest.
    const bool filled = lane < min(candidates, k);
    const uint32_t expert = filled ? m.winners[lane] : 0;
    float score = 0.0f;
    if (lane < k) {
        score = load_f32(reinterpret_cast<const float*>(p.scratch + static_cast<uint64_t>(token) * p.gate.experts + expert));
        if (p.selection == kMany) score = fabsf(score);
    }
    float weight;
    if (p.selection == kMany) {
        float scale = static_cast<float>(p.scaling);
        if (p.renormalize) scale = scale / (1e-20f + warp_sum(score));
        weight = score * scale;
    } else {
        weight = static_cast<float>(score * p.scaling);
        if (p.renormalize) {
            const float sum = warp_sum(score);
            // 1e-20 is lost in the double sum of anything larger, and a quotient of floats is the same in both precisions.
            weight = sum > 1e-3f ? __fdiv_rn(weight, sum) : static_cast<float>(weight / (static_cast<double>(sum) + 1e-20));
        }
    }
    if (lane < k) {
        p.ids[token * k + lane] = static_cast<int32_t>(expert);
        p.weights[token * k + lane] = weight;
    }
    __syncwarp();
}

// Turns the logits of a token into scores and keys, in place. Each lane reads them back where it wrote them.
template <int kSlots>
__device__ __forceinline__ void softmax(const RouterParams& p, uint2* row) {
    const uint32_t lane = threadIdx.x % 32;
    float values[kSlots], top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        values[j] = j * 32 + lane < p.gate.experts ? load_f32(reinterpret_cast<const float*>(row + j * 32 + lane)) : -INFINITY;
        top = fmaxf(top, values[j]);
    }
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

template <int kSlots>
__device__ __forceinline__ void select_tokens(const RouterParams& p, SelectionMemory& memory) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t token = threadIdx.x / 32; token < p.gate.tokens; token += kGateWarps) {
        uint2* row = p.scratch + static_cast<uint64_t>(token) * p.gate.experts;
        if (p.scoring == kSoftmax) softmax<kSlots>(p, row);
        uint32_t keys[kSlots], dropped = 0;
        constexpr int kInFlight = kSlots < 16 ? kSlots : 16;
#pragma unroll
        for (int first = 0; first < kSlots; first += kInFlight) {
            uint2 entries[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                entries[i] = make_uint2(0, kNever);
                const uint32_t expert = (first + i) * 32 + lane;
                if (expert < p.gate.experts) entries[i] = load_8(row + expert);
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                keys[first + i] = entries[i].y;
                dropped |= entries[i].x >> 31 << (first + i);
            }
        }
        select<kSlots>(p, token, keys, dropped, memory);
    }
}

// ---- The kernel ------------------------------------------------------------------------------------------------------

template <int kTiles>
constexpr int kTileFloats = kTiles * kGateTokens * kGatePitch;

template <int kTiles>
struct RouterMemory {
    union {
        float warps[kGateWarps][kTileFloats<kTiles>];
        SelectionMemory selection[kGateWarps];
    };
    float blocks[kMaxClusterBlocks][kTileFloats<kTiles>];
    uint32_t last;
};

template <typename Weight, int kTiles, bool kAligned, int kBatch>
__device__ __forceinline__ void route(const RouterParams& p) {
    __shared__ RouterMemory<kTiles> memory;
    const uint32_t cluster = blockIdx.x / p.cluster, rank = blockIdx.x % p.cluster;
    const uint32_t first_expert = cluster * kGateRows, warp = threadIdx.x / 32;
    // Says that this block runs, so that its shared memory may be written.
    cluster_arrive_relaxed();
    // A bias is a weight: no kernel before writes it.
    const uint32_t row = threadIdx.x % kGateRows;
    float bias = 0.0f;
    if (p.bias && first_expert + row < p.gate.experts) bias = load_f32(p.bias + first_expert + row);

    GateSums<kTiles> sums;
    gate_slice<Weight, kTiles, kAligned, kBatch>(p.gate, first_expert, rank * kGateWarps + warp, p.cluster * kGateWarps, sums);
    launch_dependent_grids();
    store_warp_sums<kTiles>(sums, &memory.warps[0][0]);
    __syncthreads();
    cluster_wait();
    constexpr int kValues = kTiles * kGateTokens * kGateRows;
#pragma unroll
    for (int first = 0; first < kValues; first += kGateThreads) {
        const uint32_t value = first + threadIdx.x;
        const uint32_t at = value / kGateRows * kGatePitch + row;
        if (kValues >= kGateThreads || value < kValues) {
            float sum = memory.warps[0][at];
#pragma unroll
            for (int w = 1; w < kGateWarps; ++w) sum += memory.warps[w][at];
            store_to_first_block(&memory.blocks[rank][at], sum);
        }
    }
    cluster_arrive();
    if (rank != 0) return;
    cluster_wait();

#pragma unroll
    for (int first = 0; first < kValues; first += kGateThreads) {
        const uint32_t value = first + threadIdx.x;
        const uint32_t token = value / kGateRows, expert = first_expert + row;
        const uint32_t at = token * kGatePitch + row;
        if (token < p.gate.tokens && expert < p.gate.experts) {
            float logit = memory.blocks[0][at];
            for (uint32_t b = 1; b < p.cluster; ++b) logit += memory.blocks[b][at];
            if (p.logits_bf16) logit = round_to_bf16(logit);
            if (p.logits) {
                const int64_t to = token * p.logits_row + expert;
                if (p.logits_bf16) {
                    reinterpret_cast<uint16_t*>(p.logits)[to] = static_cast<uint16_t>(__float_as_uint(logit) >> 16);
                } else {
                    reinterpret_cast<float*>(p.logits)[to] = logit;
                }
            }
            uint2 entry = scored(p, logit, bias);
            store_8(p.scratch + static_cast<uint64_t>(token) * p.gate.experts + expert, entry);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t clusters = gridDim.x / p.cluster;
        uint32_t before;
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(moe_router_tickets + p.ticket), "r"(clusters - 1)
                     : "memory");
        memory.last = before == clusters - 1;
    }
    __syncthreads();
    if (!memory.last) return;
    SelectionMemory& mine = memory.selection[warp];
    if (p.gate.experts <= 384) {
        select_tokens<12>(p, mine);
    } else {
        select_tokens<32>(p, mine);
    }
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

}  // namespace
}  // namespace hotpath
