#pragma once
// Counter-based random numbers (Philox 4x32-10, Salmon et al. 2011): the value depends on (seed, stream, index) alone, so
// parameters can be drawn in any order, on any number of ranks, and give the same bits.
#include <array>
#include <cstdint>

namespace speedrun {

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index);

double random_uniform(uint64_t seed, uint64_t stream, uint64_t index);  // (0, 1)
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);   // N(0, 1), Box-Muller

}  // namespace speedrun
