#pragma once
// A sum over ranks of tables of which each rank has touched few rows: the parts before and after the exchange. Rank r owns the rows
// from ⌊r·V/W⌋ on. Every rank packs its touched rows by owner, at most K for each; the packs are exchanged, all to all; the owner
// then sets each row that any rank sent to the sum over its senders, in the order of the ranks: the bits of a dense sum in that
// order, whose other terms are zeros. No atomics. Rows of other owners, and rows that nobody touched, keep what they hold. Cost:
// pack reads and writes the touched rows once; sum reads what was received and writes each row once.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

// First row of a rank; that of rank W is V.
constexpr int64_t sparse_rows_begin(int64_t V, int W, int rank) { return V * rank / W; }

// More than K touched rows of one owner are the caller's mistake: the last one packed for that owner is then NaN, so that the loss
// of the others does not pass unseen.
template <class T>
struct SparseRowsPack {
  int32_t* index;           // (W, K) each owner's rows, ascending, then −1 =
  Acc<T>* values;           // (W, K, C) those rows =; what belongs to an index −1 keeps what it holds
  const Acc<T>* table;      // (V, C)
  const int32_t* rows;      // (>= *num_rows) the touched rows, ascending, each once, 0 <= row < V
  const int32_t* num_rows;  // (1)
  int64_t V;                // < 2³¹
  int64_t K;
  int W;
  int C;  // C % 4 == 0 on CUDA, pointers to floats 16-byte aligned
};

template <class T>
struct SparseRowsSum {
  Acc<T>* table;         // (V, C) = for the rows in index
  const int32_t* index;  // (W, K) by sender: rows, ascending, then −1
  const Acc<T>* values;  // (W, K, C)
  int64_t K;
  int W;
  int C;
};

template <class T>
void sparse_rows_pack(const SparseRowsPack<T>& args, const HostExec& exec);
template <class T>
void sparse_rows_sum(const SparseRowsSum<T>& args, const HostExec& exec);
void sparse_rows_pack(const SparseRowsPack<bf16>& args, const CudaExec& exec);
void sparse_rows_sum(const SparseRowsSum<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
