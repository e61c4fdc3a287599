#pragma once
// The Main Track's MLP: pre = inp · up_weightᵀ;   post = max(pre, 0)²;   out = post · down_weight     (no biases; the residual is
// added by stream_mix). down_weight is stored (F, C), as the optimizer wants it. Sums in Acc<T>; pre is rounded to T before the
// square (it is not kept: backward rebuilds relu(pre) as √post). FP8 (modded-nanogpt record #89), forward products alone; backward
// is BF16 and straight-through:
//   up    e4m3(inp / s) · up8ᵀ, scaled back;     down   e4m3(post / s) · down8
// with s fixed, from the tensor's own maximum (`current`: the naive way) or known from the step before (`delayed`: the pass that
// makes post writes the E4M3 copy and the maximum too, nothing is read again). Operands saturate at ±448. Cost: forward 4·N·C·F
// FLOPs, backward 8·N·C·F.
#include "kernels/base/exec.h"
#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {

struct Relu2MlpFp8 {
  const e4m3* up8 = nullptr;  // (F, C) the up weights in E4M3, or null: the product is BF16
  const Fp8Scale* up_scale = nullptr;
  e4m3* inp8 = nullptr;  // (N, C) scratch
  Fp8Scale* inp_scale = nullptr;
  Fp8Scaling inp_scaling = Fp8Scaling::current;

  const e4m3* down8 = nullptr;  // (C, F) the down weights transposed in E4M3, or null: the product is BF16
  const Fp8Scale* down_scale = nullptr;
  e4m3* post8 = nullptr;  // (N, F) scratch
  Fp8Scale* post_scale = nullptr;
  Fp8Scaling post_scaling = Fp8Scaling::delayed;

  bool fused_up = false;  // CUDA: up-projection and its whole epilogue in one sm_90a kernel (relu2_up_sm90.h)
  bool count = false;     // count saturated and flushed values
};

template <class T>
struct Relu2MlpForward {
  T* out;                // (N, C)
  T* post;               // (N, F)
  const T* inp;          // (N, C)
  const T* up_weight;    // (F, C)
  const T* down_weight;  // (F, C)
  Relu2MlpFp8 fp8;
  int64_t N;
  int C, F;
};

template <class T>
struct Relu2MlpBackward {
  T* dinp;               // (N, C) =
  Acc<T>* dup_weight;    // (F, C) +=
  Acc<T>* ddown_weight;  // (F, C) +=
  T* dhidden;            // (N, F) scratch: gradient of pre
  const T* dout;         // (N, C)
  const T* inp;          // (N, C)
  const T* post;         // (N, F)
  const T* up_weight;    // (F, C)
  const T* down_weight;  // (F, C)
  int64_t N;
  int C, F;
};

template <class T>
void relu2_mlp_forward(const Relu2MlpForward<T>& args, const HostExec& exec);
template <class T>
void relu2_mlp_backward(const Relu2MlpBackward<T>& args, const HostExec& exec);
void relu2_mlp_forward(const Relu2MlpForward<bf16>& args, const CudaExec& exec);
void relu2_mlp_backward(const Relu2MlpBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
