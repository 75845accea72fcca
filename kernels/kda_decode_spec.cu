// Kimi Delta Attention decode of up to eight tokens a row, speculative decoding, in one launch. The maths and what the kernels
// share: kda.cuh. Its arithmetic and its order are those of kda_decode.cu, bit by bit for one token.
#include "kda.cuh"

namespace hotpath {
namespace {

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
    // A step's state, and that of the step after it, which is on its way meanwhile.
    uint4 loaded[2][kPasses][kChunks];
    auto load_step = [&](int step) {
        const uint8_t* tile = p.state + (first_slot * p.state_slot + tile_at) * State::kBytes;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) loaded[step % 2][pass][chunk] = load_16(tile + unit_at(step, pass, chunk));
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
        float h[kPasses][kElements];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) State::unpack(loaded[step % 2][pass][chunk], &h[pass][chunk * State::kVector]);
        if (step + 1 < kSteps) load_step(step + 1);
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
            if (thread % 32 < kBlocks) store_to_block(at, thread % 32, squares);
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

// Instances: state dtype, blocks a head, steps, passes. Which one runs: src/ops/kda_decode/cuda.rs.
#define HOTPATH_KDA_SPEC(NAME, STATE, BLOCKS, STEPS, PASSES)                                                           \
    extern "C" __global__ void __launch_bounds__(kSpecThreads) kda_decode_spec_##NAME(const __grid_constant__ KdaSpecParams p) { \
        kda_decode_spec<STATE, BLOCKS, STEPS, PASSES>(p);                                                               \
    }

HOTPATH_KDA_SPEC(f32_quarter, StateF32, 4, 1, 2)
HOTPATH_KDA_SPEC(f32_half, StateF32, 2, 2, 2)
HOTPATH_KDA_SPEC(f32_narrow, StateF32, 1, 4, 2)
HOTPATH_KDA_SPEC(bf16_quarter, StateBf16, 4, 1, 2)
HOTPATH_KDA_SPEC(bf16_half, StateBf16, 2, 2, 2)
HOTPATH_KDA_SPEC(bf16_narrow, StateBf16, 1, 4, 2)
HOTPATH_KDA_SPEC(fp16_quarter, StateFp16, 4, 1, 2)
HOTPATH_KDA_SPEC(fp16_half, StateFp16, 2, 2, 2)
HOTPATH_KDA_SPEC(fp16_narrow, StateFp16, 1, 4, 2)

}  // namespace hotpath
