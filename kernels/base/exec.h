#pragma once
// What an op runs on. Every op has one argument struct and two overloads: (args, HostExec) is the plain CPU reference and
// specification, instantiated for float and double; (args, CudaExec) launches the CUDA implementation for bf16 activations on a
// stream: asynchronous, no allocation, no host synchronisation, capturable in a CUDA graph.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/base/dtype.h"

struct CUstream_st;  // cudaStream_t is a pointer to it; headers need no CUDA toolkit

namespace speedrun {

class ThreadPool;

namespace kernels {

class GemmPlans;  // kernels/gemm/gemm_cuda.h

struct HostExec {
  ThreadPool* pool = nullptr;
  // Round to BF16 wherever the CUDA device stores BF16 (activations and their gradients), so that its numerics can be studied
  // without one.
  bool round_bf16 = false;

  // A value on its way to an activation buffer.
  template <class T>
  T store(T value) const {
    return round_bf16 ? static_cast<T>(static_cast<float>(bf16(static_cast<float>(value)))) : value;
  }
};

struct CudaExec {
  CUstream_st* stream = nullptr;
  int num_sms = 0;
  int compute_capability = 0;  // 90 for sm_90
  GemmPlans* gemm = nullptr;   // cuBLASLt handle, cached plans and the 32 MiB workspace
};

template <class T>
using Exec = std::conditional_t<std::is_same_v<T, bf16>, CudaExec, HostExec>;

}  // namespace kernels
}  // namespace speedrun
