#pragma once
// A reduce-scatter of a table's gradient of which each rank has touched few rows: the touched rows alone travel. Every rank sends
// each owner (rank r owns the rows from ⌊r·V/W⌋ on) up to a fixed number of rows, so that the exchange can be part of a graph; the
// host, which knows the batch, must see to it that they are enough (rows_per_owner_max), or take the dense reduction.
#include <span>
#include <string>

#include "kernels/sparse_rows/sparse_rows.h"
#include "src/core/memory_plan.h"
#include "src/dist/communicator.h"

namespace speedrun {

struct SparseRowsShape {
  int64_t V = 0;  // rows of the table, < 2³¹
  int C = 0;      // C % 4 == 0 on CUDA
  int ranks = 1;
  int64_t rows_per_owner = 0;  // capacity: rows that one rank can send to one owner
};

// The greatest number of different rows that one owner has in `indices` (any order, repeated or not; quick where they ascend): the
// capacity that a rank with this batch needs. Throws Error for an index outside 0 … V − 1.
int64_t rows_per_owner_max(std::span<const int32_t> indices, int64_t V, int ranks);

// Bytes that a rank sends with this capacity, and in the dense reduce-scatter of the same table in FP32.
int64_t sparse_rows_bytes(const SparseRowsShape& shape);
int64_t dense_rows_bytes(const SparseRowsShape& shape);

// T: the activation type, which fixes the device; the table is Acc<T>. One object serves one table, with buffers of its own.
template <class T>
class SparseRows {
 public:
  explicit SparseRows(const SparseRowsShape& shape);
  SparseRows(const SparseRows&) = delete;
  SparseRows& operator=(const SparseRows&) = delete;

  void plan(MemoryPlan& memory, const std::string& category);  // 2·W·K rows and their indices
  // A capacity up to that of the shape, for the calls from here on: graphs of several capacities share the memory.
  void set_capacity(int64_t rows_per_owner);

  // Three asynchronous and capturable steps: pack on the device's queue; exchange on the communicator's, between its fork() and
  // join(); sum on the device's. `rows` and `num_rows` in device memory: the touched rows, ascending, each once, and their number.
  void pack(Device& device, const Acc<T>* table, const int32_t* rows, const int32_t* num_rows);
  void exchange(Communicator& communicator);
  // Rows of this rank that any rank touched become the sum over the ranks in their order; all others keep what they hold.
  void sum(Device& device, Acc<T>* table);

 private:
  SparseRowsShape shape_;
  int64_t largest_;                                        // capacity that the memory is made for
  int32_t *send_index_ = nullptr, *recv_index_ = nullptr;  // (W, K)
  Acc<T>*send_values_ = nullptr, *recv_values_ = nullptr;  // (W, K, C)
};

}  // namespace speedrun
