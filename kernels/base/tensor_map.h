#pragma once
// Host side of the bulk tensor copy engine (sm_90): how a tensor lies in global memory and which box of it one copy moves. Made for
// each launch from its arguments and passed to the kernel by value as a __grid_constant__ parameter, so that a graph captures it.
// The driver's function is looked up at run time: nothing links to libcuda.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <array>

#include "kernels/base/cuda_check.h"
#include "kernels/base/dtype.h"

namespace speedrun::kernels {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
             "looking up cuTensorMapEncodeTiled");
  require(result == cudaDriverEntryPointSuccess && function != nullptr,
          "the CUDA driver has no cuTensorMapEncodeTiled: a driver for CUDA 12.0 or later is needed");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

// The innermost dimension is contiguous; boxes are 128 bytes of it wide and arrive in shared memory (1,024-byte aligned) in the
// 128-byte swizzle. The outer parts of the shape and strides are in elements, innermost of them first.
template <int kRank>
struct TensorMapShape {
  CUtensorMapDataType type;
  int element_bytes;
  const void* base;                       // 16-byte aligned
  std::array<int64_t, kRank> size;        // of the tensor, innermost first
  std::array<int64_t, kRank - 1> stride;  // elements from one index to the next, of dimensions 1, 2, …; 16-byte multiples
  std::array<uint32_t, kRank> box;        // at most 256 each
};

template <int kRank>
CUtensorMap make_tensor_map(const TensorMapShape<kRank>& shape, const char* what) {
  std::array<cuuint64_t, kRank> size;
  std::array<cuuint64_t, kRank - 1> stride_bytes;
  std::array<cuuint32_t, kRank> element_strides;
  for (int i = 0; i < kRank; ++i) {
    size[i] = static_cast<cuuint64_t>(shape.size[i]);
    element_strides[i] = 1;
    if (i > 0) stride_bytes[i - 1] = static_cast<cuuint64_t>(shape.stride[i - 1] * shape.element_bytes);
  }
  CUtensorMap map;
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = tensor_map_encoder();
  const CUresult status = encode(&map, shape.type, kRank, const_cast<void*>(shape.base), size.data(), stride_bytes.data(),
                                 shape.box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, what, ": cuTensorMapEncodeTiled refuses the tensor (driver error ", static_cast<int>(status),
          "): base ", shape.base, ", rank ", kRank, ", innermost sizes ", shape.size[0], " and ", shape.size[1], ", row stride ",
          stride_bytes[0], " bytes");
  return map;
}

}  // namespace speedrun::kernels
