// MLA key and value pack: k_out[t, h] = [k_nope[t, h] | k_pe[t]] and, for FP8, v_out[t, h] = v[t, h] (| 0).
// Argument meaning and checks: src/ops/mla_kv_pack/mod.rs. The work is memory traffic alone, so each kernel is a
// mapping of threads to 8-element units whose loads are all in flight before the first conversion.
//
// Two families:
//  - mla_kv_concat_b16_*, mla_kv_pack_fp8_*: the head sizes of every MLA model so far (128 + 64, v 128), 16-byte
//    aligned rows, 8 or 16 threads a row.
//  - *_generic: any head size that is a multiple of 8, any alignment, any mix of dtypes. One unit a thread.
#include "common.cuh"

namespace hotpath {
namespace {

constexpr int kUnit = 8;          // elements of a unit: one 16-byte access of a 16-bit dtype
constexpr int kThreads = 128;     // of a block
constexpr int kNope = 128;        // head sizes of the fast kernels
constexpr int kRope = 64;
constexpr int kValue = 128;
constexpr int kNopeUnits = kNope / kUnit;
constexpr int kRopeUnits = kRope / kUnit;
static_assert(kNope == kValue, "k_nope and v are read by the same loop");

enum Dtype : uint32_t { kBf16 = 0, kFp16 = 1, kE4m3 = 2 };

// Strides in bytes. Host twin: src/ops/mla_kv_pack/cuda.rs, PackParams.
struct PackParams {
    const uint8_t* k_nope;
    const uint8_t* k_pe;
    const uint8_t* v;
    uint8_t* k_out;
    uint8_t* v_out;
    const float* k_scale;  // null: unscaled
    const float* v_scale;
    int64_t k_nope_token, k_nope_head;
    int64_t k_pe_token;
    int64_t v_token, v_head;
    uint64_t rows;  // tokens * heads
    FastDiv heads;
    // Generic kernels only, sizes in units.
    FastDiv row_units;  // of k_nope, k_pe, v and padding together
    uint32_t nope_units, rope_units, v_units, v_out_units;
    uint32_t k_nope_dtype, k_pe_dtype, v_dtype;        // Dtype
    uint32_t k_nope_vector, k_pe_vector, v_vector;     // 1: every unit may be read in one access
};
static_assert(sizeof(PackParams) == 168, "the host's twin has this size");

template <class Source, bool kScaled>
__device__ __forceinline__ uint2 quantize(uint4 x, float scale) {
    if constexpr (kScaled) {
        return make_uint2(e4m3_quotients(Source::floats(x.x), Source::floats(x.y), byte_signs(x.x, x.y), scale),
                          e4m3_quotients(Source::floats(x.z), Source::floats(x.w), byte_signs(x.z, x.w), scale));
    } else {
        return make_uint2(Source::to_e4m3(x.x, x.y), Source::to_e4m3(x.z, x.w));
    }
}

// The row of this thread in the fast kernels, which give kLanes threads to a row.
struct Row {
    uint32_t index, token, head, lane;
};

template <int kLanes>
__device__ __forceinline__ Row this_row(const PackParams& p) {
    const uint32_t index = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
    const uint32_t token = p.heads.divide(index);
    return {index, token, index - token * p.heads.divisor, threadIdx.x % kLanes};
}

// Thread `lane` of a row takes units lane, lane + kLanes, ... of k_nope and v, and unit lane of k_pe if there is one.
// Reads 512 bytes a row and 128 a token, writes 320 a row. With 8 threads a row every thread has five loads in flight,
// which a small grid needs; with 16 more threads share the work, which streams better once the grid fills the GPU.
template <class Source, bool kRopeIsFp8, bool kScaled, int kLanes>
__device__ __forceinline__ void pack_fp8(const PackParams& p) {
    constexpr int kUnits = kNopeUnits / kLanes;  // of k_nope, and of v, a thread
    const Row row = this_row<kLanes>(p);
    const bool live = row.index < p.rows;
    const bool has_rope = kLanes == kRopeUnits || row.lane < kRopeUnits;

    wait_for_prior_grids();
    uint4 nope[kUnits], value[kUnits], rope;
    float k_scale = 1.0f, v_scale = 1.0f;
    if (live) {
        const int64_t token = row.token, head = row.head;
        const uint8_t* k = p.k_nope + token * p.k_nope_token + head * p.k_nope_head + row.lane * 16;
        const uint8_t* v = p.v + token * p.v_token + head * p.v_head + row.lane * 16;
        const uint8_t* pe = p.k_pe + token * p.k_pe_token + row.lane * (kRopeIsFp8 ? 8 : 16);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) nope[i] = load_16(k + i * kLanes * 16);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) value[i] = load_16(v + i * kLanes * 16);
        if (has_rope) {
            if constexpr (kRopeIsFp8) {
                const uint2 bytes = load_8(pe);
                rope = make_uint4(bytes.x, bytes.y, 0, 0);
            } else {
                rope = load_16(pe);
            }
        }
        if constexpr (kScaled) {
            if (p.k_scale) k_scale = load_f32(p.k_scale);
            if (p.v_scale) v_scale = load_f32(p.v_scale);
        }
    }
    launch_dependent_grids();
    if (!live) return;
    uint8_t* k = p.k_out + static_cast<uint64_t>(row.index) * (kNope + kRope) + row.lane * kUnit;
    uint8_t* v = p.v_out + static_cast<uint64_t>(row.index) * kValue + row.lane * kUnit;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) store_8(k + i * kLanes * kUnit, quantize<Source, kScaled>(nope[i], k_scale));
    if (has_rope) store_8(k + kNope, kRopeIsFp8 ? make_uint2(rope.x, rope.y) : quantize<Source, kScaled>(rope, k_scale));
#pragma unroll
    for (int i = 0; i < kUnits; ++i) store_8(v + i * kLanes * kUnit, quantize<Source, kScaled>(value[i], v_scale));
}

// As pack_fp8 without V and conversion, for 16-bit dtypes: reads 256 bytes a row and 128 a token, writes 384 a row.
template <int kLanes>
__device__ __forceinline__ void concat_b16(const PackParams& p) {
    constexpr int kUnits = kNopeUnits / kLanes;
    const Row row = this_row<kLanes>(p);
    const bool live = row.index < p.rows;
    const bool has_rope = kLanes == kRopeUnits || row.lane < kRopeUnits;

    wait_for_prior_grids();
    uint4 nope[kUnits], rope;
    if (live) {
        const int64_t token = row.token, head = row.head;
        const uint8_t* k = p.k_nope + token * p.k_nope_token + head * p.k_nope_head + row.lane * 16;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) nope[i] = load_16(k + i * kLanes * 16);
        if (has_rope) rope = load_16(p.k_pe + token * p.k_pe_token + row.lane * 16);
    }
    launch_dependent_grids();
    if (!live) return;
    uint8_t* k = p.k_out + static_cast<uint64_t>(row.index) * ((kNope + kRope) * 2) + row.lane * 16;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) store_16(k + i * kLanes * 16, nope[i]);
    if (has_rope) store_16(k + kNope * 2, rope);
}

// ---- Generic kernels ---------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_u16(const uint8_t* address) {
    uint16_t v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ uint32_t load_u8(const uint8_t* address) {
    uint32_t v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ uint4 load_unit_b16(const uint8_t* address, bool vector) {
    if (vector) return load_16(address);
    uint32_t h[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) h[i] = load_u16(address + 2 * i);
    return make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
}

__device__ __forceinline__ uint2 load_unit_b8(const uint8_t* address, bool vector) {
    if (vector) return load_8(address);
    uint32_t b[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) b[i] = load_u8(address + i);
    return make_uint2(b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24, b[4] | b[5] << 8 | b[6] << 16 | b[7] << 24);
}

// Four e4m3 bytes divided by the scale.
__device__ __forceinline__ uint32_t requantize(uint32_t bytes, float scale) {
    const float2 lo = floats_from_f16x2(f16x2_from_e4m3x2(static_cast<uint16_t>(bytes)));
    const float2 hi = floats_from_f16x2(f16x2_from_e4m3x2(static_cast<uint16_t>(bytes >> 16)));
    return e4m3_quotients(lo, hi, bytes & kByteSigns, scale);
}

// Where one unit comes from and goes to. `unit` counts within the row: k_nope, k_pe, v, then V's padding.
struct Unit {
    uint64_t row;
    uint32_t unit;
    int64_t token, head;
};

__device__ __forceinline__ Unit unit_at(const PackParams& p, uint64_t index) {
    uint64_t row;
    if (index < (1ull << 31)) {
        row = p.row_units.divide(static_cast<uint32_t>(index));
    } else {
        row = index / p.row_units.divisor;
    }
    const uint32_t unit = static_cast<uint32_t>(index - row * p.row_units.divisor);
    int64_t token;
    if (row < (1ull << 31)) {
        token = p.heads.divide(static_cast<uint32_t>(row));
    } else {
        token = static_cast<int64_t>(row / p.heads.divisor);
    }
    return {row, unit, token, static_cast<int64_t>(row) - token * p.heads.divisor};
}

__device__ __forceinline__ uint2 fp8_unit(const uint8_t* address, int64_t offset, uint32_t dtype, bool vector, const float* scale_at) {
    if (dtype == kE4m3) {
        const uint2 x = load_unit_b8(address + offset, vector);
        if (!scale_at) return x;
        const float scale = load_f32(scale_at);
        return make_uint2(requantize(x.x, scale), requantize(x.y, scale));
    }
    const uint4 x = load_unit_b16(address + offset * 2, vector);
    if (dtype == kBf16) return scale_at ? quantize<Bf16, true>(x, load_f32(scale_at)) : quantize<Bf16, false>(x, 1.0f);
    return scale_at ? quantize<Fp16, true>(x, load_f32(scale_at)) : quantize<Fp16, false>(x, 1.0f);
}

}  // namespace

// One thread a unit, grid-stride. Any head sizes, strides, alignments and dtypes.
extern "C" __global__ void __launch_bounds__(kThreads) mla_kv_pack_fp8_generic(const __grid_constant__ PackParams p) {
    wait_for_prior_grids();
    launch_dependent_grids();
    const uint64_t units = p.rows * p.row_units.divisor;
    const uint32_t k_units = p.nope_units + p.rope_units;
    for (uint64_t i = blockIdx.x * static_cast<uint64_t>(kThreads) + threadIdx.x; i < units; i += gridDim.x * static_cast<uint64_t>(kThreads)) {
        const Unit at = unit_at(p, i);
        uint2 out = make_uint2(0, 0);
        if (at.unit < p.nope_units) {
            out = fp8_unit(p.k_nope + at.token * p.k_nope_token + at.head * p.k_nope_head, at.unit * kUnit, p.k_nope_dtype,
                           p.k_nope_vector, p.k_scale);
        } else if (at.unit < k_units) {
            out = fp8_unit(p.k_pe + at.token * p.k_pe_token, (at.unit - p.nope_units) * kUnit, p.k_pe_dtype, p.k_pe_vector,
                           p.k_pe_dtype == kE4m3 ? nullptr : p.k_scale);
        } else if (at.unit < k_units + p.v_units) {
            out = fp8_unit(p.v + at.token * p.v_token + at.head * p.v_head, (at.unit - k_units) * kUnit, p.v_dtype, p.v_vector, p.v_scale);
        }
        uint8_t* to = at.unit < k_units ? p.k_out + (at.row * k_units + at.unit) * kUnit
                                        : p.v_out + (at.row * p.v_out_units + (at.unit - k_units)) * kUnit;
        store_8(to, out);
    }
}

#define HOTPATH_CONCAT_GENERIC(NAME, BYTES, LOAD, STORE)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads) NAME(const __grid_constant__ PackParams p) {                           \
        wait_for_prior_grids();                                                                                                 \
        launch_dependent_grids();                                                                                                   \
        const uint64_t units = p.rows * p.row_units.divisor;                                                                      \
        for (uint64_t i = blockIdx.x * static_cast<uint64_t>(kThreads) + threadIdx.x; i < units;                                  \
             i += gridDim.x * static_cast<uint64_t>(kThreads)) {                                                                  \
            const Unit at = unit_at(p, i);                                                                                        \
            const bool nope = at.unit < p.nope_units;                                                                             \
            const uint8_t* from = nope ? p.k_nope + at.token * p.k_nope_token + at.head * p.k_nope_head + at.unit * (kUnit * BYTES) \
                                       : p.k_pe + at.token * p.k_pe_token + (at.unit - p.nope_units) * (kUnit * BYTES);           \
            STORE(p.k_out + i * (kUnit * BYTES), LOAD(from, nope ? p.k_nope_vector : p.k_pe_vector));                             \
        }                                                                                                                         \
    }

HOTPATH_CONCAT_GENERIC(mla_kv_concat_b16_generic, 2, load_unit_b16, store_16)
HOTPATH_CONCAT_GENERIC(mla_kv_concat_b8_generic, 1, load_unit_b8, store_8)

// ---- Instances of the fast kernels: source dtype, dtype of k_pe, scaled or not, threads a row -------------------------

#define HOTPATH_PACK(NAME, SOURCE, ROPE_IS_FP8, SCALED, LANES)                                          \
    extern "C" __global__ void __launch_bounds__(kThreads) NAME(const __grid_constant__ PackParams p) { \
        pack_fp8<SOURCE, ROPE_IS_FP8, SCALED, LANES>(p);                                                \
    }
#define HOTPATH_PACK_LANES(NAME, SOURCE, ROPE_IS_FP8, SCALED) \
    HOTPATH_PACK(NAME##_l8, SOURCE, ROPE_IS_FP8, SCALED, 8)   \
    HOTPATH_PACK(NAME##_l16, SOURCE, ROPE_IS_FP8, SCALED, 16)
#define HOTPATH_PACK_SOURCE(NAME, SOURCE)                                    \
    HOTPATH_PACK_LANES(mla_kv_pack_fp8_##NAME, SOURCE, false, false)         \
    HOTPATH_PACK_LANES(mla_kv_pack_fp8_##NAME##_pe8, SOURCE, true, false)    \
    HOTPATH_PACK_LANES(mla_kv_pack_fp8_##NAME##_scaled, SOURCE, false, true) \
    HOTPATH_PACK_LANES(mla_kv_pack_fp8_##NAME##_pe8_scaled, SOURCE, true, true)

HOTPATH_PACK_SOURCE(bf16, Bf16)
HOTPATH_PACK_SOURCE(fp16, Fp16)

#define HOTPATH_CONCAT(NAME, LANES)                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads) NAME(const __grid_constant__ PackParams p) { \
        concat_b16<LANES>(p);                                                                           \
    }
HOTPATH_CONCAT(mla_kv_concat_b16_l8, 8)
HOTPATH_CONCAT(mla_kv_concat_b16_l16, 16)

}  // namespace hotpath
