#pragma once
// How many columns the CUDA kernels give the pairs of a query: the keys that 16 queries meet, in chunks of 32.
#include <cstdint>

namespace speedrun::kernels {

inline constexpr int kDcWarpRows = 16, kDcChunk = 32;
inline constexpr int kDcNarrowChunks = 4, kDcWideChunks = 9;  // windows up to 112 and up to 272
inline constexpr int64_t kDcMaxWindow = 255;
static_assert(kDcMaxWindow + kDcWarpRows <= kDcWideChunks * kDcChunk);

constexpr int dc_chunks(int64_t window) {
  return window + kDcWarpRows <= kDcNarrowChunks * kDcChunk ? kDcNarrowChunks : kDcWideChunks;
}

}  // namespace speedrun::kernels
