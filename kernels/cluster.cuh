// Thread-block clusters and barriers in shared memory.
#pragma once

#include "common.cuh"

namespace hotpath {

// ---- Cluster barrier -----------------------------------------------------------------------------------------------

// Says that this block runs; orders no memory.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Also waits until what this thread has written is visible, so it comes before large stores.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- Distributed shared memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// Where `address` of this block's shared memory is in another block of the cluster.
__device__ __forceinline__ uint32_t address_in_block(const void* address, uint32_t block) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(address)), "r"(block));
    return at;
}

__device__ __forceinline__ void store_to_block(uint32_t* address, uint32_t block, uint32_t value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in_block(address, block)), "r"(value) : "memory");
}
__device__ __forceinline__ void store_to_block(float* address, uint32_t block, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_block(address, block)), "f"(value) : "memory");
}

// ---- Barriers in shared memory, of one phase -------------------------------------------------------------------------

// By one thread, which also expects the bytes.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The barrier is passed once asynchronous copies or stores have brought that many bytes.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Stores to an address of address_in_block() and tells the barrier of that block: no fence, unlike a cluster barrier.
__device__ __forceinline__ void store_async(uint32_t to, uint32_t value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(value), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_async(uint32_t to, float value, uint32_t barrier) { store_async(to, __float_as_uint(value), barrier); }

// Orders what came to this block's shared memory, and no more: wait_for_bytes() also empties the L1 cache.
__device__ __forceinline__ void wait_for_shared_bytes(uint64_t* barrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "WAIT_%=:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t@!done bra WAIT_%=;\n\t}" ::"r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "WAIT_%=:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t@!done bra WAIT_%=;\n\t}" ::"r"(
            shared_address(barrier))
        : "memory");
}

}  // namespace hotpath
