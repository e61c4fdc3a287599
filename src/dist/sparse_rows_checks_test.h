#pragma once
// The sparse reduction against the dense sum of the same tables, on any device.
#include <algorithm>
#include <memory>
#include <vector>

#include "src/dist/collective_checks_test.h"
#include "src/dist/sparse_rows.h"

namespace speedrun::testing {

// What a rank has at a step: some rows of a table, drawn with repeats, as a batch has them.
template <class A>
struct TouchedTable {
  std::vector<int32_t> rows;  // ascending, each once
  std::vector<A> table;       // (V, C)

  TouchedTable(int64_t V, int C, int64_t tokens, int rank, int step) : table(static_cast<size_t>(V * C)) {
    Random random(test_seed() + static_cast<uint64_t>(step) * 100 + static_cast<uint64_t>(rank));
    rows = random.index_vector(tokens, V);
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    for (const int32_t row : rows) {
      for (int c = 0; c < C; ++c) table[static_cast<size_t>(int64_t{row} * C + c)] = static_cast<A>(random.normal());
    }
  }
};

// Several steps with one graph, other rows and other values in each.
template <class T>
void check_sparse_rows(Communicator& communicator, Device& device, int64_t V, int C, int64_t tokens) {
  using A = Acc<T>;
  constexpr int kSteps = 5;
  const int rank = communicator.rank(), size = communicator.size();
  std::vector<std::vector<TouchedTable<A>>> steps(kSteps);
  SparseRowsShape shape{.V = V, .C = C, .ranks = size, .rows_per_owner = 1};
  for (int step = 0; step < kSteps; ++step) {
    for (int r = 0; r < size; ++r) {
      steps[static_cast<size_t>(step)].emplace_back(V, C, tokens, r, step);
      const std::vector<int32_t>& rows = steps[static_cast<size_t>(step)].back().rows;
      shape.rows_per_owner = std::max(shape.rows_per_owner, rows_per_owner_max(rows, V, size));
    }
  }
  SparseRows<T> sparse(shape);
  MemoryPlan plan;
  sparse.plan(plan, "sparse rows");
  const Arena arena(device, plan);
  const DeviceVector<A> table(device, std::vector<A>(static_cast<size_t>(V * C)));
  const DeviceVector<int32_t> rows(device, std::vector<int32_t>(static_cast<size_t>(tokens))), num_rows(device, {0});
  const std::unique_ptr<Graph> graph = device.capture([&] {
    sparse.pack(device, table.get(), rows.get(), num_rows.get());
    communicator.fork();
    communicator.group_start();
    sparse.exchange(communicator);
    communicator.group_end();
    communicator.join();
    sparse.sum(device, table.get());
  });
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<TouchedTable<A>>& all = steps[static_cast<size_t>(step)];
    const TouchedTable<A>& own = all[static_cast<size_t>(rank)];
    std::vector<std::vector<A>> tables;
    for (const TouchedTable<A>& touched : all) tables.push_back(touched.table);
    const auto count = static_cast<int32_t>(own.rows.size());
    device.copy_in(table.get(), own.table.data(), table.bytes());
    device.copy_in(rows.get(), own.rows.data(), own.rows.size() * sizeof(int32_t));
    device.copy_in(num_rows.get(), &count, sizeof count);
    graph->launch();
    const int64_t begin = kernels::sparse_rows_begin(V, size, rank), end = kernels::sparse_rows_begin(V, size, rank + 1);
    require_same(table.download(), serial_reduction(tables), begin * C, (end - begin) * C,
                 "sparse rows, step " + std::to_string(step));
  }
}

}  // namespace speedrun::testing
