#pragma once
// Launch arithmetic and limits.
#include <cstdint>

#include "kernels/base/cuda_check.h"
#include "kernels/base/dtype.h"

namespace speedrun::kernels {

SPEEDRUN_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid dimension. Work is put on x, which alone reaches 2^31 − 1.
inline unsigned grid_size(int64_t blocks, const char* op) {
  require(blocks > 0 && blocks <= 0x7fffffff, op, ": ", blocks, " thread blocks do not fit a grid (1 to 2147483647)");
  return static_cast<unsigned>(blocks);
}

// More than 48 KB of dynamic shared memory has to be asked for, once per kernel and device; asking again is cheap.
template <class Kernel>
void allow_dynamic_smem(Kernel* kernel, int bytes, const char* op) {
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op,
             ": ", bytes, " bytes of shared memory");
}

}  // namespace speedrun::kernels
