// The traffic floor of the benchmarks: reads `read_units` and writes `write_units` 16-byte units and does nothing else.
#include "common.cuh"

namespace hotpath {

// Host twin: src/ops/bench_stream.rs, StreamParams.
struct StreamParams {
    const uint4* src;
    uint4* dst;
    uint64_t read_units, write_units;
};

// One unit of either side a thread, the fastest of the mappings tried (docs/kernels/mla_kv_pack.md). A thread writes what
// it read, so no load can be dropped; where there is more to read than to write, the rest is kept by a store that the
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

}  // namespace hotpath
