#pragma once
// Layouts of documents for benches of attention, the same in every run.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace speedrun::kernels {

// doc_start of N tokens in rows of equal length.
inline std::vector<int32_t> bench_rows(int64_t N, int64_t row_tokens) {
  std::vector<int32_t> doc_start(static_cast<size_t>(N));
  for (int64_t t = 0; t < N; ++t) doc_start[static_cast<size_t>(t)] = static_cast<int32_t>(t / row_tokens * row_tokens);
  return doc_start;
}

// doc_start of N tokens in documents as long as those of web text: log-normal, median 500 tokens, sigma 1, cut at 2048. The lengths
// are quantiles in a scrambled order.
inline std::vector<int32_t> bench_web_documents(int64_t N) {
  constexpr double kMedian = 500, kSigma = 1, kGoldenRatio = 0.6180339887498949;
  std::vector<int32_t> doc_start;
  for (int document = 0; static_cast<int64_t>(doc_start.size()) < N; ++document) {
    const double u = std::fmod(0.5 + document * kGoldenRatio, 1.0);
    // The logistic distribution stands in for the normal one: the same variance, and a closed form for its quantiles.
    const double normal = std::log(u / (1 - u)) * std::sqrt(3.0) / 3.14159265358979;
    const auto start = static_cast<int32_t>(doc_start.size());
    doc_start.insert(doc_start.end(), static_cast<size_t>(std::clamp(kMedian * std::exp(kSigma * normal), 16.0, 2048.0)), start);
  }
  doc_start.resize(static_cast<size_t>(N));
  return doc_start;
}

// Pairs of a query and a key that it sees. A query sees `window` keys before it, all of its document if that is negative.
inline double attended_pairs(const std::vector<int32_t>& doc_start, int64_t window) {
  double pairs = 0;
  for (size_t t = 0; t < doc_start.size(); ++t) {
    const int64_t query = static_cast<int64_t>(t);
    pairs += static_cast<double>(query - std::max<int64_t>(doc_start[t], window < 0 ? 0 : query - window) + 1);
  }
  return pairs;
}

}  // namespace speedrun::kernels
