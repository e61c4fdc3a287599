#pragma once
// The Main Track's MLP: pre = inp · up_weightᵀ;   post = max(pre, 0)²;   out = post · down_weight     (no biases; the residual is
// added by stream_mix). down_weight is stored (F, C), as the optimizer wants it. Sums in Acc<T>; pre is rounded to T before the
// square (it is not kept: backward rebuilds relu(pre) as √post). FP8, forward (modded-nanogpt record #89):
//   up    e4m3(inp / s) · up8ᵀ, scaled back;     down   e4m3(post / s) · down8
// with s fixed, from the tensor's own maximum (`current`: the naive way) or known from the step before (`delayed`: the pass that
// makes post writes the E4M3 copy and the maximum too, nothing is read again). Operands saturate at ±448. Backward is
// straight-through, in BF16 or, each pair of products by itself, in FP8 with gradients in E5M2 and accurate accumulation:
//   dpost = dout8 · down8ᵀ,             dinp = dpre8 · up8_tᵀ              input gradients
//   ddown_weight += post8_t · dout8_tᵀ, dup_weight += dpre8_t · inp8_tᵀ    weight gradients
// Cost: forward 4·N·C·F FLOPs, backward 8·N·C·F.
#include "kernels/base/exec.h"
#include "kernels/gemm/projection_fp8.h"

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

// Null up8_t and down8: input gradients in BF16. Null inp.codes_t and post.codes_t: weight gradients in BF16. On CUDA C and F are
// multiples of 16, and N for the weight gradients. `inp` and `post` with the scale that forward left: `fixed`.
struct Relu2MlpBackwardFp8 {
  const e4m3* up8_t = nullptr;  // (C, F)
  const Fp8Scale* up_scale = nullptr;
  const e4m3* down8 = nullptr;  // (F, C)
  const Fp8Scale* down_scale = nullptr;
  Fp8Copies<e4m3> inp, post;   // (N, C), (N, F): codes_t for the weight gradients; codes are not made
  Fp8Copies<e5m2> dout, dpre;  // (N, C), (N, F): codes for the input gradients, codes_t for the weight gradients
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
  T* dhidden;            // (N, F) scratch: gradient of pre (CUDA: of post where all of its readers take FP8 copies)
  const T* dout;         // (N, C)
  const T* inp;          // (N, C)
  const T* post;         // (N, F)
  const T* up_weight;    // (F, C)
  const T* down_weight;  // (F, C)
  int64_t N;
  int C, F;
  Relu2MlpBackwardFp8 fp8 = {};
};

inline void require_backward_operands(const Relu2MlpBackwardFp8& fp8) {
  const auto given = [](const auto* codes, const Fp8Scale* scale) { return codes != nullptr && scale != nullptr; };
  const bool input_grad = fp8.up8_t != nullptr, weight_grad = fp8.inp.codes_t != nullptr;
  require(input_grad == (fp8.down8 != nullptr) && weight_grad == (fp8.post.codes_t != nullptr),
          "relu2_mlp: both input gradients in FP8 or none (up8_t, down8), both weight gradients or none (inp, post)");
  require(!input_grad ||
              (fp8.up_scale && fp8.down_scale && given(fp8.dout.codes, fp8.dout.scale) && given(fp8.dpre.codes, fp8.dpre.scale)),
          "relu2_mlp: FP8 input gradients need the weights' scales and copies of dout and dpre");
  require(!weight_grad || (fp8.inp.scale && fp8.post.scale && given(fp8.dout.codes_t, fp8.dout.scale) &&
                           given(fp8.dpre.codes_t, fp8.dpre.scale)),
          "relu2_mlp: FP8 weight gradients need transposed copies of dout and dpre");
}

template <class T>
void relu2_mlp_forward(const Relu2MlpForward<T>& args, const HostExec& exec);
template <class T>
void relu2_mlp_backward(const Relu2MlpBackward<T>& args, const HostExec& exec);
void relu2_mlp_forward(const Relu2MlpForward<bf16>& args, const CudaExec& exec);
void relu2_mlp_backward(const Relu2MlpBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels
