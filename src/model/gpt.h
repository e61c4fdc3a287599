#pragma once
// GPT-2 and the Optimization Track's model.
#include <cstdint>
#include <vector>

#include "src/model/model.h"

namespace speedrun {

template <class T>
class Gpt : public Model<T> {
 public:
  Gpt(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device, Parameters<T>& parameters);

  void plan(MemoryPlan& memory) override;
  void prepare() override;
  void forward_backward(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) override;
  void evaluate() override;
  std::vector<float> logits_at(int64_t position) override;

 private:
  using Model<T>::config_;
  using Model<T>::shape_;
  using Model<T>::device_;
  using Model<T>::parameters_;
  using Model<T>::pass_;
  using Model<T>::tokens_;
  using Model<T>::targets_;
  using Model<T>::doc_start_;
  using Model<T>::prefix_;
  using Model<T>::losses_;
  using Model<T>::exec;
  using Model<T>::stage;

  struct Block {  // one layer's parameters, gradients and saved activations
    T *norm1_gain, *norm1_shift, *qkv_weight, *qkv_bias, *out_weight, *out_bias;
    T *norm2_gain, *norm2_shift, *up_weight, *up_bias, *down_weight, *down_bias;
    Acc<T>*dnorm1_gain, *dnorm1_shift, *dqkv_weight, *dqkv_bias, *dout_weight, *dout_bias;
    Acc<T>*dnorm2_gain, *dnorm2_shift, *dup_weight, *dup_bias, *ddown_weight, *ddown_bias;
    WindowKind window;
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
  void head(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights);
  int64_t window(const Block& block) const;
  T* stream_after(int layer);  // residual stream after layer `layer`

  void norm_forward(T* out, Acc<T>* mean, Acc<T>* rstd, const T* inp, const T* gain, const T* shift);
  void norm_backward(const T* dout, const T* inp, const Acc<T>* mean, const Acc<T>* rstd, const T* gain, Acc<T>* dgain,
                     Acc<T>* dshift, bool add);

  int64_t vocabulary_;
  std::vector<Block> blocks_;

  T *wte_ = nullptr, *wpe_ = nullptr, *norm_in_gain_ = nullptr, *norm_in_shift_ = nullptr;
  T *norm_out_gain_ = nullptr, *norm_out_shift_ = nullptr, *head_weight_ = nullptr, *head_bias_ = nullptr;
  Acc<T>*dwte_ = nullptr, *dwpe_ = nullptr, *dnorm_in_gain_ = nullptr, *dnorm_in_shift_ = nullptr;
  Acc<T>*dnorm_out_gain_ = nullptr, *dnorm_out_shift_ = nullptr, *dhead_weight_ = nullptr, *dhead_bias_ = nullptr;

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

}  // namespace speedrun
