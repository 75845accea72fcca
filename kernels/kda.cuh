// What the kernels of Kimi Delta Attention share: parameters, state formats, convolution, gates and norms. No kernel lives here.
// Argument meaning and checks: src/ops/kda_decode/mod.rs. The maths: docs/kernels/kda_decode.md.
//
// A head's state is a 128 x 128 tile, V rows of K values, and each V row is updated alone:
//     h = state * decay;  v' = (v - h.k) * beta;  state' = h + k v';  o = state'.q
// so a head may be split by V rows over a cluster of 1, 2 or 4 blocks. Only the RMSNorm's sum of squares crosses
// blocks, through distributed shared memory. Both dot products are taken of the old state, in one pass over registers:
//     h.k = state.(decay k);  o = state.(decay q) + v' (k.q)
#pragma once

#include "cluster.cuh"

namespace hotpath {

constexpr int kDim = 128;        // of K and of V
constexpr int kLanes = 8;        // threads of a state row
constexpr int kElements = kDim / kLanes;  // of a row, a thread
constexpr int kTaps = 4;         // of the convolution
constexpr float kL2Epsilon = 1e-6f;

// Element types of activations. Host twin: src/ops/kda_decode/cuda.rs.
enum Dtype : uint32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// Strides in elements. Index 0, 1, 2: q, k, v. Host twin: src/ops/kda_decode/cuda.rs, KdaParams.
struct KdaParams {
    const uint8_t* x[3];
    const uint8_t* conv_weight[3];
    const uint8_t* conv_bias[3];  // null without
    uint8_t* conv_state[3];
    const uint8_t* gate;
    const uint8_t* beta;
    const float* a_log;
    const float* dt_bias;
    const uint8_t* output_gate;  // null without norm
    const float* norm_weight;
    uint8_t* state;
    const uint8_t* indices;
    uint8_t* out;
    int64_t x_row[3];
    int64_t conv_slot[3];
    int64_t conv_channel, conv_tap;
    int64_t weight_channel, weight_tap;
    int64_t gate_row, beta_row, output_gate_row, out_row;
    int64_t state_slot;
    int64_t index_stride;
    int64_t null_index;
    FastDiv heads;
    float lower_bound, norm_eps, scale;
    uint32_t activation;  // Dtype of x, conv_state, output_gate and out
    uint32_t weight_dtype;
    uint32_t gate_dtype, beta_dtype;
    uint32_t bounded;        // decay from lower_bound
    uint32_t log_decay;      // gate is the log decay already
    uint32_t beta_is_sigmoid;
    uint32_t wide_indices;   // int64
};
static_assert(sizeof(KdaParams) == 360, "the host's twin has this size");

__device__ __forceinline__ float float_from_bits16(uint32_t bits, uint32_t dtype) {
    return dtype == kBf16 ? __uint_as_float(bits << 16) : floats_from_f16x2(bits).x;
}

__device__ __forceinline__ uint32_t load_bits16(const uint8_t* base, int64_t index) {
    uint16_t v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(base + index * 2));
    return v;
}

__device__ __forceinline__ void store_bits16(uint8_t* base, int64_t index, uint32_t bits) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(base + index * 2), "h"(static_cast<uint16_t>(bits)) : "memory");
}

// An element as it lies in memory. Converted where it is used: a conversion at the load would wait for it there.
__device__ __forceinline__ uint32_t load_raw(const uint8_t* base, int64_t index, uint32_t dtype) {
    if (dtype == kFp32) {
        uint32_t v;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(base + index * 4));
        return v;
    }
    return load_bits16(base, index);
}

__device__ __forceinline__ float float_from_raw(uint32_t raw, uint32_t dtype) {
    return dtype == kFp32 ? __uint_as_float(raw) : float_from_bits16(raw, dtype);
}

__device__ __forceinline__ uint32_t bits16_from_float(float x, uint32_t dtype) {
    uint16_t bits;
    if (dtype == kBf16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    }
    return bits;
}

// __expf is off by 2 + 1.17 |x| units in the last place (CUDA's math functions), far inside what 16-bit inputs carry.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// ---- State in memory and in registers ------------------------------------------------------------------------------

// kVector elements are one 16-byte access. A thread's elements of a row are kChunks vectors, kLanes vectors apart.
struct StateF32 {
    static constexpr int kVector = 4;
    static constexpr int kBytes = 4;
    static __device__ __forceinline__ void unpack(uint4 w, float* f) {
        f[0] = __uint_as_float(w.x), f[1] = __uint_as_float(w.y), f[2] = __uint_as_float(w.z), f[3] = __uint_as_float(w.w);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
    }
};

__device__ __forceinline__ uint32_t bf16x2_from_floats(float lo, float hi) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}

__device__ __forceinline__ uint32_t f16x2_from_floats(float lo, float hi) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}

struct StateBf16 {
    static constexpr int kVector = 8;
    static constexpr int kBytes = 2;
    static __device__ __forceinline__ void unpack(uint4 w, float* f) {
        f[0] = low_bf16(w.x), f[1] = high_bf16(w.x), f[2] = low_bf16(w.y), f[3] = high_bf16(w.y);
        f[4] = low_bf16(w.z), f[5] = high_bf16(w.z), f[6] = low_bf16(w.w), f[7] = high_bf16(w.w);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return make_uint4(bf16x2_from_floats(f[0], f[1]), bf16x2_from_floats(f[2], f[3]), bf16x2_from_floats(f[4], f[5]),
                          bf16x2_from_floats(f[6], f[7]));
    }
};

struct StateFp16 {
    static constexpr int kVector = 8;
    static constexpr int kBytes = 2;
    static __device__ __forceinline__ void unpack(uint4 w, float* f) {
        const float2 a = floats_from_f16x2(w.x), b = floats_from_f16x2(w.y), c = floats_from_f16x2(w.z), d = floats_from_f16x2(w.w);
        f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y, f[4] = c.x, f[5] = c.y, f[6] = d.x, f[7] = d.y;
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return make_uint4(f16x2_from_floats(f[0], f[1]), f16x2_from_floats(f[2], f[3]), f16x2_from_floats(f[4], f[5]),
                          f16x2_from_floats(f[6], f[7]));
    }
};

// Over the kLanes threads of a state row; all of them get the sum.
__device__ __forceinline__ float sum_over_row(float x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

__device__ __forceinline__ float dot4(const float* a, float4 b, float sum) {
    return fmaf(a[3], b.w, fmaf(a[2], b.z, fmaf(a[1], b.y, fmaf(a[0], b.x, sum))));
}

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

// One channel of q, k or v: what the convolution needs.
struct Channel {
    uint32_t bits[kTaps];    // three of the state, then x
    uint32_t weight[kTaps];  // raw
    uint32_t bias;
};

__device__ __forceinline__ void load_weights(const KdaParams& p, int which, uint32_t channel, Channel& c) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap)
        c.weight[tap] = load_raw(p.conv_weight[which], channel * p.weight_channel + tap * p.weight_tap, p.weight_dtype);
    c.bias = p.conv_bias[which] ? load_raw(p.conv_bias[which], channel, p.weight_dtype) : 0;
}

__device__ __forceinline__ void load_x(const KdaParams& p, int which, int64_t row, uint32_t channel, Channel& c) {
    c.bits[kTaps - 1] = load_bits16(p.x[which], row * p.x_row[which] + channel);
}

__device__ __forceinline__ uint8_t* conv_state_of(const KdaParams& p, int which, int64_t slot, uint32_t channel) {
    return p.conv_state[which] + (slot * p.conv_slot[which] + channel * p.conv_channel) * 2;
}

__device__ __forceinline__ void load_conv_state(const KdaParams& p, int which, int64_t slot, uint32_t channel, Channel& c) {
    const uint8_t* at = conv_state_of(p, which, slot, channel);
#pragma unroll
    for (int tap = 0; tap < kTaps - 1; ++tap) c.bits[tap] = load_bits16(at, tap * p.conv_tap);
}

__device__ __forceinline__ float convolve(const KdaParams& p, const Channel& c) {
    float sum = float_from_raw(c.bias, p.weight_dtype);
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap)
        sum = fmaf(float_from_bits16(c.bits[tap], p.activation), float_from_raw(c.weight[tap], p.weight_dtype), sum);
    return silu(sum);
}

__device__ __forceinline__ void store_conv_state(const KdaParams& p, int which, int64_t slot, uint32_t channel, const Channel& c) {
    uint8_t* at = conv_state_of(p, which, slot, channel);
#pragma unroll
    for (int tap = 0; tap < kTaps - 1; ++tap) store_bits16(at, tap * p.conv_tap, c.bits[tap + 1]);
}

__device__ __forceinline__ int64_t load_index(const uint8_t* base, int64_t index, uint32_t wide) {
    int64_t v;
    if (wide) {
        asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(base + index * 8));
    } else {
        int32_t narrow;
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(narrow) : "l"(base + index * 4));
        v = narrow;
    }
    return v;
}

__device__ __forceinline__ float decay_of(const KdaParams& p, uint32_t gate, float dt_bias, float rate) {
    float exponent = float_from_raw(gate, p.gate_dtype);
    if (!p.log_decay) {
        const float raw = exponent + dt_bias;
        exponent = p.bounded ? p.lower_bound * sigmoid(rate * raw) : -rate * softplus(raw);
    }
    return expf(exponent);
}

// What normalises q, k and k.q, from the sums of q.q, k.k and k.q by warp.
struct Norms {
    float q, k, key_query;
    template <int kSums>
    __device__ __forceinline__ Norms(const KdaParams& p, const float (&sums)[3][kSums]) {
        // Only the warps that have channels hold sums.
        constexpr int kWarps = kSums < kDim / 32 ? kSums : kDim / 32;
        float sum_q = 0.0f, sum_k = 0.0f, sum_kq = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            sum_q += sums[0][warp];
            sum_k += sums[1][warp];
            sum_kq += sums[2][warp];
        }
        q = rsqrtf(sum_q + kL2Epsilon) * p.scale;
        k = rsqrtf(sum_k + kL2Epsilon);
        key_query = sum_kq * q * k;
    }
};

__device__ __forceinline__ float norm_factor(const KdaParams& p, const float (&squares)[kDim / 32]) {
    return rsqrtf(fmaf(squares[0] + squares[1] + squares[2] + squares[3], 1.0f / kDim, p.norm_eps));
}

}  // namespace hotpath
