#pragma once
// The bulk tensor copy engine (sm_90). A tensor map (kernels/base/tensor_map.h) says how a tensor lies in global memory and which
// box of it one copy moves; coordinates name the box's first element, innermost dimension first, and what lies outside the tensor
// reads as 0. One thread issues a copy.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
#include <cuda.h>

#include <cstdint>

namespace speedrun::ptx {

// Fetches a tensor map that is a __grid_constant__ parameter of the kernel.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Global to shared memory; the bytes of the whole box, outside parts included, count towards the barrier's phase.
__device__ __forceinline__ void tma_load_2d(uint32_t shared, const CUtensorMap& map, int32_t x0, int32_t x1, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(&map), "r"(x0), "r"(x1), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(uint32_t shared, const CUtensorMap& map, int32_t x0, int32_t x1, int32_t x2, int32_t x3,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          shared),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}

// Global memory to L2.
__device__ __forceinline__ void tma_prefetch_2d(const CUtensorMap& map, int32_t x0, int32_t x1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x0), "r"(x1) : "memory");
}

}  // namespace speedrun::ptx
