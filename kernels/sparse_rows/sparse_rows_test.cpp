#include "kernels/sparse_rows/sparse_rows.h"

#include "kernels/sparse_rows/sparse_rows_problem_test.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Pack {
  std::vector<int32_t> index;
  std::vector<T> values;
};

template <class T>
Pack<T> pack(const std::vector<T>& table, const std::vector<int32_t>& rows, int64_t V, int C, int W, int64_t K,
             const HostExec& exec = {}) {
  Pack<T> p{std::vector<int32_t>(static_cast<size_t>(W * K), 77), std::vector<T>(static_cast<size_t>(W * K * C), T{-5})};
  const auto num_rows = static_cast<int32_t>(rows.size());
  sparse_rows_pack(SparseRowsPack<T>{p.index.data(), p.values.data(), table.data(), rows.data(), &num_rows, V, K, W, C}, exec);
  return p;
}

TEST(SparseRows, PackSortsRowsByOwnerAndPads) {
  constexpr int64_t kV = 10;
  constexpr int kC = 2, kW = 3;  // owners of rows 0-2, 3-5, 6-9
  std::vector<float> table(kV * kC);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i);
  const Pack<float> p = pack(table, {0, 2, 6, 7, 9}, kV, kC, kW, 3);
  EXPECT_EQ(p.index, (std::vector<int32_t>{0, 2, -1, -1, -1, -1, 6, 7, 9}));
  EXPECT_EQ(p.values, (std::vector<float>{0, 1, 4, 5, -5, -5, -5, -5, -5, -5, -5, -5, 12, 13, 14, 15, 18, 19}));
}

TEST(SparseRows, RowsBeyondTheCapacityShowAsNan) {
  const std::vector<float> table(20, 1.0f);
  const Pack<float> p = pack(table, {1, 2, 3, 7}, 10, 2, 2, 2);
  EXPECT_EQ(p.index, (std::vector<int32_t>{1, 2, 7, -1}));
  EXPECT_EQ(p.values[1], 1.0f);
  EXPECT_TRUE(std::isnan(p.values[2]) && std::isnan(p.values[3]));
  EXPECT_EQ(p.values[4], 1.0f);
}

TEST(SparseRows, PackedSumsEqualTheDenseOnesInTheOrderOfTheRanks) {
  Random random = test_random();
  for (const int W : {1, 2, 3, 8}) {
    for (const double share : {0.0, 0.1, 1.0}) {
      SCOPED_TRACE("W = " + std::to_string(W) + ", share = " + std::to_string(share));
      constexpr int64_t kV = 101;
      constexpr int kC = 3;
      std::vector<std::vector<float>> tables, values;
      std::vector<std::vector<int32_t>> rows, indices;
      int64_t K = 1;
      for (int rank = 0; rank < W; ++rank) {
        rows.push_back(random_rows(random, kV, share));
        tables.push_back(table_of<float>(random, rows.back(), kV, kC));
        K = std::max(K, largest_part(rows.back(), kV, W));
      }
      std::vector<float> dense = tables[0];
      for (int rank = 1; rank < W; ++rank) {
        for (size_t i = 0; i < dense.size(); ++i) dense[i] += tables[static_cast<size_t>(rank)][i];
      }
      for (int rank = 0; rank < W; ++rank) {
        Pack<float> p = pack(tables[static_cast<size_t>(rank)], rows[static_cast<size_t>(rank)], kV, kC, W, K);
        indices.push_back(std::move(p.index));
        values.push_back(std::move(p.values));
      }
      for (int owner = 0; owner < W; ++owner) {
        const std::vector<int32_t> index = received_by(owner, indices);
        const std::vector<float> received = received_by(owner, values);
        const std::vector<float> before = tables[static_cast<size_t>(owner)];
        std::vector<float> after = before;
        sparse_rows_sum(SparseRowsSum<float>{after.data(), index.data(), received.data(), K, W, kC}, HostExec{});
        for (int64_t i = 0; i < kV * kC; ++i) {
          const bool own = i / kC >= sparse_rows_begin(kV, W, owner) && i / kC < sparse_rows_begin(kV, W, owner + 1);
          EXPECT_EQ(after[i], own ? dense[i] : before[i]) << "owner " << owner << ", row " << i / kC;
        }
      }
    }
  }
}

TEST(SparseRows, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const std::vector<int32_t> rows = random_rows(random, 300, 0.3);
  const std::vector<float> table = table_of<float>(random, rows, 300, 5);
  check_thread_counts([&](const HostExec& exec) {
    const Pack<float> p = pack(table, rows, 300, 5, 4, 75, exec);
    return Outputs{p.values, {p.index.begin(), p.index.end()}};
  });
}

}  // namespace
}  // namespace speedrun::kernels
