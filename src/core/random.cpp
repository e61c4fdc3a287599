#include "src/core/random.h"

#include <cmath>
#include <numbers>

namespace speedrun {
namespace {

double to_unit(uint32_t high, uint32_t low) {
  const uint64_t bits = (uint64_t{high} << 20) ^ (low >> 12);  // 52 bits
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

}  // namespace

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(stream),
                               static_cast<uint32_t>(stream >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(p1), static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1,
         static_cast<uint32_t>(p0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto bits = philox(seed, stream, index);
  return to_unit(bits[0], bits[1]);
}

double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto bits = philox(seed, stream, index);
  return std::sqrt(-2 * std::log(to_unit(bits[0], bits[1]))) * std::cos(2 * std::numbers::pi * to_unit(bits[2], bits[3]));
}

}  // namespace speedrun
