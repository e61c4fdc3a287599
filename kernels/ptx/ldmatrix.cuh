#pragma once
// Warp-wide loads of 8 × 8 BF16 matrices from shared memory into the register layout of mma (sm_75 and later).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
#include <cstdint>

namespace speedrun::ptx {

// Four matrices; lane 8i + r gives the shared-memory address of row r (16 bytes, 16-byte aligned) of matrix i. Afterwards out[i] of
// a lane holds row lane / 4, columns 2·(lane % 4) and the next of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The same with every matrix transposed: out[i] holds rows 2·(lane % 4) and the next, column lane / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

}  // namespace speedrun::ptx
