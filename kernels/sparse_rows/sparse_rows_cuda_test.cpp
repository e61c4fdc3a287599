// CUDA against the reference, bit for bit: the sums have one order.
#include "kernels/sparse_rows/sparse_rows.h"

#include <limits>

#include "kernels/sparse_rows/sparse_rows_problem_test.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;

struct Case {
  int64_t V, K;  // K: 0 for just enough
  int C, W;
  double share;  // of the rows, touched by a rank
};

// A sum with NaN has other bits on a GPU than on a CPU.
std::vector<float> with_one_nan(std::vector<float> values) {
  for (float& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  return values;
}

class SparseRowsCudaTest : public CudaTest {
 protected:
  struct Packed {
    std::vector<int32_t> index;
    std::vector<float> values;
  };

  // Slots without a row keep the poison, whose bits are compared as well.
  Packed packed_on_device(const Case& c, int64_t K, const std::vector<float>& table, const std::vector<int32_t>& rows,
                          Launch launch) {
    auto index = poisoned<int32_t>("index", c.W * K);
    auto values = poisoned<float>("values", c.W * K * c.C);
    auto table_device = uploaded("table", table);
    auto rows_device = uploaded("rows", rows);
    auto num_rows = uploaded("num_rows", std::vector<int32_t>{static_cast<int32_t>(rows.size())});
    run(launch, [&] {
      sparse_rows_pack(
          SparseRowsPack<bf16>{index.get(), values.get(), table_device.get(), rows_device.get(), num_rows.get(), c.V, K, c.W, c.C},
          exec());
    });
    return {index.download(), values.download()};
  }

  static Packed packed_on_host(const Case& c, int64_t K, const std::vector<float>& table, const std::vector<int32_t>& rows) {
    Packed p{std::vector<int32_t>(static_cast<size_t>(c.W * K)), std::vector<float>(static_cast<size_t>(c.W * K * c.C))};
    std::memset(p.values.data(), 0xff, p.values.size() * sizeof(float));
    const auto num_rows = static_cast<int32_t>(rows.size());
    sparse_rows_pack(SparseRowsPack<float>{p.index.data(), p.values.data(), table.data(), rows.data(), &num_rows, c.V, K, c.W, c.C},
                     HostExec{});
    return p;
  }

  void check(const Case& c, testing::Random& random) {
    SCOPED_TRACE("V=" + std::to_string(c.V) + " K=" + std::to_string(c.K) + " C=" + std::to_string(c.C) +
                 " W=" + std::to_string(c.W) + " share=" + std::to_string(c.share));
    std::vector<std::vector<int32_t>> rows, indices;
    std::vector<std::vector<float>> tables, values;
    int64_t K = std::max<int64_t>(c.K, 1);
    for (int rank = 0; rank < c.W; ++rank) {
      rows.push_back(testing::random_rows(random, c.V, c.share));
      tables.push_back(testing::table_of<float>(random, rows.back(), c.V, c.C));
      if (c.K == 0) K = std::max(K, testing::largest_part(rows.back(), c.V, c.W));
    }
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      const Packed expected = packed_on_host(c, K, tables[rank], rows[rank]);
      for (const Launch launch : {Launch::direct, Launch::captured}) {
        if (rank >= 2 && launch == Launch::captured) continue;  // enough of them
        const Packed got = packed_on_device(c, K, tables[rank], rows[rank], launch);
        EXPECT_TRUE(same_bits(got.index, expected.index)) << "index packed by rank " << rank;
        EXPECT_TRUE(same_bits(got.values, expected.values)) << "values packed by rank " << rank;
      }
      indices.push_back(expected.index);
      values.push_back(expected.values);
    }
    for (const int owner : {0, c.W / 2, c.W - 1}) {
      const std::vector<int32_t> index = testing::received_by(owner, indices);
      const std::vector<float> received = testing::received_by(owner, values);
      std::vector<float> expected = tables[static_cast<size_t>(owner)];
      auto index_device = uploaded("index", index);
      auto received_device = uploaded("values", received);
      auto table = uploaded("table", expected);
      sparse_rows_sum(SparseRowsSum<float>{expected.data(), index.data(), received.data(), K, c.W, c.C}, HostExec{});
      // The second time the table already holds the sums, which are set, not added to.
      for (const Launch launch : {Launch::direct, Launch::captured}) {
        run(launch, [&] {
          sparse_rows_sum(SparseRowsSum<bf16>{table.get(), index_device.get(), received_device.get(), K, c.W, c.C}, exec());
        });
        EXPECT_TRUE(same_bits(with_one_nan(table.download()), with_one_nan(expected))) << "table of owner " << owner;
      }
    }
  }
};

TEST_F(SparseRowsCudaTest, ManyShapes) {
  testing::Random random = testing::test_random();
  for (const int W : {1, 2, 3, 8}) {
    for (const int C : {4, 132, 768}) {
      for (const double share : {0.0, 0.02, 0.5, 1.0}) check({.V = 403, .K = 0, .C = C, .W = W, .share = share}, random);
    }
  }
}

TEST_F(SparseRowsCudaTest, MoreRanksThanLanes) {
  testing::Random random = testing::test_random();
  for (const int W : {32, 33, 70}) check({.V = 1'009, .K = 0, .C = 24, .W = W, .share = 0.4}, random);
}

TEST_F(SparseRowsCudaTest, CapacityWithPadding) {
  testing::Random random = testing::test_random();
  check({.V = 5'000, .K = 1'000, .C = 64, .W = 4, .share = 0.1}, random);
}

TEST_F(SparseRowsCudaTest, RowsBeyondTheCapacityShowAsNan) {
  testing::Random random = testing::test_random();
  check({.V = 500, .K = 20, .C = 8, .W = 3, .share = 0.3}, random);
}

TEST_F(SparseRowsCudaTest, ProductionTable) {
  testing::Random random = testing::test_random();
  check({.V = 377'280, .K = 4'000, .C = 8, .W = 8, .share = 0.05}, random);
}

}  // namespace
}  // namespace speedrun::kernels
