#pragma once
// Tables of several ranks, each zero but for its touched rows, and what the exchange between pack and sum does.
#include <algorithm>
#include <vector>

#include "kernels/sparse_rows/sparse_rows.h"
#include "kernels/testing/random.h"

namespace speedrun::testing {

// Ascending, each row once; `share` of all rows, so possibly none.
inline std::vector<int32_t> random_rows(Random& random, int64_t V, double share) {
  std::vector<int32_t> rows;
  for (int32_t row = 0; row < V; ++row) {
    if (random.uniform() < share) rows.push_back(row);
  }
  return rows;
}

// (V, C), zero outside `rows`.
template <class T>
std::vector<T> table_of(Random& random, const std::vector<int32_t>& rows, int64_t V, int C) {
  std::vector<T> table(static_cast<size_t>(V * C));
  for (const int32_t row : rows) {
    for (int c = 0; c < C; ++c) table[static_cast<size_t>(int64_t{row} * C + c)] = static_cast<T>(random.normal());
  }
  return table;
}

// The greatest number of rows of one owner.
inline int64_t largest_part(const std::vector<int32_t>& rows, int64_t V, int W) {
  int64_t largest = 0;
  for (int owner = 0; owner < W; ++owner) {
    largest = std::max<int64_t>(largest, std::count_if(rows.begin(), rows.end(), [&](int32_t row) {
                                  return row >= kernels::sparse_rows_begin(V, W, owner) &&
                                         row < kernels::sparse_rows_begin(V, W, owner + 1);
                                }));
  }
  return largest;
}

// Slice `owner` of every rank's pack, in the order of the ranks: what that owner receives.
template <class T>
std::vector<T> received_by(int owner, const std::vector<std::vector<T>>& packs) {
  std::vector<T> all;
  for (const std::vector<T>& pack : packs) {
    const auto slice = static_cast<std::ptrdiff_t>(pack.size() / packs.size());
    all.insert(all.end(), pack.begin() + owner * slice, pack.begin() + (owner + 1) * slice);
  }
  return all;
}

}  // namespace speedrun::testing
