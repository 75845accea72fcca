// NVFP4 quantisation of activations, alone and fused with what stands before it: SiLU and multiply, add and RMSNorm.
// Argument meaning and checks: src/ops/nvfp4_quant/mod.rs. Numerics and layouts: nvfp4.cuh.
//
// In each kernel a thread owns whole blocks of 16 elements, and the last thread blocks of the grid zero the scales of
// the padding rows, so that one launch defines every byte.
#include "nvfp4.cuh"

namespace hotpath {
namespace {

constexpr int kThreads = 128;  // of a block of the kernels that do not reduce

// Host twin: src/ops/nvfp4_quant/cuda.rs, QuantParams. Strides in bytes.
struct QuantParams {
    OutputParams out;
    const uint8_t* x;
    const int32_t* row_counts;  // of each expert; null: all rows
    int64_t x_row, x_expert;
    uint64_t units;             // experts * rows * scale_cols
    uint64_t rows;              // of an expert
    uint64_t expert_scales;     // bytes of an expert's scales
    uint64_t live_blocks;       // thread blocks before those that zero padding rows
    FastDiv scale_cols, expert_rows, padding_pieces;
    uint32_t cols;              // blocks of a row
    uint32_t experts;
    uint32_t global_scale_step; // 1: one global scale an expert
};
static_assert(sizeof(QuantParams) == 144, "the host's twin has this size");

__device__ __forceinline__ uint64_t divide(const FastDiv& by, uint64_t n) {
    return n < (1ull << 31) ? by.divide(static_cast<uint32_t>(n)) : n / by.divisor;
}

// Of a bf16 gate, approximate instructions suffice: rounded to bf16, the result is that of expf and division for each of
// the 65,536 gates (tests/test_nvfp4_quant_gpu.py). The quarters keep the reciprocal of e^88 from underflow.
template <class Pair>
__device__ __forceinline__ float silu(float x) {
    if constexpr (Pair::kRoundsToEightBits) {
        float e;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.4426950408889634f)));
        return __fmul_rn(__fmul_rn(x, 0.25f), rcp_approx(__fmaf_rn(e, 0.25f, 0.25f)));
    } else {
        return __fdiv_rn(x, 1.0f + expf(-x));
    }
}

// silu(gate) is rounded to the dtype before the product, as in vLLM's silu_and_mul.
template <class Pair>
__device__ __forceinline__ Sixteen silu_mul(const Sixteen& gate, const Sixteen& up) {
    Sixteen out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 g = Pair::floats(gate.w[i]), u = Pair::floats(up.w[i]);
        const float2 activated = Pair::floats(Pair::round(silu<Pair>(g.x), silu<Pair>(g.y)));
        out.w[i] = Pair::round(__fmul_rn(activated.x, u.x), __fmul_rn(activated.y, u.y));
    }
    return out;
}

// A thread takes kUnits blocks of 16, kThreads apart. Reads 32 bytes a block (64 with kSilu) and writes 9.
template <class Pair, bool kSilu, bool kVector, int kUnits>
__device__ __forceinline__ void quantize(const QuantParams& p) {
    wait_for_prior_grids();
    if (blockIdx.x >= p.live_blocks) {
        launch_dependent_grids();
        const uint64_t index = (blockIdx.x - p.live_blocks) * kThreads + threadIdx.x;
        const uint64_t expert = divide(p.padding_pieces, index);
        if (expert < p.experts) {
            zero_padding_rows(p.out.scales + expert * p.expert_scales, p.out.layout, p.rows, p.out.scale_cols,
                              static_cast<uint32_t>(index - expert * p.padding_pieces.divisor));
        }
        return;
    }
    Sixteen x[kUnits], up[kSilu ? kUnits : 1];
    float global_scale[kUnits];
    uint64_t row[kUnits], at[kUnits];
    uint32_t col[kUnits];
    bool live[kUnits], inside[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const uint64_t unit = (static_cast<uint64_t>(blockIdx.x) * kUnits + i) * kThreads + threadIdx.x;
        row[i] = divide(p.scale_cols, unit);
        col[i] = static_cast<uint32_t>(unit - row[i] * p.scale_cols.divisor);
        inside[i] = unit < p.units;
        uint64_t expert = 0, local = row[i];
        if constexpr (kSilu) {
            if (p.experts > 1 || p.row_counts) {
                expert = divide(p.expert_rows, row[i]);
                local = row[i] - expert * p.rows;
                if (inside[i] && p.row_counts) inside[i] = static_cast<int64_t>(local) < p.row_counts[expert];
            }
        }
        live[i] = inside[i] && col[i] < p.cols;
        at[i] = expert * p.expert_scales + scale_offset(p.out.layout, local, col[i], p.out.scale_cols);
        if (live[i]) {
            const uint8_t* from = p.x + static_cast<int64_t>(expert) * p.x_expert + static_cast<int64_t>(local) * p.x_row + col[i] * (kBlock * 2);
            x[i] = load_sixteen<kVector>(from);
            if constexpr (kSilu) up[i] = load_sixteen<kVector>(from + static_cast<uint64_t>(p.cols) * (kBlock * 2));
            global_scale[i] = load_f32(p.out.global_scale + expert * p.global_scale_step);
        }
    }
    launch_dependent_grids();
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        uint32_t scale = 0;
        if (live[i]) {
            if constexpr (kSilu) x[i] = silu_mul<Pair>(x[i], up[i]);
            const uint2 codes = quantize_block<Pair>(x[i], global_scale[i], rcp_approx(global_scale[i]), scale);
            store_8(p.out.packed + (row[i] * p.cols + col[i]) * 8, codes);
        }
        if (inside[i]) store_byte(p.out.scales + at[i], scale);
    }
}

// ---- Add and RMSNorm -----------------------------------------------------------------------------------------------
// The sum of squares is taken in the order of vLLM's fused_add_rms_norm, because the rounded result depends on it:
// thread t of `lanes` sums the 8-element vectors t, t + lanes, ...; then a tree over the lanes of each warp, neighbours
// first; then warp after warp. Lanes are 1024, or 256 from 256 rows on. Here a thread owns 16 elements, which are the
// vectors of two such lanes, and half a warp stands for one of those warps.

// Host twin: src/ops/nvfp4_quant/cuda.rs, NormParams. Strides in bytes.
struct NormParams {
    OutputParams out, second;  // second.packed null: none
    const uint8_t* x;
    uint8_t* residual;
    const uint8_t* weight;
    uint8_t* norm;  // null: not wanted
    int64_t x_row, residual_row, norm_row;
    uint64_t rows;
    uint32_t cols;  // blocks of a row
    uint32_t padding_blocks, second_padding_blocks;
    float eps;
};
static_assert(sizeof(NormParams) == 144, "the host's twin has this size");

template <class Pair>
__device__ __forceinline__ float sum_of_squares(const uint32_t* words) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = Pair::floats(words[i]);
        sum = __fadd_rn(sum, __fmaf_rn(two.x, two.x, __fmul_rn(two.y, two.y)));
    }
    return sum;
}

// 1 / rms of a row from every thread's two partial sums. The first kLanes / 2 threads have them; threads without an
// element may be absent, in whole warps.
template <int kLanes>
__device__ __forceinline__ float inverse_rms(float even, float odd, uint32_t hidden, float eps) {
    constexpr int kWarps = kLanes / 32;
    __shared__ float warps[kWarps];
    float sum = __fadd_rn(even, odd);
#pragma unroll
    for (int offset = 1; offset < 16; offset *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, offset));
    if (threadIdx.x % 16 == 0 && threadIdx.x < kLanes / 2) warps[threadIdx.x / 16] = sum;
    __syncthreads();
    float total = warps[0];
    const uint32_t used = blockDim.x / 16;
#pragma unroll
    for (uint32_t i = 1; i < kWarps; ++i) {
        if (i < used) total = __fadd_rn(total, warps[i]);
    }
    return rsqrtf(__fadd_rn(__fdiv_rn(total, static_cast<float>(hidden)), eps));
}

template <class Pair>
__device__ __forceinline__ Sixteen normalize(const Sixteen& x, const Sixteen& weight, float factor) {
    Sixteen out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 v = Pair::floats(x.w[i]), w = Pair::floats(weight.w[i]);
        out.w[i] = Pair::round(__fmul_rn(__fmul_rn(v.x, factor), w.x), __fmul_rn(__fmul_rn(v.y, factor), w.y));
    }
    return out;
}

// One row a thread block of kParts * kLanes / 2 threads at most. With kHeld > 0 a thread holds its kHeld blocks of 16 in
// registers, and the second of two parts hands its sums to the first, to be added last. With 0 it takes any number of
// blocks and reads back the sums that it stored. Reads 4 bytes an element and the weight, writes 2.56, or 4.56 with the
// normalised value.
template <class Pair, int kLanes, int kHeld, int kParts, bool kVector>
__device__ __forceinline__ void add_rms_norm(const NormParams& p) {
    constexpr int kStep = kLanes / 2;
    wait_for_prior_grids();
    if (blockIdx.x >= p.rows) {
        launch_dependent_grids();
        const uint64_t block = blockIdx.x - p.rows;
        if (block < p.padding_blocks) {
            zero_padding(p.out, p.rows, block);
        } else {
            zero_padding(p.second, p.rows, block - p.padding_blocks);
        }
        return;
    }
    const uint64_t row = blockIdx.x;
    const uint8_t* x = p.x + static_cast<int64_t>(row) * p.x_row;
    uint8_t* residual = p.residual + static_cast<int64_t>(row) * p.residual_row;
    const uint32_t hidden = p.cols * kBlock;
    const float global_scale = load_f32(p.out.global_scale);
    const float second_scale = p.second.packed ? load_f32(p.second.global_scale) : 1.0f;
    float even = 0.0f, odd = 0.0f;
    if constexpr (kHeld > 0) {
        const uint32_t part = threadIdx.x / kStep, first = threadIdx.x % kStep + part * kHeld * kStep;
        float square[kHeld][2];
        Sixteen sum[kHeld], weight[kHeld], old[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const uint32_t col = first + i * kStep;
            if (col < p.cols) {
                sum[i] = load_sixteen<kVector>(x + col * (kBlock * 2));
                old[i] = load_sixteen<kVector>(residual + col * (kBlock * 2));
                if constexpr (kHeld == 1) weight[i] = load_sixteen<kVector>(p.weight + col * (kBlock * 2));
            }
        }
        launch_dependent_grids();
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const uint32_t col = first + i * kStep;
            square[i][0] = square[i][1] = 0.0f;
            if (col < p.cols) {
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[i].w[j] = Pair::add(sum[i].w[j], old[i].w[j]);
                store_sixteen<kVector>(residual + col * (kBlock * 2), sum[i]);
                square[i][0] = sum_of_squares<Pair>(sum[i].w);
                square[i][1] = sum_of_squares<Pair>(sum[i].w + 4);
                if constexpr (kHeld > 1) weight[i] = load_sixteen<kVector>(p.weight + col * (kBlock * 2));
            }
        }
        if constexpr (kParts == 1) {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                even = __fadd_rn(even, square[i][0]);
                odd = __fadd_rn(odd, square[i][1]);
            }
        } else {
            __shared__ float handed[kHeld][2][kStep];
            if (part == 1) {
#pragma unroll
                for (int i = 0; i < kHeld; ++i) {
                    handed[i][0][threadIdx.x - kStep] = square[i][0];
                    handed[i][1][threadIdx.x - kStep] = square[i][1];
                }
            }
            __syncthreads();
            if (part == 0) {
#pragma unroll
                for (int i = 0; i < 2 * kHeld; ++i) {
                    even = __fadd_rn(even, i < kHeld ? square[i % kHeld][0] : handed[i % kHeld][0][threadIdx.x]);
                    odd = __fadd_rn(odd, i < kHeld ? square[i % kHeld][1] : handed[i % kHeld][1][threadIdx.x]);
                }
            }
        }
        const float factor = inverse_rms<kLanes>(even, odd, hidden, p.eps);
        const float rcp = rcp_approx(global_scale), second_rcp = rcp_approx(second_scale);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const uint32_t col = first + i * kStep;
            if (col < p.cols) {
                const Sixteen norm = normalize<Pair>(sum[i], weight[i], factor);
                store_quantized<Pair>(p.out, norm, row, col, p.cols, global_scale, rcp);
                if (p.norm) store_sixteen<kVector>(p.norm + static_cast<int64_t>(row) * p.norm_row + col * (kBlock * 2), norm);
                if (p.second.packed) store_quantized<Pair>(p.second, norm, row, col, p.cols, second_scale, second_rcp);
            }
        }
    } else {
        for (uint32_t col = threadIdx.x; col < p.cols; col += kStep) {
            Sixteen sum = load_sixteen<kVector>(x + col * (kBlock * 2));
            const Sixteen old = load_sixteen<kVector>(residual + col * (kBlock * 2));
#pragma unroll
            for (int j = 0; j < 8; ++j) sum.w[j] = Pair::add(sum.w[j], old.w[j]);
            store_sixteen<kVector>(residual + col * (kBlock * 2), sum);
            even = __fadd_rn(even, sum_of_squares<Pair>(sum.w));
            odd = __fadd_rn(odd, sum_of_squares<Pair>(sum.w + 4));
        }
        launch_dependent_grids();
        const float factor = inverse_rms<kLanes>(even, odd, hidden, p.eps);
        const float rcp = rcp_approx(global_scale), second_rcp = rcp_approx(second_scale);
        for (uint32_t col = threadIdx.x; col < p.cols; col += kStep) {
            const Sixteen sum = load_sixteen<kVector>(residual + col * (kBlock * 2));
            const Sixteen norm = normalize<Pair>(sum, load_sixteen<kVector>(p.weight + col * (kBlock * 2)), factor);
            store_quantized<Pair>(p.out, norm, row, col, p.cols, global_scale, rcp);
            if (p.norm) store_sixteen<kVector>(p.norm + static_cast<int64_t>(row) * p.norm_row + col * (kBlock * 2), norm);
            if (p.second.packed) store_quantized<Pair>(p.second, norm, row, col, p.cols, second_scale, second_rcp);
        }
    }
    zero_padding_columns(p.out, row, p.cols);
    if (p.second.packed) zero_padding_columns(p.second, row, p.cols);
}

}  // namespace

#define QUANTIZE(name, pair, silu, vector, units)                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ QuantParams p) { \
        quantize<pair, silu, vector, units>(p);                                                       \
    }

QUANTIZE(nvfp4_quantize_bf16, Bf16Pair, false, true, 1)
QUANTIZE(nvfp4_quantize_bf16_unaligned, Bf16Pair, false, false, 1)
QUANTIZE(nvfp4_quantize_fp16, Fp16Pair, false, true, 1)
QUANTIZE(nvfp4_quantize_fp16_unaligned, Fp16Pair, false, false, 1)
QUANTIZE(silu_mul_nvfp4_bf16, Bf16Pair, true, true, 1)
QUANTIZE(silu_mul_nvfp4_bf16_unaligned, Bf16Pair, true, false, 1)
QUANTIZE(silu_mul_nvfp4_fp16, Fp16Pair, true, true, 1)
QUANTIZE(silu_mul_nvfp4_fp16_unaligned, Fp16Pair, true, false, 1)

#define ADD_RMS_NORM(name, pair, lanes, held, parts, vector)                                                       \
    extern "C" __global__ void __launch_bounds__((parts) * (lanes) / 2) name(const __grid_constant__ NormParams p) { \
        add_rms_norm<pair, lanes, held, parts, vector>(p);                                                         \
    }

#define ADD_RMS_NORMS(dtype, pair)                                                      \
    ADD_RMS_NORM(add_rms_norm_nvfp4_##dtype##_few, pair, 1024, 1, 1, true)              \
    ADD_RMS_NORM(add_rms_norm_nvfp4_##dtype##_few_generic, pair, 1024, 0, 1, false)     \
    ADD_RMS_NORM(add_rms_norm_nvfp4_##dtype##_many, pair, 256, 2, 2, true)              \
    ADD_RMS_NORM(add_rms_norm_nvfp4_##dtype##_many_generic, pair, 256, 0, 1, false)

ADD_RMS_NORMS(bf16, Bf16Pair)
ADD_RMS_NORMS(fp16, Fp16Pair)

}  // namespace hotpath
