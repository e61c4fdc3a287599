#include "src/dist/sparse_rows.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace speedrun {

int64_t rows_per_owner_max(std::span<const int32_t> indices, int64_t V, int ranks) {
  std::vector<int32_t> sorted;
  std::span<const int32_t> rows = indices;  // ascending, each once
  if (std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) != indices.end()) {
    sorted.assign(indices.begin(), indices.end());
    std::sort(sorted.begin(), sorted.end());
    sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
    rows = sorted;
  }
  if (rows.empty()) return 0;
  for (const int32_t index : {rows.front(), rows.back()})
    require(index >= 0 && index < V, "rows_per_owner_max: index ", index, " outside a table of ", V, " rows");
  int64_t largest = 0;
  auto begin = rows.begin();
  for (int rank = 0; rank < ranks; ++rank) {
    const auto end = std::lower_bound(begin, rows.end(), kernels::sparse_rows_begin(V, ranks, rank + 1));
    largest = std::max<int64_t>(largest, end - begin);
    begin = end;
  }
  return largest;
}

int64_t sparse_rows_bytes(const SparseRowsShape& shape) {
  constexpr int64_t kIndexBytes = sizeof(int32_t), kValueBytes = sizeof(float);
  return (shape.ranks - 1) * shape.rows_per_owner * (kIndexBytes + shape.C * kValueBytes);
}

int64_t dense_rows_bytes(const SparseRowsShape& shape) {
  constexpr int64_t kValueBytes = sizeof(float);
  return shape.V * shape.C * kValueBytes / shape.ranks * (shape.ranks - 1);
}

template <class T>
SparseRows<T>::SparseRows(const SparseRowsShape& shape) : shape_(shape), largest_(shape.rows_per_owner) {
  require(shape.V > 0 && shape.C > 0 && shape.ranks > 0 && shape.rows_per_owner > 0, "sparse rows: V = ", shape.V,
          ", C = ", shape.C, ", ranks = ", shape.ranks, ", rows_per_owner = ", shape.rows_per_owner);
}

template <class T>
void SparseRows<T>::plan(MemoryPlan& memory, const std::string& category) {
  const int64_t slots = shape_.ranks * largest_;
  memory.add(category, &send_index_, slots);
  memory.add(category, &recv_index_, slots);
  memory.add(category, &send_values_, slots * shape_.C);
  memory.add(category, &recv_values_, slots * shape_.C);
}

template <class T>
void SparseRows<T>::set_capacity(int64_t rows_per_owner) {
  require(rows_per_owner > 0 && rows_per_owner <= largest_, "sparse rows: made for ", largest_, " rows of an owner, not ",
          rows_per_owner);
  shape_.rows_per_owner = rows_per_owner;
}

template <class T>
void SparseRows<T>::pack(Device& device, const Acc<T>* table, const int32_t* rows, const int32_t* num_rows) {
  kernels::sparse_rows_pack(kernels::SparseRowsPack<T>{.index = send_index_,
                                                       .values = send_values_,
                                                       .table = table,
                                                       .rows = rows,
                                                       .num_rows = num_rows,
                                                       .V = shape_.V,
                                                       .K = shape_.rows_per_owner,
                                                       .W = shape_.ranks,
                                                       .C = shape_.C},
                            device.exec<T>());
}

template <class T>
void SparseRows<T>::exchange(Communicator& communicator) {
  require(communicator.size() == shape_.ranks, "sparse rows: made for ", shape_.ranks, " ranks, exchanged between ",
          communicator.size());
  communicator.all_to_all(send_index_, recv_index_, shape_.rows_per_owner, CommType::u32);
  communicator.all_to_all(send_values_, recv_values_, shape_.rows_per_owner * shape_.C, comm_type<Acc<T>>());
}

template <class T>
void SparseRows<T>::sum(Device& device, Acc<T>* table) {
  kernels::sparse_rows_sum(kernels::SparseRowsSum<T>{.table = table,
                                                     .index = recv_index_,
                                                     .values = recv_values_,
                                                     .K = shape_.rows_per_owner,
                                                     .W = shape_.ranks,
                                                     .C = shape_.C},
                           device.exec<T>());
}

template class SparseRows<float>;
template class SparseRows<double>;
#if SPEEDRUN_HAS_CUDA
template class SparseRows<bf16>;
#endif

}  // namespace speedrun
