// Kimi Delta Attention decode, one token a row: causal convolution, gates, delta-rule update of the state, output and gated
// RMSNorm in one launch. Argument meaning and checks: src/ops/kda_decode/mod.rs. The maths: docs/kernels/kda_decode.md.
//
// A head's state is a 128 x 128 tile, V rows of K values, and each V row is updated alone:
//     h = state * decay;  v' = (v - h.k) * beta;  state' = h + k v';  o = state'.q
// so a head may be split by V rows over a cluster of 1, 2, 4, 8 or 16 blocks. Only the RMSNorm's sum of squares crosses
// blocks, through distributed shared memory. Both dot products are taken of the old state, in one pass over registers:
//     h.k = state.(decay k);  o = state.(decay q) + v' (k.q)
#include "common.cuh"

namespace hotpath {
namespace {

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

// ---- Clusters --------------------------------------------------------------------------------------------------------

// Says that this block runs; orders no memory.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Also waits until what this thread has written is visible, so it comes before the stores of the state.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void store_to_block(uint32_t rank, const float* shared, float value) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(at)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

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

// ---- Staging ---------------------------------------------------------------------------------------------------------
// The copy engine brings a block's part of the state, which is one stretch of memory, into shared memory.

__device__ __forceinline__ uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void copy_to_shared(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void wait_for_copy(uint64_t* barrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "WAIT_%=:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t@!done bra WAIT_%=;\n\t}" ::"r"(shared_address(barrier))
        : "memory");
}

template <int kWarps>
struct Shared {
    // By k: decay, k, decay * k, decay * q, with k and q before their normalisation.
    alignas(16) float decay[kDim], key[kDim], decayed_key[kDim], decayed_query[kDim];
    float value[kDim];       // of this block's rows
    float output[kDim];      // of this block's rows, before the norm
    float sums[3][kWarps];   // q.q, k.k and k.q by warp
    float squares[kDim / 32];  // of the output, by 32 rows of the head
    alignas(8) uint64_t arrived;  // barrier of the staged state
};

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

// One cluster is one head of one row of the batch, one block kRows = 128 / kBlocks of its V rows, and kLanes threads one V
// row at a time, kPasses of them in each of kSteps steps. A block moves its part of the state once and loads a step's state
// at a time, in registers or staged in shared memory; the first step's is in flight while the convolution and the gates are
// computed. Beside its state a block reads everything of the head, 6 KB, of which it writes what is its own: splitting a head
// shortens the way of a small batch, and costs a large one.
template <class State, int kBlocks, int kSteps, int kPasses, bool kStaged>
__device__ __forceinline__ void kda_decode(const KdaParams& p) {
    constexpr int kRows = kDim / kBlocks;
    constexpr int kRowsAtOnce = kRows / kSteps / kPasses;
    constexpr int kThreads = kRowsAtOnce * kLanes;
    constexpr int kWarps = kThreads / 32;
    constexpr int kChannels = (kDim + kThreads - 1) / kThreads;  // of q and k, a thread
    constexpr int kChunks = kElements / State::kVector;
    // State in registers needs constant indices; staged state rather saves the registers of an unrolled loop.
    constexpr int kUnroll = kStaged ? 1 : kChunks;
    static_assert(kRows <= kThreads, "one thread a row for v and the output");
    __shared__ Shared<kWarps> shared;
    extern __shared__ __align__(128) uint8_t staged[];

    const uint32_t thread = threadIdx.x;
    const uint32_t head_of_batch = blockIdx.x / kBlocks;
    const uint32_t rank = blockIdx.x % kBlocks;
    const uint32_t row = p.heads.divide(head_of_batch);
    const uint32_t head = head_of_batch - row * p.heads.divisor;
    const uint32_t first_channel = head * kDim;
    const uint32_t first_v = rank * kRows;
    // The first threads have a channel of q and one of k (or two of each), the last ones a channel of v. Where these are
    // different threads, v uses the registers of q.
    constexpr bool kApart = kThreads >= kDim + kRows;
    const bool has_channel = kThreads <= kDim || thread < kDim;
    const bool has_v = static_cast<int>(thread) >= kThreads - kRows;
    const uint32_t v_row = thread - (kThreads - kRows);
    const int first_part = kApart && has_v ? 2 : 0;
    const uint32_t first_at = kApart && has_v ? first_v + v_row : thread;
    const bool has_first = has_channel || (kApart && has_v);

    // Weights, which no kernel writes, before the wait.
    Channel q[kChannels], k[kChannels], separate_v;
    Channel& v = kApart ? q[0] : separate_v;
    float dt_bias[kChannels];
    if (has_first) load_weights(p, first_part, first_channel + first_at, q[0]);
    if (has_channel) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const uint32_t channel = first_channel + thread + i * kThreads;
            if (i > 0) load_weights(p, 0, channel, q[i]);
            load_weights(p, 1, channel, k[i]);
            dt_bias[i] = p.log_decay ? 0.0f : load_f32(p.dt_bias + channel);
        }
    }
    if (!kApart && has_v) load_weights(p, 2, first_channel + first_v + v_row, v);
    const float a_log = p.log_decay ? 0.0f : load_f32(p.a_log + head);

    if constexpr (kStaged) {
        if (thread == 0) init_barrier(&shared.arrived);
    }

    wait_for_prior_grids();
    const int64_t slot = load_index(p.indices, row * p.index_stride, p.wide_indices);
    uint32_t gate[kChannels];
    if (has_first) load_x(p, first_part, row, first_channel + first_at, q[0]);
    if (has_channel) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const uint32_t channel = first_channel + thread + i * kThreads;
            if (i > 0) load_x(p, 0, row, channel, q[i]);
            load_x(p, 1, row, channel, k[i]);
            gate[i] = load_raw(p.gate, row * p.gate_row + channel, p.gate_dtype);
        }
    }
    if (!kApart && has_v) load_x(p, 2, row, first_channel + first_v + v_row, v);
    const uint32_t raw_beta = load_raw(p.beta, row * p.beta_row + head, p.beta_dtype);
    uint32_t output_gate = 0;
    float norm_weight = 0.0f;
    if (p.output_gate && thread < kRows) {
        output_gate = load_bits16(p.output_gate, row * p.output_gate_row + first_channel + first_v + thread);
        norm_weight = load_f32(p.norm_weight + first_v + thread);
    }
    auto out_at = [&] { return row * p.out_row + first_channel + first_v + thread; };

    if (slot <= p.null_index) {
        launch_dependent_grids();
        if (thread < kRows) store_bits16(p.out, out_at(), 0);
        return;
    }

    if (has_first) load_conv_state(p, first_part, slot, first_channel + first_at, q[0]);
    if (has_channel) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const uint32_t channel = first_channel + thread + i * kThreads;
            if (i > 0) load_conv_state(p, 0, slot, channel, q[i]);
            load_conv_state(p, 1, slot, channel, k[i]);
        }
    }
    if (!kApart && has_v) load_conv_state(p, 2, slot, first_channel + first_v + v_row, v);

    const uint32_t lane = thread % kLanes;
    uint8_t* tile = p.state + (slot * p.state_slot + static_cast<int64_t>(head) * (kDim * kDim) +
                               (first_v + thread / kLanes) * kDim + lane * State::kVector) * State::kBytes;
    static_assert(!kStaged || kSteps == 1, "staged state arrives at once");
    auto unit_at = [&](int step, int pass, int chunk) {
        return ((step * kPasses + pass) * kRowsAtOnce * kDim + chunk * kLanes * State::kVector) * State::kBytes;
    };
    uint4 loaded[kPasses][kChunks];
    auto load_step = [&](int step) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) loaded[pass][chunk] = load_16(tile + unit_at(step, pass, chunk));
    };
    if constexpr (kStaged) {
        if (thread == 0) copy_to_shared(staged, tile, kRows * kDim * State::kBytes, &shared.arrived);
    } else {
        load_step(0);
    }
    // A unit of this step's state, wherever it is.
    auto unit = [&](int pass, int chunk) {
        if constexpr (kStaged) {
            return *reinterpret_cast<const uint4*>(staged + (thread / kLanes * kDim + lane * State::kVector) * State::kBytes +
                                                   unit_at(0, pass, chunk));
        } else {
            return loaded[pass][chunk];
        }
    };
    launch_dependent_grids();
    // Tells the cluster that this block runs, so that its shared memory may be written.
    if constexpr (kBlocks > 1) cluster_arrive_relaxed();

    // Gates first, which arrive with the index, then the convolution, all while the state is on its way.
    float beta = float_from_raw(raw_beta, p.beta_dtype);
    if (!p.beta_is_sigmoid) beta = sigmoid(beta);
    if (p.output_gate) norm_weight *= sigmoid(float_from_bits16(output_gate, p.activation));
    float sum_q = 0.0f, sum_k = 0.0f, sum_kq = 0.0f;
    if (has_channel) {
        const float rate = p.log_decay ? 0.0f : expf(a_log);
        float decay[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) decay[i] = decay_of(p, gate[i], dt_bias[i], rate);
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const float cq = convolve(p, q[i]), ck = convolve(p, k[i]);
            const uint32_t at = thread + i * kThreads;
            shared.decay[at] = decay[i];
            shared.key[at] = ck;
            shared.decayed_key[at] = decay[i] * ck;
            shared.decayed_query[at] = decay[i] * cq;
            sum_q = fmaf(cq, cq, sum_q);
            sum_k = fmaf(ck, ck, sum_k);
            sum_kq = fmaf(ck, cq, sum_kq);
        }
    }
    if (has_v) shared.value[v_row] = convolve(p, v);
    sum_q = sum_over_warp(sum_q);
    sum_k = sum_over_warp(sum_k);
    sum_kq = sum_over_warp(sum_kq);
    if (thread % 32 == 0) {
        shared.sums[0][thread / 32] = sum_q;
        shared.sums[1][thread / 32] = sum_k;
        shared.sums[2][thread / 32] = sum_kq;
    }
    auto move_conv_state = [&] {
        if (has_channel) {
#pragma unroll
            for (int i = 0; i < kChannels; ++i) {
                const uint32_t at = thread + i * kThreads;
                if (kBlocks == 1 || at / kRows == rank) {
                    store_conv_state(p, 0, slot, first_channel + at, q[i]);
                    store_conv_state(p, 1, slot, first_channel + at, k[i]);
                }
            }
        }
        if (has_v) store_conv_state(p, 2, slot, first_channel + first_v + v_row, v);
    };
    // A channel's only reader is then its writer.
    if constexpr (kBlocks == 1) move_conv_state();
    __syncthreads();
    const Norms norms(p, shared.sums);

    // The RMSNorm's sum of squares: 32 rows by a warp's butterfly, then these sums in the order of the rows. Every split sums in
    // this order, so that the bits of a row do not depend on the batch around it.
    float squares[kDim / 32];
    auto square_rows = [&](uint32_t first) {
        const float o = shared.output[first + thread % 32];
        return sum_over_warp(o * o);
    };
    auto share_squares = [&] {
        __syncthreads();
        if constexpr (kBlocks == 1) {
#pragma unroll
            for (int part = 0; part < kDim / 32; ++part) squares[part] = square_rows(part * 32);
        } else {
            const uint32_t warp = thread / 32;
            float sum = 0.0f;
            if (warp < kRows / 32) sum = square_rows(warp * 32);
            cluster_wait();
            if (warp < kRows / 32 && thread % 32 < kBlocks)
                store_to_block(thread % 32, &shared.squares[rank * (kRows / 32) + warp], sum);
            // It also says that this block has read the convolution state of q and k, which the cluster overwrites below.
            cluster_arrive();
        }
    };

    if constexpr (kStaged) wait_for_copy(&shared.arrived);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        // state.(decay k) and state.(decay q) of each of the thread's rows.
        float along_key[kPasses], along_query[kPasses], update[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) along_key[pass] = along_query[pass] = 0.0f;
#pragma unroll kUnroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int part = 0; part < State::kVector; part += 4) {
                const uint32_t at = (chunk * kLanes + lane) * State::kVector + part;
                const float4 dk = *reinterpret_cast<const float4*>(&shared.decayed_key[at]);
                const float4 dq = *reinterpret_cast<const float4*>(&shared.decayed_query[at]);
#pragma unroll
                for (int pass = 0; pass < kPasses; ++pass) {
                    float s[State::kVector];
                    State::unpack(unit(pass, chunk), s);
                    along_key[pass] = dot4(s + part, dk, along_key[pass]);
                    along_query[pass] = dot4(s + part, dq, along_query[pass]);
                }
            }
        }
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const uint32_t at = (step * kPasses + pass) * kRowsAtOnce + thread / kLanes;
            const float delta = fmaf(-sum_over_row(along_key[pass]), norms.k, shared.value[at]) * beta;
            const float o = fmaf(delta, norms.key_query, sum_over_row(along_query[pass]) * norms.q);
            update[pass] = delta * norms.k;
            if (lane == 0) shared.output[at] = o;
        }
        // Before the stores, so that it travels meanwhile.
        if constexpr (kSteps == 1) share_squares();
#pragma unroll kUnroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            float decay[State::kVector], key[State::kVector];
#pragma unroll
            for (int part = 0; part < State::kVector; part += 4) {
                const uint32_t at = (chunk * kLanes + lane) * State::kVector + part;
                *reinterpret_cast<float4*>(decay + part) = *reinterpret_cast<const float4*>(&shared.decay[at]);
                *reinterpret_cast<float4*>(key + part) = *reinterpret_cast<const float4*>(&shared.key[at]);
            }
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                float s[State::kVector];
                State::unpack(unit(pass, chunk), s);
#pragma unroll
                for (int i = 0; i < State::kVector; ++i) s[i] = fmaf(key[i], update[pass], s[i] * decay[i]);
                store_16(tile + unit_at(step, pass, chunk), State::pack(s));
            }
        }
        if (step + 1 < kSteps) load_step(step + 1);
    }
    if constexpr (kSteps > 1) share_squares();
    if constexpr (kBlocks > 1) {
        cluster_wait();
#pragma unroll
        for (int part = 0; part < kDim / 32; ++part) squares[part] = shared.squares[part];
    }
    float factor = 1.0f;
    if (p.output_gate) factor = norm_factor(p, squares) * norm_weight;
    if (thread < kRows) store_bits16(p.out, out_at(), bits16_from_float(shared.output[thread] * factor, p.activation));

    if constexpr (kBlocks > 1) move_conv_state();
}

// ---- Several tokens a row ---------------------------------------------------------------------------------------------

constexpr int kMaxTokens = 8;
constexpr int kTokensAtOnce = 4;  // whose inputs are in flight together
constexpr int kSpecThreads = kDim;

// Host twin: src/ops/kda_decode/cuda.rs, SpecParams. Rows of x, gates, beta and out are tokens here.
struct KdaSpecParams {
    KdaParams one;
    const uint8_t* query_start;
    const uint8_t* accepted;
    int64_t query_stride, accepted_stride;
    int64_t index_column;
    uint32_t rows, tokens;
    uint32_t columns;  // of the indices: most tokens of a row
    uint32_t wide_query, wide_accepted;  // int64
};
static_assert(sizeof(KdaSpecParams) == 424, "the host's twin has this size");

template <int kRows>
struct SpecShared {
    alignas(16) float decay[kMaxTokens][kDim], key[kMaxTokens][kDim];
    alignas(16) float decayed_key[kMaxTokens][kDim], decayed_query[kMaxTokens][kDim];
    float value[kMaxTokens][kRows], output[kMaxTokens][kRows], gate[kMaxTokens][kRows];
    float sums[kMaxTokens][3][kDim / 32];
    float squares[kMaxTokens][kDim / 32];
    float beta[kMaxTokens];
};

// As kda_decode, in its order of arithmetic, for the tokens of a row: their convolutions and gates first, all of them; then the
// state, kept in registers in fp32, goes through the tokens and is stored after each; last the norms. A row reads its state once.
// Blocks also zero the outputs of padded rows and, a token in turn by row, those of tokens that no row has.
template <class State, int kBlocks, int kSteps, int kPasses>
__device__ __forceinline__ void kda_decode_spec(const KdaSpecParams& s) {
    constexpr int kRows = kDim / kBlocks;
    constexpr int kRowsAtOnce = kRows / kSteps / kPasses;
    static_assert(kRowsAtOnce * kLanes == kSpecThreads, "a thread has a channel of q and of k");
    constexpr int kChunks = kElements / State::kVector;
    __shared__ SpecShared<kRows> shared;

    const KdaParams& p = s.one;
    const uint32_t thread = threadIdx.x;
    const uint32_t warp = thread / 32;
    const uint32_t head_of_batch = blockIdx.x / kBlocks;
    const uint32_t rank = blockIdx.x % kBlocks;
    const uint32_t row = p.heads.divide(head_of_batch);
    const uint32_t head = head_of_batch - row * p.heads.divisor;
    const uint32_t first_channel = head * kDim;
    const uint32_t first_v = rank * kRows;
    const uint32_t channel = first_channel + thread;
    // The last threads have a channel of v, the first ones an output.
    const bool has_v = static_cast<int>(thread) >= kSpecThreads - kRows;
    const uint32_t v_row = thread - (kSpecThreads - kRows);
    const uint32_t v_channel = first_channel + first_v + v_row;
    const bool has_output = p.output_gate && thread < kRows;

    // Weights, which no kernel writes, before the wait.
    Channel q, k, v;
    load_weights(p, 0, channel, q);
    load_weights(p, 1, channel, k);
    if (has_v) load_weights(p, 2, v_channel, v);
    const float dt_bias = p.log_decay ? 0.0f : load_f32(p.dt_bias + channel);
    const float a_log = p.log_decay ? 0.0f : load_f32(p.a_log + head);

    wait_for_prior_grids();
    const int64_t begin = load_index(s.query_start, row * s.query_stride, s.wide_query);
    const int64_t end = load_index(s.query_start, (row + 1) * s.query_stride, s.wide_query);
    const int64_t accepted = load_index(s.accepted, row * s.accepted_stride, s.wide_accepted);
    // Lane t of every warp has the slot of token t.
    int64_t slots = 0;
    if (thread % 32 < s.columns)
        slots = load_index(p.indices, row * p.index_stride + thread % 32 * s.index_column, p.wide_indices);
    float norm_weight = 0.0f;
    if (has_output) norm_weight = load_f32(p.norm_weight + first_v + thread);

    auto zero_output = [&](int64_t token) {
        if (thread < kRows) store_bits16(p.out, token * p.out_row + first_channel + first_v + thread, 0);
    };
    const int64_t tokens = s.tokens;
    auto zero_tokens_of_no_row = [&] {
        const int64_t first = load_index(s.query_start, 0, s.wide_query);
        const int64_t last = load_index(s.query_start, s.rows * s.query_stride, s.wide_query);
        for (int64_t token = row; token < min(first, tokens); token += s.rows) zero_output(token);
        for (int64_t token = max(last, static_cast<int64_t>(0)) + row; token < tokens; token += s.rows) zero_output(token);
    };

    // Numbers that no row may have make it padding, so that nothing is touched outside the tensors.
    const bool countable = begin >= 0 && end <= tokens && begin < end && end - begin <= s.columns;
    const bool startable = accepted >= 1 && accepted <= s.columns;
    const int64_t slot = __shfl_sync(~0u, slots, 0);
    const int64_t first_slot = __shfl_sync(~0u, slots, startable ? static_cast<int>(accepted) - 1 : 0);
    if (!countable || !startable || slot <= p.null_index || first_slot <= p.null_index) {
        launch_dependent_grids();
        for (int64_t token = max(begin, static_cast<int64_t>(0)); token < min(end, tokens); ++token) zero_output(token);
        zero_tokens_of_no_row();
        return;
    }
    const uint32_t count = static_cast<uint32_t>(end - begin);

    struct Inputs {
        uint32_t q, k, v, gate, output_gate;
    } inputs[kTokensAtOnce];
    auto load_tokens = [&](uint32_t first) {
#pragma unroll
        for (uint32_t i = 0; i < kTokensAtOnce; ++i) {
            if (first + i >= count) break;
            const int64_t token = begin + first + i;
            inputs[i].q = load_bits16(p.x[0], token * p.x_row[0] + channel);
            inputs[i].k = load_bits16(p.x[1], token * p.x_row[1] + channel);
            if (has_v) inputs[i].v = load_bits16(p.x[2], token * p.x_row[2] + v_channel);
            inputs[i].gate = load_raw(p.gate, token * p.gate_row + channel, p.gate_dtype);
            if (has_output)
                inputs[i].output_gate = load_bits16(p.output_gate, token * p.output_gate_row + first_channel + first_v + thread);
        }
    };
    load_tokens(0);
    uint32_t raw_beta = 0;
    if (thread < count) raw_beta = load_raw(p.beta, (begin + thread) * p.beta_row + head, p.beta_dtype);

    // The window ends with the last accepted token of the step before.
    auto load_window = [&](int which, uint32_t at, Channel& c) {
        const uint8_t* window = conv_state_of(p, which, slot, at);
#pragma unroll
        for (int tap = 0; tap < kTaps - 1; ++tap) c.bits[tap] = load_bits16(window, (accepted - 1 + tap) * p.conv_tap);
    };
    load_window(0, channel, q);
    load_window(1, channel, k);
    if (has_v) load_window(2, v_channel, v);

    const uint32_t lane = thread % kLanes;
    const int64_t tile_at =
        static_cast<int64_t>(head) * (kDim * kDim) + (first_v + thread / kLanes) * kDim + lane * State::kVector;
    auto unit_at = [&](int step, int pass, int chunk) {
        return ((step * kPasses + pass) * kRowsAtOnce * kDim + chunk * kLanes * State::kVector) * State::kBytes;
    };
    uint4 loaded[kPasses][kChunks];
    auto load_step = [&](int step) {
        const uint8_t* tile = p.state + (first_slot * p.state_slot + tile_at) * State::kBytes;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) loaded[pass][chunk] = load_16(tile + unit_at(step, pass, chunk));
    };
    load_step(0);
    launch_dependent_grids();
    if constexpr (kBlocks > 1) cluster_arrive_relaxed();

    if (thread < count) {
        const float beta = float_from_raw(raw_beta, p.beta_dtype);
        shared.beta[thread] = p.beta_is_sigmoid ? beta : sigmoid(beta);
    }
    // Columns of the convolution state: the last two before this step, then its tokens.
    auto store_column = [&](int which, uint32_t at, uint32_t column, uint32_t bits) {
        store_bits16(conv_state_of(p, which, slot, at), column * p.conv_tap, bits);
    };
    auto store_history = [&](int which, uint32_t at, const uint32_t* bits) {
        store_column(which, at, 0, bits[1]);
        store_column(which, at, 1, bits[2]);
    };
    uint32_t history[3][kTaps - 1];
#pragma unroll
    for (int tap = 1; tap < kTaps - 1; ++tap) history[0][tap] = q.bits[tap], history[1][tap] = k.bits[tap], history[2][tap] = v.bits[tap];

    const float rate = p.log_decay ? 0.0f : expf(a_log);
    auto convolve_next = [&](Channel& c, uint32_t bits) {
        c.bits[kTaps - 1] = bits;
        const float result = convolve(p, c);
#pragma unroll
        for (int tap = 0; tap < kTaps - 1; ++tap) c.bits[tap] = c.bits[tap + 1];
        return result;
    };
    auto prepare_tokens = [&](uint32_t first) {
#pragma unroll
        for (uint32_t i = 0; i < kTokensAtOnce; ++i) {
            const uint32_t token = first + i;
            if (token >= count) break;
            const float decay = decay_of(p, inputs[i].gate, dt_bias, rate);
            if (has_output) shared.gate[token][thread] = norm_weight * sigmoid(float_from_bits16(inputs[i].output_gate, p.activation));
            const float cq = convolve_next(q, inputs[i].q), ck = convolve_next(k, inputs[i].k);
            shared.decay[token][thread] = decay;
            shared.key[token][thread] = ck;
            shared.decayed_key[token][thread] = decay * ck;
            shared.decayed_query[token][thread] = decay * cq;
            if (has_v) shared.value[token][v_row] = convolve_next(v, inputs[i].v);
            const float sum_q = sum_over_warp(cq * cq), sum_k = sum_over_warp(ck * ck), sum_kq = sum_over_warp(ck * cq);
            if (thread % 32 == 0) {
                shared.sums[token][0][warp] = sum_q;
                shared.sums[token][1][warp] = sum_k;
                shared.sums[token][2][warp] = sum_kq;
            }
            if constexpr (kBlocks == 1) {
                store_column(0, channel, token + 2, inputs[i].q);
                store_column(1, channel, token + 2, inputs[i].k);
                if (has_v) store_column(2, v_channel, token + 2, inputs[i].v);
            }
        }
    };
    prepare_tokens(0);
    for (uint32_t first = kTokensAtOnce; first < count; first += kTokensAtOnce) {
        load_tokens(first);
        prepare_tokens(first);
    }
    if constexpr (kBlocks == 1) {
        store_history(0, channel, history[0]);
        store_history(1, channel, history[1]);
        if (has_v) store_history(2, v_channel, history[2]);
    }
    __syncthreads();

#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (step > 0) load_step(step);
        float h[kPasses][kElements];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) State::unpack(loaded[pass][chunk], &h[pass][chunk * State::kVector]);
#pragma unroll 1
        for (uint32_t token = 0; token < count; ++token) {
            float along_key[kPasses], along_query[kPasses], update[kPasses];
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) along_key[pass] = along_query[pass] = 0.0f;
#pragma unroll
            for (int part = 0; part < kElements; part += 4) {
                const uint32_t at = (part / State::kVector * kLanes + lane) * State::kVector + part % State::kVector;
                const float4 dk = *reinterpret_cast<const float4*>(&shared.decayed_key[token][at]);
                const float4 dq = *reinterpret_cast<const float4*>(&shared.decayed_query[token][at]);
#pragma unroll
                for (int pass = 0; pass < kPasses; ++pass) {
                    along_key[pass] = dot4(&h[pass][part], dk, along_key[pass]);
                    along_query[pass] = dot4(&h[pass][part], dq, along_query[pass]);
                }
            }
            const Norms norms(p, shared.sums[token]);
            const float beta = shared.beta[token];
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const uint32_t at = (step * kPasses + pass) * kRowsAtOnce + thread / kLanes;
                const float delta = fmaf(-sum_over_row(along_key[pass]), norms.k, shared.value[token][at]) * beta;
                const float o = fmaf(delta, norms.key_query, sum_over_row(along_query[pass]) * norms.q);
                update[pass] = delta * norms.k;
                if (lane == 0) shared.output[token][at] = o;
            }
            const int64_t target = __shfl_sync(~0u, slots, token);
            uint8_t* tile = p.state + (target * p.state_slot + tile_at) * State::kBytes;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                float decay[State::kVector], key[State::kVector];
#pragma unroll
                for (int part = 0; part < State::kVector; part += 4) {
                    const uint32_t at = (chunk * kLanes + lane) * State::kVector + part;
                    *reinterpret_cast<float4*>(decay + part) = *reinterpret_cast<const float4*>(&shared.decay[token][at]);
                    *reinterpret_cast<float4*>(key + part) = *reinterpret_cast<const float4*>(&shared.key[token][at]);
                }
#pragma unroll
                for (int pass = 0; pass < kPasses; ++pass) {
                    float* part = &h[pass][chunk * State::kVector];
#pragma unroll
                    for (int i = 0; i < State::kVector; ++i) part[i] = fmaf(key[i], update[pass], part[i] * decay[i]);
                    if (target > p.null_index) store_16(tile + unit_at(step, pass, chunk), State::pack(part));
                }
            }
        }
    }
    __syncthreads();

    if constexpr (kBlocks > 1) cluster_wait();
    for (uint32_t sum = warp; sum < count * (kRows / 32); sum += kSpecThreads / 32) {
        const uint32_t token = sum / (kRows / 32), part = sum % (kRows / 32);
        const float o = shared.output[token][part * 32 + thread % 32];
        const float squares = sum_over_warp(o * o);
        float* at = &shared.squares[token][rank * (kRows / 32) + part];
        if constexpr (kBlocks > 1) {
            if (thread % 32 < kBlocks) store_to_block(thread % 32, at, squares);
        } else if (thread % 32 == 0) {
            *at = squares;
        }
    }
    if constexpr (kBlocks > 1) {
        cluster_arrive();
        cluster_wait();
        // The whole cluster has read the windows of q and k.
        if (thread / kRows == rank) {
            store_history(0, channel, history[0]);
            store_history(1, channel, history[1]);
        }
        if (has_v) store_history(2, v_channel, history[2]);
#pragma unroll 1
        for (uint32_t token = 0; token < count; ++token) {
            const int64_t at = begin + token;
            if (thread / kRows == rank) {
                store_column(0, channel, token + 2, load_bits16(p.x[0], at * p.x_row[0] + channel));
                store_column(1, channel, token + 2, load_bits16(p.x[1], at * p.x_row[1] + channel));
            }
            if (has_v) store_column(2, v_channel, token + 2, load_bits16(p.x[2], at * p.x_row[2] + v_channel));
        }
    } else {
        __syncthreads();
    }
    for (uint32_t token = thread / kRows; token < count; token += kSpecThreads / kRows) {
        const uint32_t at = thread % kRows;
        float factor = 1.0f;
        if (p.output_gate) factor = norm_factor(p, shared.squares[token]) * shared.gate[token][at];
        store_bits16(p.out, (begin + token) * p.out_row + first_channel + first_v + at,
                     bits16_from_float(shared.output[token][at] * factor, p.activation));
    }
    zero_tokens_of_no_row();
}

}  // namespace

// Instances: state dtype, blocks a head, steps, passes, staged or not, blocks that a multiprocessor should hold. Which one runs:
// src/ops/kda_decode/cuda.rs.
#define HOTPATH_KDA(NAME, STATE, BLOCKS, STEPS, PASSES, STAGED, RESIDENT)                              \
    extern "C" __global__ void __launch_bounds__(kDim / BLOCKS / STEPS / PASSES * kLanes, RESIDENT)    \
        kda_decode_##NAME(const __grid_constant__ KdaParams p) {                                       \
        kda_decode<STATE, BLOCKS, STEPS, PASSES, STAGED>(p);                                           \
    }

// Blocks that a multiprocessor should hold, where the registers allow it: what is built for Blackwell would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define HOTPATH_RESIDENT(BLOCKS) BLOCKS
#else
#define HOTPATH_RESIDENT(BLOCKS) 1
#endif

HOTPATH_KDA(f32_quarter, StateF32, 4, 1, 2, false, 1)
HOTPATH_KDA(f32_half, StateF32, 2, 1, 4, true, 6)
HOTPATH_KDA(f32_stepped, StateF32, 1, 2, 2, false, HOTPATH_RESIDENT(2))
HOTPATH_KDA(f32_narrow, StateF32, 1, 2, 4, false, HOTPATH_RESIDENT(3))
HOTPATH_KDA(bf16_half, StateBf16, 2, 1, 4, true, 6)
HOTPATH_KDA(bf16_narrow, StateBf16, 1, 1, 8, true, 4)
HOTPATH_KDA(fp16_half, StateFp16, 2, 1, 4, true, 6)
HOTPATH_KDA(fp16_narrow, StateFp16, 1, 1, 8, true, 4)

#define HOTPATH_KDA_SPEC(NAME, STATE, BLOCKS, STEPS, PASSES)                                                           \
    extern "C" __global__ void __launch_bounds__(kSpecThreads) kda_decode_spec_##NAME(const __grid_constant__ KdaSpecParams p) { \
        kda_decode_spec<STATE, BLOCKS, STEPS, PASSES>(p);                                                               \
    }

HOTPATH_KDA_SPEC(f32_quarter, StateF32, 4, 1, 2)
HOTPATH_KDA_SPEC(f32_half, StateF32, 2, 1, 4)
HOTPATH_KDA_SPEC(f32_narrow, StateF32, 1, 2, 4)
HOTPATH_KDA_SPEC(bf16_quarter, StateBf16, 4, 1, 2)
HOTPATH_KDA_SPEC(bf16_half, StateBf16, 2, 1, 4)
HOTPATH_KDA_SPEC(bf16_narrow, StateBf16, 1, 2, 4)
HOTPATH_KDA_SPEC(fp16_quarter, StateFp16, 4, 1, 2)
HOTPATH_KDA_SPEC(fp16_half, StateFp16, 2, 1, 4)
HOTPATH_KDA_SPEC(fp16_narrow, StateFp16, 1, 2, 4)

}  // namespace hotpath
