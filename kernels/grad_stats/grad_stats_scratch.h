#pragma once

namespace speedrun::kernels {

// Partial sums of squares per gradient segment on CUDA: a segment is cut by its own size alone, so the bits depend on no GPU.
inline constexpr int kGradSumParts = 256;

}  // namespace speedrun::kernels
