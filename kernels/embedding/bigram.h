#pragma once
// Hashed bigram embedding with a fixed table of signs (modded-nanogpt record #89).
//   index[t]    = (36313·x[t] XOR 27191·x[t−1]) mod (rows − 1) in wrapping int32, remainder >= 0; rows − 1 at the first token of a
//   row,
//                 whose value (rows − 1) stands for x[t−1] at the second
//   sign_row[t] = (x[t−1] XOR x[t]) mod sign_rows; 0 at the first token of a row
//   out[t] = table[index[t]] · sign[sign_row[t]]       dtable[index[t]] += dout[t] · sign[sign_row[t]]
// Check: rows = 377,280, a row that starts 50256, 464 has index 86,771 at its second token.
// The backward sum is in an order that depends on the indices alone (embedding.h's stable sort), no float atomics.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct BigramForward {
  T* out;                 // (N, C)
  int32_t* index;         // (N) = , kept for backward
  int32_t* sign_row;      // (N) = , kept for backward; null without signs
  const T* table;         // (rows, C)
  const T* sign;          // (sign_rows, C) of ±1, or null
  const int32_t* tokens;  // (N)
  int64_t N;
  int64_t row_tokens;  // N % row_tokens == 0
  int C;               // C % 8 == 0 on CUDA
  int rows, sign_rows;
};

template <class T>
struct BigramBackward {
  Acc<T>* dtable;           // (rows, C) +=
  T* signed_dout;           // (N, C) scratch, may be dout; unused without signs
  const T* dout;            // (N, C)
  const int32_t* index;     // (N)
  const int32_t* sign_row;  // (N) or null
  const T* sign;            // (sign_rows, C) or null
  void* scratch;            // embedding_backward_scratch(N, C, rows) bytes, 256-byte aligned
  int64_t N;
  int64_t row_tokens;
  int C;
  int rows;
};

template <class T>
void bigram_forward(const BigramForward<T>& args, const HostExec& exec);
template <class T>
void bigram_backward(const BigramBackward<T>& args, const HostExec& exec);
void bigram_forward(const BigramForward<bf16>& args, const CudaExec& exec);
void bigram_backward(const BigramBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
