// What the kernels share: global memory access, programmatic dependent launch, FP8 conversion, division by
// an invariant. No kernel lives here and nothing here knows an op.
#pragma once

#include <cstdint>

namespace hotpath {

// ---- Programmatic dependent launch -----------------------------------------------------------------------------
// Every kernel is launched with the programmatic stream serialization attribute: it may start while the kernel before
// it still runs. wait_for_prior_grids() returns once that kernel has finished and its writes are visible. Every
// thread that touches global memory calls it first; what is read earlier must be memory that no kernel writes.

__device__ __forceinline__ void wait_for_prior_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start once every block of this grid has come here (or exited). That kernel waits
// for this grid's end before it touches memory, so the call may come early, but not before this kernel's own wait: kernels
// that only wait would pile up on the multiprocessors and crowd out the one that works. The best place is behind the
// loads (docs/kernels/mla_kv_pack.md: 2.5 us against 3.3 us at 512 tokens).
__device__ __forceinline__ void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Global memory ---------------------------------------------------------------------------------------------
// Plain loads, never ld.global.nc: after an early start, the non-coherent path does not promise to see what the kernel
// before has written. They go through L1 even where data is used once: without it (L1::no_allocate) a streaming kernel
// is 7 % slower on the H200 (docs/kernels/mla_kv_pack.md).

__device__ __forceinline__ uint4 load_16(const void* address) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ __forceinline__ uint2 load_8(const void* address) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

__device__ __forceinline__ float load_f32(const float* address) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address));
    return v;
}

// Loads under a condition, zero without. Predicated, not branched around: behind a branch each load would wait for itself.

__device__ __forceinline__ uint4 load_16_if(bool condition, const void* address) {
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(address), "r"(static_cast<uint32_t>(condition)));
    return v;
}

__device__ __forceinline__ uint2 load_8_if(bool condition, const void* address) {
    uint2 v = make_uint2(0, 0);
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t@p ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
                 : "+r"(v.x), "+r"(v.y)
                 : "l"(address), "r"(static_cast<uint32_t>(condition)));
    return v;
}

__device__ __forceinline__ uint32_t load_u32_if(bool condition, const void* address) {
    uint32_t v = 0;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p ld.global.u32 %0, [%1];\n\t}"
                 : "+r"(v)
                 : "l"(address), "r"(static_cast<uint32_t>(condition)));
    return v;
}

__device__ __forceinline__ uint32_t load_u16_if(bool condition, const void* address) {
    uint16_t v = 0;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p ld.global.u16 %0, [%1];\n\t}"
                 : "+h"(v)
                 : "l"(address), "r"(static_cast<uint32_t>(condition)));
    return v;
}

__device__ __forceinline__ void store_16(void* address, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_8(void* address, uint2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
}

// ---- Division of a 32-bit number by an invariant ----------------------------------------------------------------
// Exact for every dividend below 2^31 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994). The host computes multiplier and shift: src/cuda/launch.rs, FastDiv.

struct FastDiv {
    uint32_t divisor;
    uint32_t multiplier;
    uint32_t shift;

    __device__ __forceinline__ uint32_t divide(uint32_t n) const { return __umulhi(n << 1, multiplier) >> shift; }
};

// ---- FP8 e4m3 ----------------------------------------------------------------------------------------------------
// Round to nearest even, saturating to +-448 (infinities too). The hardware turns NaN into 0x7F; the sign of the
// value is put back by OR-ing it in, which changes no byte that is not NaN.

constexpr uint32_t kByteSigns = 0x80808080u;

__device__ __forceinline__ uint32_t e4m3x4_from_floats(float a, float b, float c, float d) {
    uint16_t lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
    return static_cast<uint32_t>(lo) | static_cast<uint32_t>(hi) << 16;
}

// The signs of four 16-bit floats in two words, each as the top bit of its byte.
__device__ __forceinline__ uint32_t byte_signs(uint32_t w0, uint32_t w1) { return __byte_perm(w0, w1, 0x7531) & kByteSigns; }

__device__ __forceinline__ float round_to_bf16(float v) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ float low_bf16(uint32_t w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high_bf16(uint32_t w) { return __uint_as_float(w & 0xFFFF0000u); }

__device__ __forceinline__ float2 floats_from_f16x2(uint32_t w) {
    float2 f;
    asm("{\n\t.reg .f16 lo, hi;\n\tmov.b32 {lo, hi}, %2;\n\tcvt.f32.f16 %0, lo;\n\tcvt.f32.f16 %1, hi;\n\t}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(w));
    return f;
}

__device__ __forceinline__ uint32_t f16x2_from_e4m3x2(uint16_t two) {
    uint32_t w;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(w) : "h"(two));
    return w;
}

// Four bf16 values in two words.
struct Bf16 {
    static __device__ __forceinline__ uint32_t to_e4m3(uint32_t w0, uint32_t w1) {
        return e4m3x4_from_floats(low_bf16(w0), high_bf16(w0), low_bf16(w1), high_bf16(w1)) | byte_signs(w0, w1);
    }
    static __device__ __forceinline__ float2 floats(uint32_t w) { return make_float2(low_bf16(w), high_bf16(w)); }
};

// Four fp16 values in two words; every fp16 value is exact in fp32, so one rounding remains.
struct Fp16 {
    static __device__ __forceinline__ uint32_t to_e4m3(uint32_t w0, uint32_t w1) {
        uint16_t lo, hi;
        asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(lo) : "r"(w0));
        asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(hi) : "r"(w1));
        return (static_cast<uint32_t>(lo) | static_cast<uint32_t>(hi) << 16) | byte_signs(w0, w1);
    }
    static __device__ __forceinline__ float2 floats(uint32_t w) { return floats_from_f16x2(w); }
};

// e4m3(x / scale), fp32 division. `signs` holds the signs of the four x at the byte tops. A quotient that is not NaN
// has the sign of x times that of the scale; NaN gets the same one.
__device__ __forceinline__ uint32_t e4m3_quotients(float2 lo, float2 hi, uint32_t signs, float scale) {
    const uint32_t flip = __float_as_uint(scale) >> 31 ? kByteSigns : 0u;
    return e4m3x4_from_floats(__fdiv_rn(lo.x, scale), __fdiv_rn(lo.y, scale), __fdiv_rn(hi.x, scale), __fdiv_rn(hi.y, scale)) |
           (signs ^ flip);
}

}  // namespace hotpath
