// Router logits of a mixture of experts and the NVFP4 activations of its layer, in one launch, for a few tokens.
// Argument meaning and checks: src/ops/moe_fp4_preamble/mod.rs. How it works: docs/kernels/moe_fp4_preamble.md.
//
// The first clusters of the grid compute the logits of 16 experts each (gate_gemm.cuh) and read the weight, 2 K bytes an expert, which
// is what takes the time. The thread blocks of the other clusters quantise, a thread 16 elements (32 bytes in, 9 out), or zero the
// scales of padding rows. Both parts read the activations, from L2 after the first; neither waits for the other. In one
// grid, to save the second launch. The quantiser's blocks are given the gate's shared memory, too, which is static: up to 40 KiB, and
// registers, not that, bound how many blocks a multiprocessor holds.
#include "gate_gemm.cuh"
#include "nvfp4.cuh"

namespace hotpath {
namespace {

// Host twin: src/ops/moe_fp4_preamble/cuda.rs, PreambleParams.
struct PreambleParams {
    GateOperands gate;
    OutputParams out;
    uint8_t* logits;
    int64_t logits_row;     // elements
    FastDiv scale_cols;
    uint32_t cols;            // blocks of 16 of a row
    uint32_t units;           // tokens * scale_cols
    uint32_t gate_blocks;     // thread blocks, a multiple of those of a cluster
    uint32_t quant_blocks;    // behind them
    uint32_t padding_blocks;  // behind those: zero padding rows; what is left of the last cluster has nothing to do
    uint32_t cluster_log2;
    uint32_t logits_bf16;
};
static_assert(sizeof(PreambleParams) == 136, "the host's twin has this size");

template <bool kAligned>
__device__ __forceinline__ void quantize_tokens(const PreambleParams& p) {
    const uint32_t block = blockIdx.x - p.gate_blocks;
    wait_for_prior_grids();
    if (block >= p.quant_blocks) {
        launch_dependent_grids();
        const uint32_t padding = block - p.quant_blocks;
        if (padding < p.padding_blocks) zero_padding(p.out, p.gate.tokens, padding);
        return;
    }
    const uint32_t unit = block * kGateThreads + threadIdx.x;
    const uint32_t token = p.scale_cols.divide(unit), col = unit - token * p.scale_cols.divisor;
    const bool inside = unit < p.units, live = inside && col < p.cols;
    Sixteen x;
    float global_scale;
    if (live) {
        x = load_sixteen<kAligned>(p.gate.x + static_cast<int64_t>(token) * p.gate.x_row + static_cast<int64_t>(col) * (kBlock * 2));
        global_scale = load_f32(p.out.global_scale);
    }
    // The next kernel waits for the end of this one before it touches memory.
    launch_dependent_grids();
    if (live) {
        store_quantized<Bf16Pair>(p.out, x, token, col, p.cols, global_scale, rcp_approx(global_scale));
    } else if (inside) {
        store_byte(p.out.scales + scale_offset(p.out.layout, token, col, p.out.scale_cols), 0);
    }
}

template <int kTiles, bool kAligned, int kBatch>
__device__ __forceinline__ void preamble(const PreambleParams& p) {
    if (blockIdx.x >= p.gate_blocks) {
        quantize_tokens<kAligned>(p);
        return;
    }
    __shared__ WarpSums<kTiles> warps;
    __shared__ BlockSums<kTiles> block_sums;
    const uint32_t blocks = 1u << p.cluster_log2, cluster = blockIdx.x >> p.cluster_log2, rank = blockIdx.x & (blocks - 1);
    const uint32_t first_expert = cluster * kGateRows, warp = threadIdx.x / 32;
    expect_block_sums<kTiles>(block_sums, blocks);

    GateSums<kTiles> sums;
    gate_slice<uint16_t, kTiles, kAligned, kBatch>(p.gate, first_expert, rank * kGateWarps + warp, p.cluster_log2 + kGateWarpsLog2, sums);
    launch_dependent_grids();
    send_block_sums<kTiles>(sums, warps, block_sums, rank);
    if (rank != 0) return;

    wait_for_bytes(&block_sums.arrived);
#pragma unroll
    for (int first = 0; first < kGateValues<kTiles>; first += kGateThreads) {
        const uint32_t value = first + threadIdx.x;
        const uint32_t token = value / kGateRows, expert = first_expert + value % kGateRows;
        if (token < p.gate.tokens && expert < p.gate.experts) {
            float logit = sum_of_blocks<kTiles>(block_sums, value, blocks);
            if (p.logits_bf16) logit = round_to_bf16(logit);
            store_logit(p.logits, token * p.logits_row + expert, logit, p.logits_bf16);
        }
    }
}

#define HOTPATH_PREAMBLE(NAME, TILES, ALIGNED, BATCH)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kGateThreads, 2) moe_fp4_preamble_##NAME(const __grid_constant__ PreambleParams p) { \
        preamble<TILES, ALIGNED, BATCH>(p);                                                                                            \
    }
HOTPATH_PREAMBLE(8, 1, true, 4)
HOTPATH_PREAMBLE(16, 2, true, 4)
HOTPATH_PREAMBLE(32, 4, true, 2)
HOTPATH_PREAMBLE(any, 4, false, 1)

}  // namespace
}  // namespace hotpath
