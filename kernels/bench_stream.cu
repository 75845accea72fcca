// The traffic floor of the benchmarks: reads `read_units` and writes `write_units` 16-byte units and does nothing else.
#include "common.cuh"

namespace hotpath {

// Host twin: src/ops/bench_stream.rs, StreamParams.
struct StreamParams {
    const uint4* src;
    uint4* dst;
    uint64_t read_units, write_units;
};

// One unit of either side a thread. A thread writes what it read, so no load can be dropped; where there is more to read than to write, the rest is kept by a store that the
// host's buffers never trigger.
constexpr int kStreamThreads = 256;

extern "C" __global__ void __launch_bounds__(kStreamThreads) bench_stream(const __grid_constant__ StreamParams p) {
    const uint64_t at = blockIdx.x * static_cast<uint64_t>(kStreamThreads) + threadIdx.x;
    wait_for_prior_grids();
    uint4 got = make_uint4(0, 0, 0, 0);
    if (at < p.read_units) got = load_16(p.src + at);
    launch_dependent_grids();
    if (at < p.write_units) {
        store_16(p.dst + at, got);
    } else if ((got.x ^ got.y ^ got.z ^ got.w) == 0x9E3779B9u && got.x == 0x7F4A7C15u) {
        store_16(p.dst, got);
    }
}

// Reads kUnits 16-byte units a thread, kStreamThreads apart, all in flight at once. The loads are kept by a store that the host's
// buffers never trigger.
template <int kUnits>
__device__ __forceinline__ void read_only(const StreamParams& p) {
    const uint64_t first = blockIdx.x * static_cast<uint64_t>(kStreamThreads * kUnits) + threadIdx.x;
    wait_for_prior_grids();
    uint4 got[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const uint64_t at = first + i * kStreamThreads;
        got[i] = at < p.read_units ? load_16(p.src + at) : make_uint4(0, 0, 0, 0);
    }
    launch_dependent_grids();
    uint4 all = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        all.x ^= got[i].x;
        all.y ^= got[i].y;
        all.z ^= got[i].z;
        all.w ^= got[i].w;
    }
    if ((all.x ^ all.y ^ all.z ^ all.w) == 0x9E3779B9u && all.x == 0x7F4A7C15u) store_16(p.dst, all);
}

#define HOTPATH_READ(UNITS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(kStreamThreads) bench_read_##UNITS(const __grid_constant__ StreamParams p) { \
        read_only<UNITS>(p);                                                                                                    \
    }
HOTPATH_READ(1)
HOTPATH_READ(2)
HOTPATH_READ(4)
HOTPATH_READ(8)

// Host twin: src/ops/bench_stream.rs, RmwParams.
struct RmwParams {
    uint8_t* base;
    const int32_t* order;  // of `columns` places a tile: read from, then written to; one is both. Null: the order of memory
    int64_t stride;        // bytes from tile to tile
    uint32_t tile_blocks;  // blocks of a tile
    uint32_t columns;
};

// Reads and rewrites (or writes to other places) kUnits * 16 bytes a thread, kRmwThreads * that a block: 64, 32, 16, 8 or 4 KiB.
template <int kRmwThreads, int kUnits>
__device__ __forceinline__ void read_modify_write(const RmwParams& p) {
    const uint32_t tile = blockIdx.x / p.tile_blocks;
    const uint32_t part = blockIdx.x % p.tile_blocks;
    uint8_t* base = p.base + (static_cast<int64_t>(part) * kUnits * kRmwThreads + threadIdx.x) * 16;
    wait_for_prior_grids();
    auto place = [&](uint32_t column) {
        int32_t v = static_cast<int32_t>(tile);
        if (p.order) asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p.order + static_cast<int64_t>(tile) * p.columns + column));
        return base + v * p.stride;
    };
    uint8_t* at = place(0);
    uint4 v[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) v[i] = load_16(at + i * kRmwThreads * 16);
    launch_dependent_grids();
    for (uint32_t column = p.columns > 1; column < p.columns; ++column) {
        if (column > 0) at = place(column);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            v[i].x ^= 1;
            store_16(at + i * kRmwThreads * 16, v[i]);
        }
    }
}

#define HOTPATH_RMW(SPLIT, THREADS, UNITS)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) bench_rmw_##SPLIT(const __grid_constant__ RmwParams p) { \
        read_modify_write<THREADS, UNITS>(p);                                                                     \
    }
HOTPATH_RMW(1, 256, 16)
HOTPATH_RMW(2, 256, 8)
HOTPATH_RMW(4, 256, 4)
HOTPATH_RMW(8, 128, 4)
HOTPATH_RMW(16, 256, 1)

}  // namespace hotpath
