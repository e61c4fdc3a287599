#pragma once
// Into how many parts the tokens are cut for the sums over them: by N alone, so that results do not depend on the device.
#include <algorithm>
#include <cstdint>

namespace speedrun::kernels {

inline constexpr int kGateNetTokens = 128;     // least part
inline constexpr int64_t kGateNetParts = 264;  // most parts: two blocks for each of the 132 multiprocessors of an H100 or H200

inline int64_t gate_net_parts(int64_t N) { return std::min((N + kGateNetTokens - 1) / kGateNetTokens, kGateNetParts); }

}  // namespace speedrun::kernels
