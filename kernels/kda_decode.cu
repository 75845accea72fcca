// Kimi Delta Attention decode, one token a row: causal convolution, gates, delta-rule update of the state, output and gated
// RMSNorm in one launch. The maths and what the kernels share: kda.cuh.
#include "kda.cuh"

namespace hotpath {
namespace {

// ---- Staging ---------------------------------------------------------------------------------------------------------
// The copy engine brings a block's part of the state, which is one stretch of memory, into shared memory.

__device__ __forceinline__ void copy_to_shared(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    expect_bytes(barrier, bytes);
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
        __syncwarp();
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
                store_to_block(&shared.squares[rank * (kRows / 32) + warp], thread % 32, sum);
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

}  // namespace hotpath
