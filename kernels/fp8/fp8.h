#pragma once
// FP8 tensors: E4M3 and E5M2 storage, scales in device memory, and the passes that make them.
// real value ≈ stored · scale: a value is multiplied by the scale's FP32 reciprocal, rounded to nearest even and saturated, E4M3
// (which has no infinity) at ±448, E5M2 at ±57344; NaN stays NaN. The scale of a tensor is
//   fixed    the caller's; its maximum is not needed (amax may be raised or not)
//   current  from the tensor's own maximum: max(amax, 1e−12) / 448. A maximum that is not finite makes the scale, and with it every
//            value, NaN: the loss shows it
//   delayed  what fp8_next_scales made of earlier maxima; the tensor's own maximum is noted for the next time
// (448: E4M3's largest number; for E5M2 it is 57344.)
//
// Maxima are kept as the bits of |x| in an unsigned integer: the largest is the same in any order, and NaN (above infinity)
// survives.
#include "kernels/base/exec.h"
#include "kernels/base/step_values.h"
#include "kernels/fp8/fp8_types.h"

namespace speedrun::kernels {

enum class Fp8Scaling : int { fixed, current, delayed };

// cuBLASLt wants scale pointers aligned to 16 bytes. Part of the run's state.
struct alignas(16) Fp8Scale {
  float scale = 1;
  uint32_t amax = 0;       // bits of the largest |x| seen since the last fp8_next_scales
  uint32_t saturated = 0;  // values beyond the largest number times scale, and
  uint32_t flushed = 0;    // values != 0 stored as 0; both only on request (`count`), added up until the caller clears them
};
static_assert(sizeof(Fp8Scale) == 16);

// Weights once per step: E4M3 copy, transposed copy, and maximum, in one read of the weights (two with `current`).
template <class T>
struct Fp8WeightItem {
  e4m3* out;        // (rows, cols), or null
  e4m3* out_t;      // (cols, rows), or null
  const T* weight;  // (rows, cols); rows and cols multiples of 16 on CUDA
  Fp8Scale* scale;  // fixed: used as it is. delayed: used as it is, amax raised. current: amax and scale written first
  int rows, cols;
};

template <class T>
struct Fp8Weights {
  const Fp8WeightItem<T>* items;       // (num_items) table in device memory
  const Fp8WeightItem<T>* host_items;  // the same in host memory, for launch shapes
  int num_items;
  Fp8Scaling scaling;
  bool count;                  // count saturated and flushed values
  const StepVerdict* verdict;  // null, or: does nothing if verdict->skip is set
};

// An activation (E4M3) or a gradient (E5M2), the same way. `current` reads inp twice. On CUDA cols is a multiple of 16, with out_t
// rows too; any number of rows else.
template <class T, class Fp8 = e4m3>
struct Fp8Quantize {
  Fp8* out;      // (rows, cols), or null
  Fp8* out_t;    // (cols, rows), or null
  const T* inp;  // (rows, cols)
  Fp8Scale* scale;
  int64_t rows;
  int cols;
  Fp8Scaling scaling;
  bool count;
  // delayed, not 0: a scale of 0 is not known yet, and is made from this tensor's own maximum times this margin. Such a start is
  // slow on CUDA (one block reads the tensor), looking for it costs an empty launch.
  double start_margin = 0;
};

// Delayed scales, once per step: scale = max(amax, 1e−12) · margin / largest, amax = 0. A maximum that is not finite leaves the
// scale as it is and sets verdict->skip (bad_parameter = −2 − index of the scale) unless it is set already.
struct Fp8NextScales {
  Fp8Scale* scales;  // (num_scales) on the device
  int num_scales;
  double margin;
  StepVerdict* verdict;      // or null
  float largest = kE4m3Max;  // number of the tensors' type
  // Zeros say nothing about the next step (gradients behind weights that start at zero are zero once): a maximum of 0 makes the
  // scale 0, not known, and so does one that is not finite where the scale is not a number.
  bool forget_zeros = false;
};

template <class T>
void fp8_weights(const Fp8Weights<T>& args, const HostExec& exec);
template <class T, class Fp8>
void fp8_quantize(const Fp8Quantize<T, Fp8>& args, const HostExec& exec);
void fp8_next_scales(const Fp8NextScales& args, const HostExec& exec);
void fp8_weights(const Fp8Weights<bf16>& args, const CudaExec& exec);
void fp8_quantize(const Fp8Quantize<bf16, e4m3>& args, const CudaExec& exec);
void fp8_quantize(const Fp8Quantize<bf16, e5m2>& args, const CudaExec& exec);
void fp8_next_scales(const Fp8NextScales& args, const CudaExec& exec);

}  // namespace speedrun::kernels
