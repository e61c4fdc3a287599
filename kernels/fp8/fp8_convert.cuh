#pragma once
// FP8 conversions of device code: to nearest even, saturating, NaN stays NaN: the values of fp8_types.h. From sm_89 on these are
// the hardware's cvt instructions; for older devices the toolkit's own emulation of them.
#include <cuda_fp8.h>

#include "kernels/fp8/fp8_types.h"

namespace speedrun::kernels {

template <class Fp8>
struct Fp8Interpretation;
template <>
struct Fp8Interpretation<e4m3> {
  static constexpr __nv_fp8_interpretation_t value = __NV_E4M3;
};
template <>
struct Fp8Interpretation<e5m2> {
  static constexpr __nv_fp8_interpretation_t value = __NV_E5M2;
};

// Element 0 is the lowest byte.
template <class Fp8>
__device__ __forceinline__ uint32_t to_fp8x2(float x0, float x1) {
  return __nv_cvt_float2_to_fp8x2({x0, x1}, __NV_SATFINITE, Fp8Interpretation<Fp8>::value);
}
template <class Fp8>
__device__ __forceinline__ uint32_t to_fp8x4(float x0, float x1, float x2, float x3) {
  return to_fp8x2<Fp8>(x0, x1) | to_fp8x2<Fp8>(x2, x3) << 16;
}
template <class Fp8>
__device__ __forceinline__ uint2 to_fp8x8(const float (&x)[8]) {
  return {to_fp8x4<Fp8>(x[0], x[1], x[2], x[3]), to_fp8x4<Fp8>(x[4], x[5], x[6], x[7])};
}

}  // namespace speedrun::kernels
