#pragma once
// Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies (sm_90).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
// A barrier goes through phases 0, 1, 2, …: one ends when `arrivals` threads have arrived and all bytes announced for it are there.
// Addresses are those of shared memory (ptx::shared_address), 8 bytes each.
#include <cstdint>

namespace speedrun::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine; a block-wide barrier then makes them known to the block.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Releases what this thread did before.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Announces `bytes` more bytes for the current phase, then arrives.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// True once the phase before the current one has this parity (phase n has parity n % 2; parity 1 is true of a fresh barrier).
// Sleeps for a while, chosen by the hardware, before it answers false. A phase that is two behind or two ahead has the same parity:
// callers must know that they are at most one off. Acquires what arriving threads and copies released.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace speedrun::ptx
