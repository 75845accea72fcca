// The traffic floor of the benchmarks: reads `read_units` and writes `write_units` 16-byte units and does nothing else.
#include "common.cuh"

namespace hotpath {

// Host twin: src/ops/bench_stream.rs, StreamParams.
struct StreamParams {
    const uint4* src;
    uint4* dst;
    uint64_t read_units, write_units;
};

// A block streams kThreads * kDepth units of each side; what it read is XORed into one word that is stored only if it
// has a value that the host never writes, so the loads stay.
constexpr int kStreamThreads = 256;
constexpr int kDepth = 4;

extern "C" __global__ void __launch_bounds__(kStreamThreads) bench_stream(const __grid_constant__ StreamParams p) {
    launch_dependent_grids();
    wait_for_prior_grids();
    const uint64_t first = blockIdx.x * static_cast<uint64_t>(kStreamThreads * kDepth) + threadIdx.x;
    uint4 got[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
        const uint64_t at = first + i * kStreamThreads;
        got[i] = at < p.read_units ? load_stream_16(p.src + at) : make_uint4(0, 0, 0, 0);
    }
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) all ^= got[i].x ^ got[i].y ^ got[i].z ^ got[i].w;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
        const uint64_t at = first + i * kStreamThreads;
        if (at < p.write_units) store_16(p.dst + at, make_uint4(all, all, all, all));
    }
    if (all == 0x9E3779B9u && p.write_units == 0) store_16(p.dst, got[0]);
}

}  // namespace hotpath
