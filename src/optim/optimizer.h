#pragma once
// The optimizers of a run over the parameter table: Adam and Muon in both forms by group, their state, and what they need to know
// of a step.
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/head/head_loss.h"
#include "kernels/muon/muon.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"
#include "src/core/state_tensor.h"
#include "src/optim/schedule.h"

namespace speedrun {

// What the host tells the device before a step; one copy of it travels, so one graph serves all steps.
template <class T>
struct StepInputs {
  Acc<T> grad_scale = 1;  // d(objective) / d(loss of a token)
  kernels::LossWeights<T> loss_weights;
  kernels::AdamStep adam[kNumParameterGroups];
  kernels::MuonStep muon[kNumParameterGroups];
};

template <class T>
class Optimizer {
 public:
  Optimizer(const Config& config, Device& device, Parameters<T>& parameters);

  void plan(MemoryPlan& memory);
  // After allocation: fills the tables the kernels read. `inputs` and `verdict` are device memory of the caller's.
  void prepare(const StepInputs<T>* inputs, kernels::StepVerdict* verdict);

  // The host's half of step `step`. Group bit g of the mask is set if group g updates in it (the embedding's is not while it is
  // tied to the head, which then has its gradient).
  static StepInputs<T> inputs_of(const Config& config, const StepValues& values, int step);
  static uint32_t update_mask(const StepValues& values);

  // Checks the gradients, updates the groups of the mask and zeroes their gradients; asynchronous, capturable.
  void update(uint32_t mask);

  // For after the update of a step with StepValues.split: "wte" becomes a copy of "head.weight" with its low half, m and v. The
  // count of updates in Adam's corrections follows from the step and is the head's already. Asynchronous, capturable.
  void split_embedding();

  std::vector<StateTensor> state();
  void reset_state();  // zero, as at the start of a run

 private:
  struct AdamTensor {
    int parameter;
    DType dtype;
    void *m = nullptr, *v = nullptr;
  };
  struct MuonParameter {
    int parameter;
    Acc<T>*momentum = nullptr, *second = nullptr;  // second: normuon
  };
  struct MuonBatch {  // all matrices of one shape and form that update in the same steps
    int group;        // of one of them
    OptimizerKind kind;
    int every, rows, cols;
    std::vector<kernels::MuonMatrix<T>> host;
    std::vector<std::pair<size_t, int>> sources;  // (position in muon_parameters_, part)
    kernels::MuonMatrix<T>* device = nullptr;
  };

  AdamTensor& adam_tensor(const char* name);  // throws Error if that parameter has no Adam state

  Config::Optim config_;
  double grad_clip_;
  Device& device_;
  Parameters<T>& parameters_;
  std::vector<AdamTensor> adam_;
  std::vector<MuonBatch> muon_;
  std::vector<MuonParameter> muon_parameters_;
  std::vector<kernels::MuonCoefficients> coefficients_;
  T *muon_x_ = nullptr, *muon_gram_ = nullptr;
  Acc<T>* muon_sums_ = nullptr;
  kernels::GradSegment* segments_ = nullptr;
  double *sums_ = nullptr, *sums_scratch_ = nullptr;
  const StepInputs<T>* inputs_ = nullptr;
  kernels::StepVerdict* verdict_ = nullptr;
};

}  // namespace speedrun
