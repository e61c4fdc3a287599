#include "kernels/base/error.h"
#include "kernels/base/host_parallel.h"
#include "kernels/embedding/bigram.h"
#include "kernels/embedding/bigram_hash.h"
#include "kernels/embedding/embedding.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kTokens = 64;  // of one task

}  // namespace

template <class T>
void bigram_forward(const BigramForward<T>& a, const HostExec& exec) {
  require(a.rows >= 2 && (a.sign == nullptr || a.sign_rows > 0), "bigram_forward: ", a.rows, " rows, ", a.sign_rows,
          " rows of signs; expected at least 2 and, with signs, 1");
  parallel_ranges(exec, a.N, kTokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const BigramRows picked = bigram_rows(a.tokens, t, t % a.row_tokens, a.rows, a.sign != nullptr ? a.sign_rows : 0);
      a.index[t] = picked.index;
      if (a.sign_row != nullptr) a.sign_row[t] = picked.sign_row;
      const T* row = a.table + int64_t{picked.index} * a.C;
      const T* sign = a.sign != nullptr ? a.sign + int64_t{picked.sign_row} * a.C : nullptr;
      for (int c = 0; c < a.C; ++c) a.out[t * a.C + c] = exec.store(sign != nullptr ? row[c] * sign[c] : row[c]);
    }
  });
}

template <class T>
void bigram_backward(const BigramBackward<T>& a, const HostExec& exec) {
  const T* dout = a.dout;
  if (a.sign != nullptr) {
    parallel_ranges(exec, a.N, kTokens, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* sign = a.sign + int64_t{a.sign_row[t]} * a.C;
        for (int c = 0; c < a.C; ++c) a.signed_dout[t * a.C + c] = a.dout[t * a.C + c] * sign[c];
      }
    });
    dout = a.signed_dout;
  }
  embedding_backward(EmbeddingBackward<T>{.dwte = a.dtable,
                                          .dwpe = nullptr,
                                          .dout = dout,
                                          .tokens = a.index,
                                          .scratch = a.scratch,
                                          .N = a.N,
                                          .row_tokens = a.row_tokens,
                                          .C = a.C,
                                          .V = a.rows},
                     exec);
}

template void bigram_forward(const BigramForward<float>&, const HostExec&);
template void bigram_forward(const BigramForward<double>&, const HostExec&);
template void bigram_backward(const BigramBackward<float>&, const HostExec&);
template void bigram_backward(const BigramBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels
