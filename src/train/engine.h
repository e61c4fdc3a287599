#pragma once
// Model, optimizer and device of a run behind one face that does not depend on the activation type: the training loop, evaluation,
// checkpoints and sampling talk to it. A step allocates nothing and waits for nothing: batches go through a ring of staging
// buffers, forward/backward and optimizer are graphs, and a step's loss comes back some steps later.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/extrapolation/extrapolation.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/data/reader.h"
#include "src/dist/communicator.h"
#include "src/dist/control.h"
#include "src/model/model.h"
#include "src/optim/schedule.h"
#include "src/train/state_entry.h"

namespace speedrun {

struct StepResult {
  int step = 0;                             // index of the update
  double loss = 0;                          // mean over the step's tokens, nats
  double grad_norm = 0;                     // before clipping
  bool finite = true;                       // false: this step and all later ones left the weights alone
  std::string bad_tensor;                   // then: "loss" or the first parameter whose gradient is not finite
  std::optional<kernels::JumpReport> jump;  // extrapolation.apply = weights: made or refused after this update
};

// State entries of parameters are named by this and the parameter's name; optimizer state has other prefixes.
inline constexpr std::string_view kParameterPrefix = "parameter/";
// Those of weight extrapolation, history and averages: a run that branches off with other extrapolation.* keys begins without them.
inline constexpr std::string_view kExtrapolationPrefix = "extrapolation.";

struct EngineOptions {
  int64_t micro_batch_tokens = 0;     // most tokens of one forward/backward; a row is never cut; 0: chosen here
  int64_t evaluation_row_tokens = 0;  // length of the rows that are evaluated
  bool training = true;               // false: evaluation and sampling alone
  Control* control = nullptr;         // both null: one rank
  Communicator* communicator = nullptr;
  int64_t touched_rows = 0;  // tests: rows per owner of a sparse sum in every stage; 0: chosen here
};

// How often the bigram table's gradient was summed over the ranks, in stages where its touched rows alone may travel.
struct TableSums {
  int64_t sparse = 0;
  int64_t dense = 0;  // more rows than the stage's capacity, or not known after a resume
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const MemoryPlan& memory_plan() const = 0;
  virtual int64_t micro_batch_tokens(int stage) const = 0;  // of training in that stage of the schedule
  virtual int64_t evaluation_tokens() const = 0;            // of evaluation: whole rows
  virtual int64_t parameter_count() const = 0;

  // Builds every graph the schedule needs and runs everything once on zeros, then zeroes all state. Before it nothing else may be
  // called, after it the weights are to be set.
  virtual void warm_up() = 0;
  virtual void initialize(uint64_t seed) = 0;
  // Prefix token of each token (src/data/prefix_table.h); until it is set there is none.
  virtual bool wants_prefix_table() const = 0;
  virtual void set_prefix_table(const std::vector<int32_t>& prefix) = 0;

  // One training step: enqueued, not waited for. rows are this rank's, of the step's stage.
  virtual void submit_step(int step, const StepRows& rows) = 0;
  // Results in order. poll: the next one if it has arrived; wait: the next one that was submitted.
  virtual std::optional<StepResult> poll_result() = 0;
  virtual std::optional<StepResult> wait_result() = 0;

  // Weight extrapolation (src/optim/extrapolation.h). extrapolation.apply = readout: from begin_readout on the weights are as a
  // validation after `completed` updates is to see them, until end_readout; no step and no checkpoint in between. Before
  // begin_evaluation; synchronous: the report is filled at return.
  // False: there is nothing to see, and nothing was touched.
  virtual bool begin_readout(int completed, kernels::JumpReport* report) = 0;
  virtual void end_readout() = 0;
  virtual std::string extrapolation_note() const = 0;  // for the log; empty: extrapolation.method is none
  // For a run that branches off with other extrapolation.* keys: history begins anew after `completed` updates.
  virtual void restart_extrapolation(int completed) = 0;

  // Before the calls below, and again after every change of the weights: windows and shared matrices are those of a model after
  // `completed` steps.
  virtual void begin_evaluation(int completed) = 0;
  // Loss alone: adds the rows' losses to a sum in double; any number of rows.
  virtual void evaluate_rows(const StepRows& rows) = 0;
  virtual double take_evaluation_sum() = 0;                           // over all ranks, synchronous; resets it
  virtual std::vector<float> token_losses(const StepRows& rows) = 0;  // synchronous, (rows, row_tokens)
  // Capped logits after the last of `tokens` (at most a row), synchronous.
  virtual std::vector<float> next_logits(const std::vector<int32_t>& tokens) = 0;

  // Values that FP8 lost since the last call (fp8.warn_saturated); synchronous.
  virtual std::vector<Fp8Losses> take_fp8_losses() = 0;

  virtual std::vector<StateEntry> state() = 0;
  // Gradients of one step's rows without an update, summed as the optimizer would see them; for comparisons with other programs.
  virtual std::vector<StateEntry> gradients(const StepRows& rows, double* loss) = 0;
  virtual uint64_t weights_hash() = 0;  // of values and masters; on rank 0, as read of a state entry
  virtual std::vector<std::string> notes()
      const = 0;  // for the log, after warm_up: products without a tuned algorithm, sparse sums
  virtual TableSums table_sums() const = 0;
};

// Steps whose results may be outstanding before the host waits for the oldest: no rank is further ahead of another.
inline constexpr size_t kResultSlots = 8;

// Plans memory (refusing what does not fit), allocates, binds. `config` is complete and valid. With several ranks all of them call
// it.
std::unique_ptr<Engine> make_engine(const Config& config, Device& device, const EngineOptions& options);

}  // namespace speedrun
