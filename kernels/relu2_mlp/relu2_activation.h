#pragma once
// The element-wise passes of the MLP as relu2_mlp.cu launches them; declared so that the bench can time them one by one.
#include "kernels/base/exec.h"
#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {

// post = max(pre, 0)²; with post8 also post8 = e4m3(post / scale), and amax raised, in the same pass.
struct Relu2Activation {
  bf16* post;                      // (count)
  const bf16* pre;                 // (count), may be post
  e4m3* post8 = nullptr;           // (count), or null
  Fp8Scale* post_scale = nullptr;  // with post8
  int64_t count;                   // a multiple of 16 with post8, of 8 without
  bool count_losses = false;       // count saturated and flushed values
};
void relu2_activation(const Relu2Activation& args, const CudaExec& exec);

}  // namespace speedrun::kernels
