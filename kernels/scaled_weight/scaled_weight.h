#pragma once
// Weights that the products see multiplied by a learned scalar (modded-nanogpt: λ_sa0·W_qkv, λ_sa1·W_o), once per step:
//   out = T(scalar · weight)
// and, after the step's last backward pass, the gradient of `out` in the gradient buffer becomes those of weight and scalar:
//   dscalar += Σ grad · weight;   grad <- scalar · grad
// Sums in double in a fixed order. Cost: forward 4 bytes, backward 10 bytes an element on CUDA.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct ScaledWeightItem {
  T* out;           // (n)
  const T* weight;  // (n)
  const T* scalar;  // one element on the device
  Acc<T>* grad;     // (n), null where there is no backward
  Acc<T>* dscalar;  // one element; no two items share one
  int64_t n;        // n % 8 == 0 on CUDA
};

template <class T>
struct ScaledWeights {
  const ScaledWeightItem<T>* items;  // (num_items) table in device memory
  double* scratch;                   // scaled_weights_scratch(num_items) elements
  int num_items;
};

int64_t scaled_weights_scratch(int num_items);  // elements of double

template <class T>
void scaled_weights_forward(const ScaledWeights<T>& args, const HostExec& exec);
template <class T>
void scaled_weights_backward(const ScaledWeights<T>& args, const HostExec& exec);
void scaled_weights_forward(const ScaledWeights<bf16>& args, const CudaExec& exec);
void scaled_weights_backward(const ScaledWeights<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
