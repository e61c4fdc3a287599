#pragma once
// Document layouts of a stream of N tokens for tests of attention: doc_start[t] is the first token of t's document.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/testing/random.h"

namespace speedrun::testing {

// Documents of the given lengths; what is left of N is one more.
inline std::vector<int32_t> document_starts(int64_t N, const std::vector<int>& lengths) {
  std::vector<int32_t> starts;
  for (const int length : lengths) starts.insert(starts.end(), static_cast<size_t>(length), static_cast<int32_t>(starts.size()));
  const auto last = static_cast<int32_t>(starts.size());
  starts.resize(static_cast<size_t>(N), last);
  return starts;
}

inline std::vector<int32_t> equal_documents(int64_t N, int64_t length) {
  std::vector<int32_t> starts(static_cast<size_t>(N));
  for (int64_t t = 0; t < N; ++t) starts[static_cast<size_t>(t)] = static_cast<int32_t>(t / length * length);
  return starts;
}

// Lengths from a log-normal distribution (sigma 1) with the given mean, cut at `longest`; about what web text looks like.
inline std::vector<int32_t> web_documents(int64_t N, double mean, int64_t longest, Random& random) {
  constexpr double kSigma = 1;
  std::vector<int32_t> starts;
  while (static_cast<int64_t>(starts.size()) < N) {
    const double length = std::exp(std::log(mean) - kSigma * kSigma / 2 + kSigma * random.normal());
    const auto start = static_cast<int32_t>(starts.size());
    starts.insert(starts.end(), static_cast<size_t>(std::clamp<int64_t>(std::llround(length), 1, longest)), start);
  }
  starts.resize(static_cast<size_t>(N));
  return starts;
}

}  // namespace speedrun::testing
