#pragma once
// How norm_backward cuts the rows for its column sums (dgain, dshift): by N alone, so that the bits depend neither on the GPU nor
// on the number of threads. Enough parts to fill any GPU in several waves, few enough that the partial sums stay far below the
// activations' traffic.
#include <algorithm>
#include <cstdint>

namespace speedrun::kernels {

constexpr int64_t norm_backward_parts(int64_t N) { return std::clamp<int64_t>((N + 31) / 32, 1, 1024); }
constexpr int64_t norm_backward_part_rows(int64_t N) { return (N + norm_backward_parts(N) - 1) / norm_backward_parts(N); }

}  // namespace speedrun::kernels
