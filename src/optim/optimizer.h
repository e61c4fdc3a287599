#pragma once
// The optimizers of a run over the parameter table: Adam and Muon in both forms by group, their state, and what they need to know
// of a step.
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/extrapolation/reset_moment.h"
#include "kernels/head/head_loss.h"
#include "kernels/muon/muon.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"
#include "src/core/state_tensor.h"
#include "src/dist/communicator.h"
#include "src/dist/sparse_rows.h"
#include "src/optim/schedule.h"

namespace speedrun {

inline bool is_muon(OptimizerKind kind) { return kind == OptimizerKind::muon || kind == OptimizerKind::normuon; }

// What the host tells the device before a step; one copy of it travels, so one graph serves all steps.
template <class T>
struct StepInputs {
  Acc<T> grad_scale = 1;  // d(objective) / d(loss of a token)
  kernels::LossWeights<T> loss_weights;
  kernels::AdamStep adam[kNumParameterGroups];
  kernels::MuonStep muon[kNumParameterGroups];
};

// How the gradients of a step are summed over the ranks; all ranks do it in the same way.
struct GradientSums {
  bool begun = false;          // the tables' are on their way already, by begin_sum
  int64_t rows_per_owner = 0;  // of the sparse table, with this capacity; 0: that table is summed as a whole, too
  auto operator<=>(const GradientSums&) const = default;
};

template <class T>
class Optimizer {
 public:
  // With several ranks (parameters.sharding()) each has the state of what it updates, and the communicator connects them; null: one
  // rank.
  Optimizer(const Config& config, Device& device, Parameters<T>& parameters, Communicator* communicator = nullptr);

  // Several ranks: the table whose gradient may travel as its touched rows alone, up to `rows_per_owner` of them from each rank to
  // each owner; before plan(). cut_by_rows: what that asks of the table, equal slices of whole rows.
  bool cut_by_rows(int parameter) const;
  void allow_sparse(int parameter, int64_t rows_per_owner);
  // Of that table, (1 + W·rows_per_owner) in device memory, filled by the caller before a step that sums it so: how many rows this
  // rank has touched since its last update, then those rows, ascending.
  int32_t* touched_rows() { return touched_rows_; }

  void plan(MemoryPlan& memory);
  // After allocation: fills the tables the kernels read. `inputs` and `verdict` are device memory of the caller's.
  void prepare(const StepInputs<T>* inputs, kernels::StepVerdict* verdict);

  // The host's half of step `step`. Group bit g of the mask is set if group g updates in it (the embedding's is not while it is
  // tied to the head, which then has its gradient).
  static StepInputs<T> inputs_of(const Config& config, const StepValues& values, int step);
  static uint32_t update_mask(const StepValues& values);

  // Sums the ranks' gradients, checks them, updates the groups of the mask, zeroes their gradients and spreads the new weights;
  // asynchronous, capturable. The step's loss is summed over the ranks, too.
  void update(uint32_t mask, const GradientSums& sums = {});

  // Several ranks: the sum of one table's complete gradient, beside what is issued next, until the communicator's join(). Nothing
  // for a gradient that travels with others.
  void begin_sum(const Acc<T>* grad, const GradientSums& sums);
  bool sums_tables(uint32_t mask) const;  // whether a step of this mask has such tables

  // For after the update of a step with StepValues.split: "wte" becomes a copy of "head.weight" with its low half, m and v. The
  // count of updates in Adam's corrections follows from the step and is the head's already. Asynchronous, capturable.
  void split_embedding();

  // Zeroes the first moments (Adam's m, Muon's momentum) of some parameters after a jump of theirs, unless it was refused.
  // Asynchronous, capturable.
  void reset_momentum(const std::vector<int>& parameters, const kernels::JumpReport* report);

  std::vector<StateTensor> state();
  void reset_state();  // zero, as at the start of a run

 private:
  // State is that of the parameter's own range.
  struct AdamTensor {
    int parameter;
    DType dtype;
    void *m = nullptr, *v = nullptr;
  };
  struct MuonParameter {
    int parameter;
    Acc<T>*momentum = nullptr, *second = nullptr;  // second: normuon
  };
  struct MuonBatch {  // this rank's matrices of one shape and form that update in the same steps
    int group;        // of one of them
    OptimizerKind kind;
    int every, rows, cols;
    std::vector<kernels::MuonMatrix<T>> host;
    std::vector<std::pair<size_t, int>> sources;  // (position in muon_parameters_, part)
    kernels::MuonMatrix<T>* device = nullptr;
  };

  AdamTensor& adam_tensor(const char* name);         // throws Error if that parameter has no Adam state
  ParameterRange second_range(int parameter) const;  // normuon: own range of the statistics
  bool due(const ParameterUnit& unit, uint32_t mask) const;
  void begin_sparse_sum(int64_t rows_per_owner);
  void sum_gradients(uint32_t mask, const GradientSums& sums);
  void update_muon(uint32_t mask);
  void update_adam(uint32_t mask);
  void zero_gradients(uint32_t mask);

  Config::Optim config_;
  double grad_clip_;
  Device& device_;
  Parameters<T>& parameters_;
  Communicator* communicator_;  // null: one rank
  int sparse_table_ = -1;       // parameter
  std::optional<SparseRows<T>> sparse_rows_;
  int64_t touched_capacity_ = 0;  // rows
  int32_t* touched_rows_ = nullptr;
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
