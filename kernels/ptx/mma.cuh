#pragma once
// Warp-wide matrix product of BF16 tiles with FP32 accumulators (sm_80 and later).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
#include <cstdint>

namespace speedrun::ptx {

// d (16 × 8) += a (16 × 16, row-major) · b (16 × 8, column-major). With g = lane / 4 and t = lane % 4, a lane holds
//   a[0] row g,     columns 2t, 2t+1      a[2] row g,     columns 2t+8, 2t+9
//   a[1] row g + 8, columns 2t, 2t+1      a[3] row g + 8, columns 2t+8, 2t+9
//   b0   column g,  rows 2t, 2t+1         b1   column g,  rows 2t+8, 2t+9
//   d[0], d[1] row g, columns 2t, 2t+1    d[2], d[3] row g + 8, columns 2t, 2t+1
// (two BF16 in a register, the lower index in the low half).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace speedrun::ptx
