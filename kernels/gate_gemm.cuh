// The gate of a mixture of experts for a few tokens: logits = hidden @ weight^T with bf16 activations, fp32 sums, on the
// tensor cores. Memory-bound: the weight is read once, straight into the registers that the instruction wants.
//
// A cluster of blocks computes kGateRows experts (rows of the weight) for all tokens; its blocks and their warps split K.
// In a step a warp multiplies 16 experts by 32 values of K: every thread loads 16 bytes (8 values) of two experts and of a token,
// which are its operands of two m16n8k16 instructions. Which of the 32 values an operand's register holds does not
// matter as long as weight and activation agree.
#pragma once

#include "cluster.cuh"

namespace hotpath {

constexpr int kGateRows = 16;        // experts of a cluster
constexpr int kGateThreads = 256;
constexpr int kGateWarps = kGateThreads / 32;
constexpr int kGateWarpsLog2 = 3;
constexpr int kGateStep = 32;        // values of K
constexpr int kGateTokens = 8;       // of a tile: the instruction's n
constexpr int kGatePitch = 20;       // floats from token to token of a tile in shared memory: no bank conflicts
constexpr int kMaxClusterBlocks = 8;

struct GateOperands {
    const uint8_t* x;       // [tokens, k] bf16
    const uint8_t* weight;  // [experts, k] bf16 or fp32
    int64_t x_row, weight_row;  // bytes
    uint32_t tokens, experts, k;
};

// Eight values from `address`, of which the alignment may be that of one element only.
template <bool kAligned>
__device__ __forceinline__ uint4 load_eight_bf16_if(bool condition, const uint8_t* address) {
    if constexpr (kAligned) {
        return load_16_if(condition, address);
    } else {
        uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = load_u16_if(condition, address + 2 * i);
        return make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16, w[6] | w[7] << 16);
    }
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight weights of an expert as loaded.
template <typename Weight>
struct Eight;

template <>
struct Eight<uint16_t> {  // bf16
    uint4 bits;

    template <bool kAligned>
    __device__ __forceinline__ void load_if(bool condition, const uint8_t* row, uint32_t column) {
        bits = load_eight_bf16_if<kAligned>(condition, row + static_cast<int64_t>(column) * 2);
    }
};

template <>
struct Eight<float> {
    uint4 low, high;

    template <bool kAligned>
    __device__ __forceinline__ void load_if(bool condition, const uint8_t* row, uint32_t column) {
        const uint8_t* at = row + static_cast<int64_t>(column) * 4;
        if constexpr (kAligned) {
            low = load_16_if(condition, at);
            high = load_16_if(condition, at + 16);
        } else {
            uint32_t w[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) w[i] = load_u32_if(condition, at + 4 * i);
            low = make_uint4(w[0], w[1], w[2], w[3]);
            high = make_uint4(w[4], w[5], w[6], w[7]);
        }
    }
};

template <int kTiles>
using GateSums = float[kTiles][4];

template <int kTiles>
__device__ __forceinline__ void multiply(GateSums<kTiles>& sums, const Eight<uint16_t>& upper, const Eight<uint16_t>& lower,
                                         const uint4 (&x)[kTiles]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        mma_bf16(sums[t], upper.bits.x, lower.bits.x, upper.bits.y, lower.bits.y, x[t].x, x[t].y);
        mma_bf16(sums[t], upper.bits.z, lower.bits.z, upper.bits.w, lower.bits.w, x[t].z, x[t].w);
    }
}

// An fp32 number is the sum of three bf16: the 8 upper, middle and lower bits of its significand. Takes the upper part off
// two numbers and returns it. What is not finite is all upper part.
__device__ __forceinline__ uint32_t take_upper_bf16(float& a, float& b) {
    const uint32_t a_bits = __float_as_uint(a) & 0xFFFF0000u;
    const uint32_t b_bits = __float_as_uint(b) & 0xFFFF0000u;
    // A NaN whose payload lies below: keep it NaN.
    const uint32_t a_word = a != a ? 0x7FC00000u : a_bits;
    const uint32_t b_word = b != b ? 0x7FC00000u : b_bits;
    a = (a_bits & 0x7F800000u) == 0x7F800000u ? 0.0f : a - __uint_as_float(a_bits);
    b = (b_bits & 0x7F800000u) == 0x7F800000u ? 0.0f : b - __uint_as_float(b_bits);
    return __byte_perm(a_word, b_word, 0x7632);
}

// Two bf16 values, zero in place of one that is not finite.
__device__ __forceinline__ uint32_t finite_or_zero(uint32_t two) { return two & __vcmpne2(two & 0x7F807F80u, 0x7F807F80u); }

template <int kTiles>
__device__ __forceinline__ void multiply(GateSums<kTiles>& sums, const Eight<float>& upper, const Eight<float>& lower,
                                         const uint4 (&x)[kTiles]) {
    float u[8] = {__uint_as_float(upper.low.x), __uint_as_float(upper.low.y), __uint_as_float(upper.low.z), __uint_as_float(upper.low.w),
                  __uint_as_float(upper.high.x), __uint_as_float(upper.high.y), __uint_as_float(upper.high.z), __uint_as_float(upper.high.w)};
    float l[8] = {__uint_as_float(lower.low.x), __uint_as_float(lower.low.y), __uint_as_float(lower.low.z), __uint_as_float(lower.low.w),
                  __uint_as_float(lower.high.x), __uint_as_float(lower.high.y), __uint_as_float(lower.high.z), __uint_as_float(lower.high.w)};
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        Eight<uint16_t> upper_part, lower_part;
        upper_part.bits = make_uint4(take_upper_bf16(u[0], u[1]), take_upper_bf16(u[2], u[3]), take_upper_bf16(u[4], u[5]),
                                     take_upper_bf16(u[6], u[7]));
        lower_part.bits = make_uint4(take_upper_bf16(l[0], l[1]), take_upper_bf16(l[2], l[3]), take_upper_bf16(l[4], l[5]),
                                     take_upper_bf16(l[6], l[7]));
        if (part == 0) {
            multiply<kTiles>(sums, upper_part, lower_part, x);
        } else {
            // The upper part has made infinity or NaN of what is not finite; a part that is zero would make NaN of infinity.
            uint4 finite[kTiles];
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
                finite[t] = make_uint4(finite_or_zero(x[t].x), finite_or_zero(x[t].y), finite_or_zero(x[t].z), finite_or_zero(x[t].w));
            multiply<kTiles>(sums, upper_part, lower_part, finite);
        }
    }
}

// Steps of K of a warp, from `begin` to before `end`: slice `slice` of 2^`slices_log2`.
struct GateSteps {
    uint32_t begin, end;

    __device__ __forceinline__ GateSteps(const GateOperands& p, uint32_t slice, uint32_t slices_log2) {
        const uint32_t steps = (p.k + kGateStep - 1) / kGateStep;
        begin = slice * steps >> slices_log2, end = (slice + 1) * steps >> slices_log2;
    }
};

// The warp's share of the logits of a cluster's experts: slice `slice` of 2^`slices_log2` of K. Weights of the first steps are
// on their way before the wait for the grid that computes x.
template <typename Weight, int kTiles, bool kAligned, int kBatch>
__device__ __forceinline__ void gate_slice(const GateOperands& p, uint32_t first_expert, uint32_t slice, uint32_t slices_log2,
                                           GateSums<kTiles>& sums) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 8;
    const GateSteps steps(p, slice, slices_log2);
    const uint32_t begin = steps.begin, end = steps.end;
    const uint32_t upper = first_expert + row, lower = upper + 8;
    const uint8_t* upper_row = p.weight + upper * p.weight_row;
    const uint8_t* lower_row = p.weight + lower * p.weight_row;
    const uint8_t* x_rows[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) x_rows[t] = p.x + static_cast<int64_t>(t * kGateTokens + row) * p.x_row;

    Eight<Weight> weights[2][kBatch];
    const auto load_weights = [&](uint32_t step) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const uint32_t at = (step + i) * kGateStep + column;
            const bool inside = step + i < end && at < p.k;
            weights[0][i].template load_if<kAligned>(inside && upper < p.experts, upper_row, at);
            weights[1][i].template load_if<kAligned>(inside && lower < p.experts, lower_row, at);
        }
    };
#pragma unroll
    for (int t = 0; t < kTiles; ++t) sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0.0f;

    load_weights(begin);
    wait_for_prior_grids();
    for (uint32_t step = begin; step < end; step += kBatch) {
        uint4 x[kBatch][kTiles];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const uint32_t at = (step + i) * kGateStep + column;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const bool inside = step + i < end && at < p.k && t * kGateTokens + row < p.tokens;
                x[i][t] = load_eight_bf16_if<kAligned>(inside, x_rows[t] + static_cast<int64_t>(at) * 2);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply<kTiles>(sums, weights[0][i], weights[1][i], x[i]);
        if (step + kBatch < end) load_weights(step + kBatch);
    }
}

// As gate_slice() for one tile of aligned operands, with as little as can be between the wait and the sums. `before_wait` is run when the
// first weights are on their way.
template <typename Weight, int kBatch, typename BeforeWait>
__device__ __forceinline__ void gate_slice_few(const GateOperands& p, uint32_t first_expert, uint32_t slice, uint32_t slices_log2, GateSums<1>& sums,
                                               const BeforeWait& before_wait) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 8;
    GateSteps steps(p, slice, slices_log2);
    // The thread's values of the last step may lie behind K.
    const uint32_t end = min(steps.end, (p.k + kGateStep - 1 - column) / kGateStep);
    const uint32_t upper = first_expert + row, lower = upper + 8;
    const uint32_t upper_end = upper < p.experts ? end : 0, lower_end = lower < p.experts ? end : 0, x_end = row < p.tokens ? end : 0;
    uint32_t step = steps.begin;
    const int64_t first_value = static_cast<int64_t>(step) * kGateStep + column;
    constexpr int kStepBytes = kGateStep * sizeof(Weight);
    const uint8_t* upper_at = p.weight + upper * p.weight_row + first_value * static_cast<int64_t>(sizeof(Weight));
    const uint8_t* lower_at = p.weight + lower * p.weight_row + first_value * static_cast<int64_t>(sizeof(Weight));
    const uint8_t* x_at = p.x + row * p.x_row + first_value * 2;

    Eight<Weight> weights[2][kBatch];
    const auto load_weights = [&] {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            weights[0][i].template load_if<true>(step + i < upper_end, upper_at + i * kStepBytes, 0);
            weights[1][i].template load_if<true>(step + i < lower_end, lower_at + i * kStepBytes, 0);
        }
    };
    sums[0][0] = sums[0][1] = sums[0][2] = sums[0][3] = 0.0f;
    load_weights();
    before_wait();
    wait_for_prior_grids();
    while (true) {
        uint4 x[kBatch][1];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i][0] = load_16_if(step + i < x_end, x_at + i * kGateStep * 2);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply<1>(sums, weights[0][i], weights[1][i], x[i]);
        step += kBatch;
        if (step >= steps.end) break;
        upper_at += kBatch * kStepBytes;
        lower_at += kBatch * kStepBytes;
        x_at += kBatch * kGateStep * 2;
        load_weights();
    }
}

// ---- Sums over the warps of a block and the blocks of a cluster -------------------------------------------------------
// Tiles in shared memory are [token][kGatePitch], of which kGateRows are used. Value v of a tile is expert v % kGateRows of token
// v / kGateRows.

template <int kTiles>
constexpr int kGateValues = kTiles * kGateTokens * kGateRows;
template <int kTiles>
constexpr int kTileFloats = kTiles * kGateTokens * kGatePitch;

template <int kTiles>
using WarpSums = float[kGateWarps][kTileFloats<kTiles>];

// Of the first block: the sums of every block of the cluster.
template <int kTiles>
struct BlockSums {
    float tiles[kMaxClusterBlocks][kTileFloats<kTiles>];
    uint64_t arrived;
};

__device__ __forceinline__ uint32_t place_in_tile(uint32_t value) { return value / kGateRows * kGatePitch + value % kGateRows; }

// By every thread of every block of the cluster, first of all. `more` bytes of something else come with the sums.
template <int kTiles>
__device__ __forceinline__ void expect_block_sums(BlockSums<kTiles>& sums, uint32_t blocks, uint32_t more = 0) {
    if (threadIdx.x == 0) init_barrier(&sums.arrived);
    __syncwarp();
    if (threadIdx.x == 0) expect_bytes(&sums.arrived, blocks * kGateValues<kTiles> * sizeof(float) + more);
    // Says that this block runs, so that its shared memory may be written; init_barrier() says that its barrier is there.
    cluster_arrive_relaxed();
}

template <int kTiles>
__device__ __forceinline__ void store_warp_sums(const GateSums<kTiles>& sums, WarpSums<kTiles>& warps) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, token = lane % 4 * 2;
    float* mine = warps[threadIdx.x / 32];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        float* at = mine + (t * kGateTokens + token) * kGatePitch + row;
        at[0] = sums[t][0];
        at[kGatePitch] = sums[t][1];
        at[8] = sums[t][2];
        at[kGatePitch + 8] = sums[t][3];
    }
}

// Adds the sums of the block's warps and sends them to the first block of the cluster, all of whose blocks run.
template <int kTiles>
__device__ __forceinline__ void send_stored_sums(const WarpSums<kTiles>& warps, BlockSums<kTiles>& blocks, uint32_t rank) {
    constexpr int kValues = kGateValues<kTiles>;
    const uint32_t barrier = address_in_block(&blocks.arrived, 0);
#pragma unroll
    for (int first = 0; first < kValues; first += kGateThreads) {
        const uint32_t value = first + threadIdx.x, at = place_in_tile(value);
        if (kValues >= kGateThreads || value < kValues) {
            float sum = warps[0][at];
#pragma unroll
            for (int w = 1; w < kGateWarps; ++w) sum += warps[w][at];
            store_async(address_in_block(&blocks.tiles[rank][at], 0), sum, barrier);
        }
    }
}

template <int kTiles>
__device__ __forceinline__ void send_block_sums(const GateSums<kTiles>& sums, WarpSums<kTiles>& warps, BlockSums<kTiles>& blocks,
                                                uint32_t rank) {
    store_warp_sums<kTiles>(sums, warps);
    __syncthreads();
    cluster_wait();
    send_stored_sums<kTiles>(warps, blocks, rank);
}

// In the first block, after wait_for_bytes(): a value's sum over the cluster, always in the same order.
template <int kTiles>
__device__ __forceinline__ float sum_of_blocks(const BlockSums<kTiles>& sums, uint32_t value, uint32_t blocks) {
    const uint32_t at = place_in_tile(value);
    float parts[kMaxClusterBlocks];
#pragma unroll
    for (int b = 0; b < kMaxClusterBlocks; ++b) parts[b] = b < static_cast<int>(blocks) ? sums.tiles[b][at] : 0.0f;
    float sum = parts[0];
#pragma unroll
    for (int b = 1; b < kMaxClusterBlocks; ++b) sum += parts[b];
    return sum;
}

// `index` in elements; a bf16 logit is rounded already.
__device__ __forceinline__ void store_logit(uint8_t* logits, int64_t index, float logit, uint32_t bf16) {
    if (bf16) {
        reinterpret_cast<uint16_t*>(logits)[index] = static_cast<uint16_t>(__float_as_uint(logit) >> 16);
    } else {
        reinterpret_cast<float*>(logits)[index] = logit;
    }
}

}  // namespace hotpath
