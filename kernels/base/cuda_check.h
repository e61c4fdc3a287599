#pragma once
// CUDA and cuBLASLt status codes as Errors: "<what>: <error text>". The parts of `what` (op name, shape) are only streamed on
// failure.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <sstream>

#include "kernels/base/error.h"

namespace speedrun::kernels {

template <class... Parts>
void cuda_check(cudaError_t status, const Parts&... what) {
  if (status == cudaSuccess) return;
  std::ostringstream message;
  (message << ... << what) << ": " << cudaGetErrorString(status) << " (" << cudaGetErrorName(status) << ')';
  throw Error(message.str());
}

template <class... Parts>
void cublas_check(cublasStatus_t status, const Parts&... what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::ostringstream message;
  (message << ... << what) << ": " << cublasLtGetStatusString(status) << " (" << cublasLtGetStatusName(status) << ')';
  throw Error(message.str());
}

// After a kernel launch: launch errors and earlier asynchronous errors of the context.
template <class... Parts>
void check_launch(const Parts&... what) {
  cuda_check(cudaGetLastError(), what...);
}

}  // namespace speedrun::kernels
