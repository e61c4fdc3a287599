#pragma once
// What the training engine knows of a model: forward and backward as explicit lists of op calls, the same code on every device
// (T = bf16: CUDA; float: CPU; double: CPU, for finite differences). One object serves micro-batches of up to max_tokens tokens,
// made of whole rows; what a call does is fixed by set_pass() before it, so that a captured graph keeps it.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/step_values.h"
#include "kernels/head/head_loss.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"
#include "src/core/state_tensor.h"

namespace speedrun {

struct ModelShape {
  int64_t max_tokens = 0;      // largest micro-batch
  int64_t max_row_tokens = 0;  // longest row
  int64_t logits_chunk = 0;    // tokens whose logits exist at once
  bool training = true;        // false: no gradients, activations of one layer at a time
};

// What holds for a run of steps.
struct ModelStage {
  int64_t window_short = 0, window_long = 0;  // tokens behind the query; 0: no limit
  double attention_scale = 0;
  std::vector<double> rotary_frequencies = {};  // of the rotating pairs
  int loss_terms = 1;
  bool prefix_loss = false;
};

struct ModelPass {
  int64_t tokens = 0;      // N of the micro-batch, a multiple of row_tokens
  int64_t row_tokens = 0;  // positions restart at each row
  int stage = 0;           // index in the stages given to the constructor
  bool tied = false;       // embedding and head are the head's one matrix
};

// How many values of an FP8 tensor did not survive, of how many.
struct Fp8Losses {
  std::string name;
  int64_t saturated = 0, flushed = 0;  // beyond the largest number; not zero, stored as zero
  int64_t values = 0;
};

template <class T>
class Model {
 public:
  virtual ~Model() = default;

  virtual void plan(MemoryPlan& memory) = 0;
  virtual void prepare() = 0;  // after allocation: binds parameters, fills constant tables; synchronous

  // Batch of the next call, in device memory; the caller fills them in order before the call.
  int32_t* tokens() { return tokens_; }        // (N)
  int32_t* targets() { return targets_; }      // (N)
  int32_t* doc_start() { return doc_start_; }  // (N) absolute index in the micro-batch, non-decreasing
  int32_t* prefix() { return prefix_; }        // (V) prefix token of each token, -1: none; null without that loss

  void set_pass(const ModelPass& pass) { pass_ = pass; }
  const ModelPass& pass() const { return pass_; }

  // Called within forward_backward as soon as the gradient of a large table is complete, with that gradient, so that its way to the
  // other ranks can begin beside the rest of the backward pass. announces: whether this model does so, for each of its tables.
  using GradientListener = std::function<void(const Acc<T>* grad)>;
  void set_listener(GradientListener listener) { listener_ = std::move(listener); }
  virtual bool announces() const { return false; }

  // All of these are asynchronous and can be captured.
  // derive_weights: what the forward pass needs beside the parameters; after every change of the weights.
  virtual void derive_weights() {}
  // begin_step: what only training needs, once before a step's first forward_backward (and after derive_weights): FP8 weights.
  // exact: with the current maxima, as in the first steps.
  virtual void begin_step(bool /*exact*/) {}
  // Adds the gradients of Σ grad_scale·loss[t] to the parameters' and leaves loss[t].
  virtual void forward_backward(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) = 0;
  // Once after a step's last forward_backward: completes the gradients, sets the next step's FP8 scales.
  virtual void end_step(kernels::StepVerdict* /*verdict*/) {}
  virtual void evaluate() = 0;                      // loss[t] only, plain cross-entropy, without FP8
  const Acc<T>* losses() const { return losses_; }  // (N)

  // Capped logits (V) of the token at `position`, to host memory; synchronous. Runs the forward pass over all N tokens.
  virtual std::vector<float> logits_at(int64_t position) = 0;

  // FP8 scales and maxima as unsigned words whose maximum over the ranks is to be taken before end_step; none: null.
  virtual std::pair<void*, int64_t> maxima() { return {nullptr, 0}; }

  virtual std::vector<StateTensor> state() { return {}; }  // what a checkpoint needs beside parameters and optimizer
  virtual void reset_state() {}                            // as at the start of a run
  // Counts since the last call, over `tokens` tokens in `steps` steps; synchronous. Empty unless fp8.warn_saturated is set.
  virtual std::vector<Fp8Losses> take_fp8_losses(int64_t /*tokens*/, int64_t /*steps*/) { return {}; }

 protected:
  Model(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device, Parameters<T>& parameters)
      : config_(config.model),
        fp8_(config.fp8),
        shape_(shape),
        stages_(std::move(stages)),
        device_(device),
        parameters_(parameters) {}

  const kernels::Exec<T>& exec() const { return device_.template exec<T>(); }
  const ModelStage& stage() const { return stages_[static_cast<size_t>(pass_.stage)]; }
  // Capped logits (V) of one token from the final norm's output, through `logits`, on the host; synchronous. bias may be null.
  std::vector<float> read_logits(T* logits, const T* inp, const T* weight, const T* bias);

  void announce(const Acc<T>* grad) {
    if (listener_) listener_(grad);
  }

  Config::Model config_;
  Config::Fp8 fp8_;
  GradientListener listener_;
  ModelShape shape_;
  std::vector<ModelStage> stages_;
  Device& device_;
  Parameters<T>& parameters_;
  ModelPass pass_;
  int32_t *tokens_ = nullptr, *targets_ = nullptr, *doc_start_ = nullptr, *prefix_ = nullptr;
  Acc<T>* losses_ = nullptr;
};

kernels::Softcap softcap_of(SoftcapKind kind);

// The model that config.model.architecture names.
template <class T>
std::unique_ptr<Model<T>> make_model(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device,
                                     Parameters<T>& parameters);

}  // namespace speedrun
