// NVFP4 on the device: the scale and the 16 codes of a block, where a scale lies in each layout, and the zeros that
// pad a layout. No kernel lives here. Host twins: src/nvfp4.rs. The numerics are in docs/kernels/nvfp4_quant.md.
#pragma once

#include "common.cuh"

namespace hotpath {

constexpr int kBlock = 16;  // elements that share a scale

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
    static constexpr bool kRoundsToEightBits = true;
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
    static constexpr bool kRoundsToEightBits = false;
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

__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
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

// The codes of eight elements, the first in the lowest nibble.
template <bool kSpecial, class Pair>
__device__ __forceinline__ uint32_t codes_of_eight(const uint32_t* words, float factor) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = Pair::floats(words[i]);
        y[2 * i] = __fmul_rn(two.x, factor);
        y[2 * i + 1] = __fmul_rn(two.y, factor);
    }
    uint32_t codes;
    asm("{\n\t.reg .b8 b0, b1, b2, b3;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n\t"
        "mov.b32 %0, {b0, b1, b2, b3};\n\t}"
        : "=r"(codes)
        : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
    return codes;
}

#else

// The same without the instruction. The code of a magnitude y is the least of 2y, y + 2 and y/2 + 4, rounded to the
// nearest even integer; adding 2^23 rounds so, in the one rounding of the fused multiply-add, and leaves the code in the
// last bits, under constant bits that the sum of all eight takes off. Most of this runs beside the integer pipe, which
// is the bound. Blocks with NaN, infinity or a product of 7 or more are special: they need a last minimum, and
// signs from the products, of which NaN has none.
template <bool kSpecial, class Pair>
__device__ __forceinline__ uint32_t codes_of_eight(const uint32_t* words, float factor) {
    constexpr float kInteger = 8388608.0f;
    constexpr uint32_t kIntegerBits = 0x4B000000u;
    uint32_t codes = 0u - kIntegerBits * 0x11111111u;
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 two = Pair::floats(kSpecial ? words[i / 2] : words[i / 2] & 0x7FFF7FFFu);
        float y = __fmul_rn(i % 2 ? two.y : two.x, factor);
        if constexpr (kSpecial) {
            signs |= (__float_as_uint(y) >> 31) << (4 * i + 3);
            y = fabsf(y);
        }
        float code = fminf(fminf(__fmaf_rn(y, 2.0f, kInteger), __fadd_rn(y, kInteger + 2.0f)), __fmaf_rn(y, 0.5f, kInteger + 4.0f));
        if constexpr (kSpecial) code = fminf(code, kInteger + 7.0f);
        codes += __float_as_uint(code) << 4 * i;
    }
    if constexpr (!kSpecial) {
        const uint32_t a = __byte_perm(words[0], words[1], 0x7351), b = __byte_perm(words[2], words[3], 0x7351);
        const uint32_t even = __byte_perm(a, b, 0x5410), odd = __byte_perm(a, b, 0x7632);
        signs = (odd & 0x80808080u) | (even >> 4 & 0x08080808u);
    }
    return codes | signs;
}

#endif

template <bool kSpecial, class Pair>
__device__ __forceinline__ uint2 codes_of(const Sixteen& x, float factor) {
    return make_uint2(codes_of_eight<kSpecial, Pair>(x.w, factor), codes_of_eight<kSpecial, Pair>(x.w + 4, factor));
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
    // The larger of two patterns is the larger magnitude, and NaN above all: a maximum that does not ignore it.
    uint32_t largest = x.w[0] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < 8; ++i) largest = max_u16x2(largest, x.w[i] & 0x7FFF7FFFu);
    const float2 any = Pair::floats(largest);
    const bool plain = __fmul_rn(any.x, scale.factor) < 7.0f && __fmul_rn(any.y, scale.factor) < 7.0f;
    if (!plain) return codes_of<true, Pair>(x, scale.factor);
#endif
    return codes_of<false, Pair>(x, scale.factor);
}

// ---- Outputs -------------------------------------------------------------------------------------------------------

// Codes and scales of one quantisation. Host twin: src/ops/nvfp4_quant/cuda.rs, OutputParams.
struct OutputParams {
    uint8_t* packed;
    uint8_t* scales;
    const float* global_scale;
    uint32_t layout;      // ScaleLayout
    uint32_t scale_cols;  // of a row, padding included
};

template <class Pair>
__device__ __forceinline__ void store_quantized(const OutputParams& out, const Sixteen& x, uint64_t row, uint32_t col, uint32_t cols,
                                                float global_scale, float rcp_global_scale) {
    uint32_t scale;
    const uint2 codes = quantize_block<Pair>(x, global_scale, rcp_global_scale, scale);
    store_8(out.packed + (row * cols + col) * 8, codes);
    store_byte(out.scales + scale_offset(out.layout, row, col, out.scale_cols), scale);
}

__device__ __forceinline__ void zero_padding_columns(const OutputParams& out, uint64_t row, uint32_t cols) {
    const uint32_t col = cols + threadIdx.x;
    if (col < out.scale_cols) store_byte(out.scales + scale_offset(out.layout, row, col, out.scale_cols), 0);
}

// Pieces of the padding rows of a layout: 16 bytes of 128x4, 4 of 8x4.
__device__ __forceinline__ void zero_padding(const OutputParams& out, uint64_t rows, uint64_t block) {
    const uint64_t piece = block * blockDim.x + threadIdx.x;
    const uint64_t pieces = static_cast<uint64_t>(out.scale_cols >> 2) * (out.layout == kSwizzled128x4 ? 32 : 8);
    if (piece < pieces) zero_padding_rows(out.scales, out.layout, rows, out.scale_cols, static_cast<uint32_t>(piece));
}

}  // namespace hotpath
