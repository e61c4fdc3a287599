#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/sparse_rows/sparse_rows.h"

namespace speedrun::kernels {

template <class T>
void sparse_rows_pack(const SparseRowsPack<T>& a, const HostExec& exec) {
  parallel(exec, a.W, [&](int64_t owner) {
    const int32_t* end = a.rows + *a.num_rows;
    const int32_t* row = std::lower_bound(a.rows, end, sparse_rows_begin(a.V, a.W, static_cast<int>(owner)));
    const int32_t* last = std::lower_bound(row, end, sparse_rows_begin(a.V, a.W, static_cast<int>(owner) + 1));
    for (int64_t k = owner * a.K; k < (owner + 1) * a.K; ++k) {
      a.index[k] = row < last ? *row++ : -1;
      if (a.index[k] >= 0) std::copy_n(a.table + int64_t{a.index[k]} * a.C, a.C, a.values + k * a.C);
    }
    if (row < last) std::fill_n(a.values + ((owner + 1) * a.K - 1) * a.C, a.C, std::numeric_limits<Acc<T>>::quiet_NaN());
  });
}

// Merges the senders' lists; a row that several sent is added up in their order.
template <class T>
void sparse_rows_sum(const SparseRowsSum<T>& a, const HostExec&) {
  std::vector<int64_t> next(static_cast<size_t>(a.W));  // of each sender's list
  const auto head = [&](int sender) {
    const int64_t k = next[static_cast<size_t>(sender)];
    const int32_t row = k < a.K ? a.index[sender * a.K + k] : -1;
    return row < 0 ? std::numeric_limits<int32_t>::max() : row;
  };
  for (;;) {
    int32_t row = head(0);
    for (int sender = 1; sender < a.W; ++sender) row = std::min(row, head(sender));
    if (row == std::numeric_limits<int32_t>::max()) return;
    Acc<T>* sum = a.table + int64_t{row} * a.C;
    bool first = true;
    for (int sender = 0; sender < a.W; ++sender) {
      if (head(sender) != row) continue;
      const Acc<T>* values = a.values + (sender * a.K + next[static_cast<size_t>(sender)]++) * a.C;
      for (int c = 0; c < a.C; ++c) sum[c] = first ? values[c] : sum[c] + values[c];
      first = false;
    }
  }
}

template void sparse_rows_pack(const SparseRowsPack<float>&, const HostExec&);
template void sparse_rows_pack(const SparseRowsPack<double>&, const HostExec&);
template void sparse_rows_sum(const SparseRowsSum<float>&, const HostExec&);
template void sparse_rows_sum(const SparseRowsSum<double>&, const HostExec&);

}  // namespace speedrun::kernels
