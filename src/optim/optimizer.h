#pragma once
// The optimizers of a run over the parameter table: AdamW and Muon by group, their state, and what they need to know of a step.
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/muon/muon.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"
#include "src/optim/schedule.h"

namespace speedrun {

// What the host tells the device before a step; one copy of it travels, so one graph serves all steps.
template <class T>
struct StepInputs {
  Acc<T> grad_scale = 1;  // d(objective) / d(loss of a token)
  kernels::AdamStep adam[kNumParameterGroups];
  kernels::MuonStep muon[kNumParameterGroups];
};

// A tensor of optimizer state, for checkpoints.
struct StateTensor {
  std::string name;  // "adam.m/h.0.norm1.gain"
  DType dtype;
  void* data;  // device memory
  int64_t count;
};

template <class T>
class Optimizer {
 public:
  Optimizer(const Config& config, Device& device, Parameters<T>& parameters);

  void plan(MemoryPlan& memory);
  // After allocation: fills the tables the kernels read. `inputs` and `verdict` are device memory of the caller's.
  void prepare(const StepInputs<T>* inputs, kernels::StepVerdict* verdict);

  // The host's half of step `step`. Group bit g of the mask is set if group g updates in it.
  static StepInputs<T> inputs_of(const Config& config, const StepValues& values, int step);
  static uint32_t update_mask(const StepValues& values);

  // Checks the gradients, updates the groups of the mask and zeroes their gradients; asynchronous, capturable.
  void update(uint32_t mask);

  std::vector<StateTensor> state();
  void reset_state();  // zero, as at the start of a run

 private:
  struct AdamTensor {
    int parameter;
    DType dtype;
    void *m = nullptr, *v = nullptr;
  };
  struct MuonBatch {  // all matrices of one shape
    int group, rows, cols;
    std::vector<kernels::MuonMatrix<T>> host;
    std::vector<std::pair<int, int>> sources;  // (parameter, part)
    kernels::MuonMatrix<T>* device = nullptr;
  };

  Config::Optim config_;
  double grad_clip_;
  Device& device_;
  Parameters<T>& parameters_;
  std::vector<AdamTensor> adam_;
  std::vector<MuonBatch> muon_;
  std::vector<int> muon_parameters_;
  std::vector<Acc<T>*> momenta_;  // by position in muon_parameters_
  std::vector<kernels::MuonCoefficients> coefficients_;
  T *muon_x_ = nullptr, *muon_gram_ = nullptr;
  Acc<T>* muon_norms_ = nullptr;
  kernels::GradSegment* segments_ = nullptr;
  double *sums_ = nullptr, *sums_scratch_ = nullptr;
  const StepInputs<T>* inputs_ = nullptr;
  kernels::StepVerdict* verdict_ = nullptr;
};

}  // namespace speedrun
