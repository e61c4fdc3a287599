#pragma once
// Token embedding with optional learned positions: out[t] = wte[tokens[t]] (+ wpe[t mod row_tokens]), one rounding at the store.
// Backward adds the rows of dout to the gradients of the tables in an order that depends on the tokens alone: a stable sort by
// token and segment sums, no float atomics, so the same batch always gives the same bits. Cost: forward reads and writes N·C
// elements; backward reads N·C and reads+writes at most N·C elements of dwte.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct EmbeddingForward {
  T* out;                 // (N, C)
  const T* wte;           // (V, C)
  const T* wpe;           // (>= row_tokens, C) or null
  const int32_t* tokens;  // (N), 0 <= token < V (checked by the loader)
  int64_t N;
  int64_t row_tokens;  // N % row_tokens == 0
  int C;               // C % 8 == 0 on CUDA
};

template <class T>
struct EmbeddingBackward {
  Acc<T>* dwte;           // (V, C) +=
  Acc<T>* dwpe;           // (>= row_tokens, C) += or null
  const T* dout;          // (N, C)
  const int32_t* tokens;  // (N)
  void* scratch;          // embedding_backward_scratch(N, C, V) bytes, 256-byte aligned
  int64_t N;
  int64_t row_tokens;
  int C;
  int V;
};

size_t embedding_backward_scratch(int64_t N, int C, int V);  // bytes, CUDA; the CPU reference needs none and ignores scratch

template <class T>
void embedding_forward(const EmbeddingForward<T>& args, const HostExec& exec);
template <class T>
void embedding_backward(const EmbeddingBackward<T>& args, const HostExec& exec);
void embedding_forward(const EmbeddingForward<bf16>& args, const CudaExec& exec);
void embedding_backward(const EmbeddingBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
