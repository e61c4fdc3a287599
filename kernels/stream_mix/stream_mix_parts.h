#pragma once
// How stream_mix_backward cuts the tokens for the sums of its scalars' gradients: by N alone, so that the bits depend neither on
// the GPU nor on the number of threads.
#include <cstdint>

namespace speedrun::kernels {

inline constexpr int64_t kMixPartRows = 16;  // tokens of one partial sum, one block on CUDA

constexpr int64_t stream_mix_parts(int64_t N) { return (N + kMixPartRows - 1) / kMixPartRows; }

}  // namespace speedrun::kernels
