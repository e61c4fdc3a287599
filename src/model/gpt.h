#pragma once
// The model: forward and backward as explicit lists of op calls, the same code on every device (T = bf16: CUDA; float: CPU; double:
// CPU, for finite differences). One object serves micro-batches of up to N tokens, made of whole rows.
#include <cstdint>
#include <vector>

#include "kernels/base/step_values.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"

namespace speedrun {

struct GptShape {
  int64_t tokens = 0;        // N of a micro-batch
  int64_t row_tokens = 0;    // T, length of a row; positions restart at each
  int64_t logits_chunk = 0;  // tokens whose logits exist at once
  bool training = true;      // false: no gradients, activations of one layer at a time
};

template <class T>
class Gpt {
 public:
  Gpt(const Config::Model& config, const GptShape& shape, Device& device, Parameters<T>& parameters);

  void plan(MemoryPlan& memory);
  void prepare();  // after allocation: fills constant tables (rotary); synchronous

  // Batch of the next call, in device memory; the caller fills them in order before the call.
  int32_t* tokens() { return tokens_; }        // (N)
  int32_t* targets() { return targets_; }      // (N)
  int32_t* doc_start() { return doc_start_; }  // (N) absolute index in the micro-batch, non-decreasing

  // Adds the gradients of Σ grad_scale·loss[t] to the parameters' and leaves loss[t]; asynchronous, capturable.
  void forward_backward(const Acc<T>* grad_scale);
  void evaluate();                                  // loss[t] only
  const Acc<T>* losses() const { return losses_; }  // (N)

  // Capped logits (V) of the token at `position`, to host memory; synchronous. Runs the forward pass over all N tokens.
  std::vector<float> logits_at(int64_t position);

  const GptShape& shape() const { return shape_; }

 private:
  struct Block {  // one layer's parameters, gradients and saved activations
    T *norm1_gain, *norm1_shift, *qkv_weight, *qkv_bias, *out_weight, *out_bias;
    T *norm2_gain, *norm2_shift, *up_weight, *up_bias, *down_weight, *down_bias;
    Acc<T>*dnorm1_gain, *dnorm1_shift, *dqkv_weight, *dqkv_bias, *dout_weight, *dout_bias;
    Acc<T>*dnorm2_gain, *dnorm2_shift, *dup_weight, *dup_bias, *ddown_weight, *ddown_bias;
    int64_t window;
    T* stream_in;                                              // (N, C) residual stream before the layer
    T* norm1;                                                  // (N, C)
    T* qkv;                                                    // (N, 3C)
    T* attended;                                               // (N, C) attention's output, heads side by side
    T* stream_mid;                                             // (N, C) residual stream between attention and MLP
    T* norm2;                                                  // (N, C)
    T* pre;                                                    // (N, F) gelu only
    T* post;                                                   // (N, F)
    Acc<T>*norm1_mean, *norm1_rstd, *norm2_mean, *norm2_rstd;  // (N)
    Acc<T>* qk_rstd;                                           // (N, 2H)
    Acc<T>* lse;                                               // (H, N)
  };

  void bind_parameters();
  void forward();
  void forward_block(Block& block, T* stream_out);
  void backward_block(Block& block);
  void head(bool with_gradients, const Acc<T>* grad_scale);
  T* stream_after(int layer);  // residual stream after layer `layer`

  void norm_forward(T* out, Acc<T>* mean, Acc<T>* rstd, const T* inp, const T* gain, const T* shift);
  void norm_backward(const T* dout, const T* inp, const Acc<T>* mean, const Acc<T>* rstd, const T* gain, Acc<T>* dgain,
                     Acc<T>* dshift, bool add);

  const kernels::Exec<T>& exec() const { return device_.template exec<T>(); }

  Config::Model config_;
  GptShape shape_;
  Device& device_;
  Parameters<T>& parameters_;
  int64_t vocabulary_;
  std::vector<Block> blocks_;

  T *wte_ = nullptr, *wpe_ = nullptr, *norm_in_gain_ = nullptr, *norm_in_shift_ = nullptr;
  T *norm_out_gain_ = nullptr, *norm_out_shift_ = nullptr, *head_weight_ = nullptr, *head_bias_ = nullptr;
  Acc<T>*dwte_ = nullptr, *dwpe_ = nullptr, *dnorm_in_gain_ = nullptr, *dnorm_in_shift_ = nullptr;
  Acc<T>*dnorm_out_gain_ = nullptr, *dnorm_out_shift_ = nullptr, *dhead_weight_ = nullptr, *dhead_bias_ = nullptr;

  int32_t *tokens_ = nullptr, *targets_ = nullptr, *doc_start_ = nullptr;
  Acc<T>* losses_ = nullptr;
  Acc<T>*rotary_cos_ = nullptr, *rotary_sin_ = nullptr;  // (T, D/2)

  T* embedded_ = nullptr;  // (N, C) before the embedding norm
  Acc<T>*norm_in_mean_ = nullptr, *norm_in_rstd_ = nullptr, *norm_out_mean_ = nullptr, *norm_out_rstd_ = nullptr;
  T* stream_out_ = nullptr;  // (N, C) after the last layer
  T* norm_out_ = nullptr;    // (N, C)
  T* logits_ = nullptr;      // (chunk, V)

  // Backward's working set.
  T* dstream_ = nullptr;       // (N, C) gradient of the residual stream, updated in place from the last layer to the first
  T* dbranch_ = nullptr;       // (N, C) gradient inside a branch
  T* dqkv_ = nullptr;          // (N, 3C)
  T* dhidden_ = nullptr;       // (N, F)
  Acc<T>* delta_ = nullptr;    // (H, N)
  Acc<T>* scratch_ = nullptr;  // partial column sums
  void* sort_scratch_ = nullptr;
};

// Keys the average query of `doc_start` sees, window included: for FLOP counts.
double mean_attended(const int32_t* doc_start, int64_t n, int64_t window);

// Window of each layer in tokens (0: none), from the config.
std::vector<int64_t> layer_windows(const Config::Model& model);

}  // namespace speedrun
