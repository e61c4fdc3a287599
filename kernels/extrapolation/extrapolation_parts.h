#pragma once

namespace speedrun::kernels {

// Partial sums per piece on CUDA: a piece is cut in the same way everywhere, so the bits depend on no GPU.
inline constexpr int kSnapshotParts = 4;

}  // namespace speedrun::kernels
