#pragma once
// The algorithm of every production shape, as measured. Rows are printed by `speedrun bench gemm --tune`; paste its output below.
// A row that the installed cuBLASLt refuses falls back to the heuristic and is named in the log.
#include <cstdint>
#include <initializer_list>

#include "kernels/gemm/gemm_cuda.h"

namespace speedrun::kernels {

// cuBLASLt's algorithm configuration. Parts of a split K go through the workspace in FP32 and are added in a step of their own.
struct GemmAlgorithm {
  int id = 0;
  uint32_t tile = 0, stages = 0, swizzle = 0, custom = 0;
  uint16_t inner_shape = 0, cluster_shape = 0;
  int split_k = 1;
  bool operator==(const GemmAlgorithm&) const = default;
};

struct GemmTuning {
  int compute_capability = 0;
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false, float_out = false, accumulate = false;  // accumulate: beta is not 0
  Epilogue epilogue = Epilogue::none;
  int batch = 1;
  GemmAlgorithm algorithm;
};

// clang-format off
inline constexpr std::initializer_list<GemmTuning> kGemmTuning = {
};
// clang-format on

}  // namespace speedrun::kernels
