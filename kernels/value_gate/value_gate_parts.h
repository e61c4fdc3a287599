#pragma once
// How value_gate_backward cuts the tokens for its partial sums: by N alone, so that the bits depend neither on the GPU nor on the
// number of threads. A part is about what a thread block takes at a time, or a multiple of it.
#include <algorithm>
#include <cstdint>

namespace speedrun::kernels {

inline constexpr int kValueGateTile = 128;  // tokens
constexpr int64_t value_gate_parts(int64_t N) { return std::clamp<int64_t>((N + kValueGateTile - 1) / kValueGateTile, 1, 512); }
constexpr int64_t value_gate_part_rows(int64_t N) { return (N + value_gate_parts(N) - 1) / value_gate_parts(N); }

}  // namespace speedrun::kernels
