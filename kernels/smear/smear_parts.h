#pragma once
// How smear_backward cuts the tokens for the sums of dgate_weight and dlambda: by N alone, so that the bits depend neither on the
// GPU nor on the number of threads.
#include <cstdint>

namespace speedrun::kernels {

inline constexpr int kSmearMaxGate = 32;              // channels that the gate may look at
inline constexpr int kSmearSums = kSmearMaxGate + 1;  // of each part: those of dgate_weight, then that of dlambda
inline constexpr int64_t kSmearPartRows = 32;         // tokens of one partial sum, one block on CUDA

constexpr int64_t smear_parts(int64_t N) { return (N + kSmearPartRows - 1) / kSmearPartRows; }

}  // namespace speedrun::kernels
