// NVFP4 on the device: the scale and the 16 codes of a block, where a scale lies in each layout, and the zeros that
// pad a layout. No kernel lives here. Host twins: src/nvfp4.rs. The numerics are in docs/kernels/nvfp4_quant.md.
#pragma once

#include "common.cuh"

namespace hotpath {

constexpr int kBlock = 16;  // elements that share a scale
constexpr float kLargestCode = 6.0f;

// ---- Scale layouts -----------------------------------------------------------------------------------------------

enum ScaleLayout : uint32_t { kLinear = 0, kSwizzled128x4 = 1, kSwizzled8x4 = 2 };

// Byte offset of the scale of block `col` of `row`; `cols` is the padded number of scales of a row.
__device__ __forceinline__ uint64_t scale_offset(uint32_t layout, uint64_t row, uint32_t col, uint32_t cols) {
    const uint32_t r = static_cast<uint32_t>(row);
    if (layout == kSwizzled128x4) {
        return ((row >> 7) * (cols >> 2) + (col >> 2)) << 9 | (r & 31) << 4 | (r >> 5 & 3) << 2 | (col & 3);
    }
    if (layout == kSwizzled8x4) return ((row >> 3) * (cols >> 2) + (col >> 2)) << 5 | (r & 7) << 2 | (col & 3);
    return row * cols + col;
}

// Zeroes piece `piece` of the scales of the rows from `rows` to the end of their tile of rows. A piece is 16 bytes of
// the 128x4 layout, where four rows of a tile interleave, and 4 bytes of the 8x4 layout.
__device__ __forceinline__ void zero_padding_rows(uint8_t* scales, uint32_t layout, uint64_t rows, uint32_t cols, uint32_t piece) {
    if (layout == kSwizzled128x4) {
        const uint32_t first = static_cast<uint32_t>(rows & 127), lane = piece & 31;
        uint8_t* at = scales + (((rows >> 7) * (cols >> 2)) << 9) + static_cast<uint64_t>(piece) * 16;
        if (lane >= first) {
            store_16(at, make_uint4(0, 0, 0, 0));
            return;
        }
#pragma unroll
        for (uint32_t group = 1; group < 4; ++group) {
            if (group * 32 + lane >= first) asm volatile("st.global.u32 [%0], %1;" ::"l"(at + group * 4), "r"(0) : "memory");
        }
    } else if ((piece & 7) >= static_cast<uint32_t>(rows & 7)) {
        uint8_t* at = scales + (((rows >> 3) * (cols >> 2)) << 5) + static_cast<uint64_t>(piece) * 4;
        asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(0) : "memory");
    }
}

__device__ __forceinline__ void store_byte(uint8_t* address, uint32_t byte) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(byte) : "memory");
}

// ---- Sixteen 16-bit floats in eight words --------------------------------------------------------------------------

struct Sixteen {
    uint32_t w[8];
};

template <bool kVector>
__device__ __forceinline__ Sixteen load_sixteen(const uint8_t* address) {
    Sixteen x;
    if constexpr (kVector) {
        const uint4 lo = load_16(address), hi = load_16(address + 16);
        x = {{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    } else {
        uint16_t h[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) asm volatile("ld.global.u16 %0, [%1];" : "=h"(h[i]) : "l"(address + 2 * i));
#pragma unroll
        for (int i = 0; i < 8; ++i) x.w[i] = h[2 * i] | static_cast<uint32_t>(h[2 * i + 1]) << 16;
    }
    return x;
}

template <bool kVector>
__device__ __forceinline__ void store_sixteen(uint8_t* address, const Sixteen& x) {
    if constexpr (kVector) {
        store_16(address, make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]));
        store_16(address + 16, make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]));
    } else {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const uint16_t h = static_cast<uint16_t>(x.w[i / 2] >> (i % 2 * 16));
            asm volatile("st.global.u16 [%0], %1;" ::"l"(address + 2 * i), "h"(h) : "memory");
        }
    }
}

// Arithmetic of a 16-bit dtype on two elements in a word. Maxima ignore NaN unless both operands are NaN.
struct Bf16Pair : Bf16 {
    static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
        uint32_t c;
        asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
        return c;
    }
    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
        uint32_t c;
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
        return c;
    }
    static __device__ __forceinline__ uint32_t round(float lo, float hi) {
        uint32_t c;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(hi), "f"(lo));
        return c;
    }
};

struct Fp16Pair : Fp16 {
    static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
        uint32_t c;
        asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
        return c;
    }
    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
        uint32_t c;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
        return c;
    }
    static __device__ __forceinline__ uint32_t round(float lo, float hi) {
        uint32_t c;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(hi), "f"(lo));
        return c;
    }
};

// ---- The numbers ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct BlockScale {
    uint32_t byte;  // e4m3
    float factor;   // what an element is multiplied by
};

__device__ __forceinline__ BlockScale block_scale(float amax, float global_scale, float rcp_global_scale) {
    constexpr float kRcp6 = 0x1.555556p-3f;  // rcp.approx.ftz.f32(6)
    const float wanted = __fmul_rn(global_scale, __fmul_rn(amax, kRcp6));
    uint16_t bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(0.0f), "f"(wanted));
    const float stored = floats_from_f16x2(f16x2_from_e4m3x2(bytes)).x;
    const float factor = stored != 0.0f ? rcp_approx(__fmul_rn(stored, rcp_global_scale)) : 0.0f;
    return {bytes & 0xFFu, factor};
}

#if __CUDA_ARCH__ >= 1000

template <bool kClamp>
__device__ __forceinline__ uint32_t e2m1x8(const float (&y)[8]) {
    uint32_t word;
    asm("{\n\t.reg .b8 b0, b1, b2, b3;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n\t"
        "mov.b32 %0, {b0, b1, b2, b3};\n\t}"
        : "=r"(word)
        : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
    return word;
}

#else

// Eight codes without the instruction, in one rounding each. c is the sign of y times 2^e, e the exponent of y but at
// least 0; the spacing of e2m1 there is 2^(e-1). Adding y to c * 2^22, whose last bit has that spacing, rounds y as e2m1
// does and leaves the rounded mantissa in the last bits; the exponent adds two codes a step. The 3 in kMagic takes off the
// codes that its bias adds, modulo 8. NaN comes out as code 7 without a sign. Beyond 7 the codes wrap: kClamp for those.
template <bool kClamp>
__device__ __forceinline__ uint32_t e2m1x8(const float (&y)[8]) {
    constexpr float kMagic = 4194304.0f + 3.0f;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float v = y[i];
        if constexpr (kClamp) v = fmaxf(fminf(v, kLargestCode), -kLargestCode);
        const uint32_t c = (__float_as_uint(fmaxf(fabsf(v), 1.0f)) | __float_as_uint(v)) & 0xFF800000u;
        const uint32_t sum = __float_as_uint(__fmaf_rn(__uint_as_float(c), kMagic, v));
        const uint32_t rotated = __funnelshift_l(sum, sum, 1);  // exponent, mantissa, sign
        word = __funnelshift_r(word, rotated + (rotated >> 22), 4);
    }
    return (word >> 1 & 0x77777777u) | (word & 0x11111111u) << 3;
}

#endif

template <bool kClamp, class Pair>
__device__ __forceinline__ uint2 codes_of(const Sixteen& x, float factor) {
    float y[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 two = Pair::floats(x.w[i]);
        y[i / 4][i % 4 * 2] = __fmul_rn(two.x, factor);
        y[i / 4][i % 4 * 2 + 1] = __fmul_rn(two.y, factor);
    }
    return make_uint2(e2m1x8<kClamp>(y[0]), e2m1x8<kClamp>(y[1]));
}

// Quantises a block: its codes, and its scale in `scale_byte`.
template <class Pair>
__device__ __forceinline__ uint2 quantize_block(const Sixteen& x, float global_scale, float rcp_global_scale, uint32_t& scale_byte) {
    uint32_t two = x.w[0] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < 8; ++i) two = Pair::max(two, x.w[i] & 0x7FFF7FFFu);
    const float2 pair = Pair::floats(two);
    const float amax = fmaxf(pair.x, pair.y);
    const BlockScale scale = block_scale(amax, global_scale, rcp_global_scale);
    scale_byte = scale.byte;
#if __CUDA_ARCH__ < 1000
    // A saturated or subnormal scale, and infinities.
    if (!(__fmul_rn(amax, scale.factor) < 7.0f)) return codes_of<true, Pair>(x, scale.factor);
#endif
    return codes_of<false, Pair>(x, scale.factor);
}

}  // namespace hotpath
