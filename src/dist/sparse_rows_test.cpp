#include "src/dist/sparse_rows.h"

#include "src/dist/sparse_rows_checks_test.h"

namespace speedrun {
namespace {

TEST(SparseRows, TheCapacityCountsEveryRowOfAnOwnerOnce) {
  // Owners of 10 rows, 3 ranks: 0-2, 3-5, 6-9.
  const std::vector<int32_t> indices{9, 1, 6, 6, 7, 2, 9, 1};
  EXPECT_EQ(rows_per_owner_max(indices, 10, 3), 3);
  EXPECT_EQ(rows_per_owner_max(indices, 10, 1), 5);
  EXPECT_EQ(rows_per_owner_max({}, 10, 3), 0);
  EXPECT_THROW(rows_per_owner_max(std::vector<int32_t>{10}, 10, 3), Error);
  EXPECT_THROW(rows_per_owner_max(std::vector<int32_t>{-1}, 10, 3), Error);
}

TEST(SparseRows, BytesOfBothWays) {
  const SparseRowsShape shape{.V = 800, .C = 16, .ranks = 8, .rows_per_owner = 20};
  EXPECT_EQ(sparse_rows_bytes(shape), 7 * 20 * (4 + 64));
  EXPECT_EQ(dense_rows_bytes(shape), 7 * 100 * 64);
}

TEST(SparseRows, EqualsTheDenseSumOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 8}) {
    EXPECT_TRUE(testing::run_ranks(ranks, 120, [](Control& control) {
      const std::unique_ptr<Device> device = make_cpu_device(1);
      const std::unique_ptr<Communicator> communicator = make_communicator(control, *device, false);
      testing::check_sparse_rows<float>(*communicator, *device, 1001, 12, 150);
      testing::check_sparse_rows<double>(*communicator, *device, 50, 3, 200);
      testing::check_sparse_rows<float>(*communicator, *device, 5, 8, 3);  // fewer rows than ranks
    }));
  }
}

}  // namespace
}  // namespace speedrun
