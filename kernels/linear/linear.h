#pragma once
// Linear layer with optional bias and residual: out = inp · weightᵀ + bias + residual. Rows are tokens; a weight row is an output
// feature. Accumulation in Acc<T>, one rounding of the whole sum at the store. N, K, O multiples of 8 and 16-byte aligned pointers
// on CUDA. Cost: forward 2·N·K·O FLOPs, backward 4·N·K·O. Without bias and residual each product can be in FP8.
#include "kernels/base/exec.h"
#include "kernels/gemm/projection_fp8.h"

namespace speedrun::kernels {

template <class T>
struct LinearForward {
  T* out;             // (N, O)
  const T* inp;       // (N, K)
  const T* weight;    // (O, K)
  const T* bias;      // (O) or null
  const T* residual;  // (N, O) or null; may alias out
  int64_t N;
  int K, O;
  ProjectionFp8 fp8 = {};  // with bias or residual none
};

template <class T>
struct LinearBackward {
  T* dinp;          // (N, K) = , or null
  Acc<T>* dweight;  // (O, K) +=
  Acc<T>* dbias;    // (O) += or null
  const T* dout;    // (N, O)
  const T* inp;     // (N, K)
  const T* weight;  // (O, K)
  Acc<T>* scratch;  // bias_grad_scratch(N, O) elements if dbias
  int64_t N;
  int K, O;
  ProjectionFp8 fp8 = {};  // with dbias none
};

int64_t bias_grad_scratch(int64_t N, int O);  // elements of Acc<T>: partial column sums, added in a fixed order

template <class T>
void linear_forward(const LinearForward<T>& args, const HostExec& exec);
template <class T>
void linear_backward(const LinearBackward<T>& args, const HostExec& exec);
void linear_forward(const LinearForward<bf16>& args, const CudaExec& exec);
void linear_backward(const LinearBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
