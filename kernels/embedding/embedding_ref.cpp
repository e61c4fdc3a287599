#include "kernels/base/host_parallel.h"
#include "kernels/embedding/embedding.h"

namespace speedrun::kernels {

template <class T>
void embedding_forward(const EmbeddingForward<T>& a, const HostExec& exec) {
  constexpr int64_t kRows = 64;
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* token_row = a.wte + static_cast<int64_t>(a.tokens[t]) * a.C;
      const T* position_row = a.wpe != nullptr ? a.wpe + t % a.row_tokens * a.C : nullptr;
      for (int c = 0; c < a.C; ++c)
        a.out[t * a.C + c] = exec.store(token_row[c] + (position_row != nullptr ? position_row[c] : T{0}));
    }
  });
}

// A task owns some channels of both tables and adds the tokens in their order, so the sums do not depend on the threads.
template <class T>
void embedding_backward(const EmbeddingBackward<T>& a, const HostExec& exec) {
  constexpr int64_t kChannels = 32;
  parallel_ranges(exec, a.C, kChannels, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < a.N; ++t) {
      const T* __restrict dout = a.dout + t * a.C;
      Acc<T>* __restrict dtoken = a.dwte + static_cast<int64_t>(a.tokens[t]) * a.C;
      for (int64_t c = begin; c < end; ++c) dtoken[c] += dout[c];
      if (a.dwpe == nullptr) continue;
      Acc<T>* __restrict dposition = a.dwpe + t % a.row_tokens * a.C;
      for (int64_t c = begin; c < end; ++c) dposition[c] += dout[c];
    }
  });
}

template void embedding_forward(const EmbeddingForward<float>&, const HostExec&);
template void embedding_forward(const EmbeddingForward<double>&, const HostExec&);
template void embedding_backward(const EmbeddingBackward<float>&, const HostExec&);
template void embedding_backward(const EmbeddingBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels
