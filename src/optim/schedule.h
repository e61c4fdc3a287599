#pragma once
// What changes from step to step: learning rates, momentum, batch; and after which steps to validate and to save. Pure functions of
// the config and the step, so that a resumed run, --print-schedule and the training loop see the same numbers.
//
// Step s = 0, 1, …, num_steps - 1 is the index of an update; `completed` counts updates done: validation "at step N" is after N of
// them.
#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "src/config/config.h"
#include "src/core/parameter.h"

namespace speedrun {

// The step counts of Config::Schedule times schedule.scale, each rounded to the nearest integer (halves up; a count above 0 stays
// at least 1). Where rounding makes warm-up, cool-down and hold longer than the run, the cool-down gives way, then the hold.
struct StepCounts {
  int steps = 0;  // with stages: the sum of their rounded counts
  int lr_warmup = 0;
  int lr_cooldown = 0;  // 0 of the config ("all after the warm-up") is resolved here; 0 for a constant rate
  int momentum_warmup = 0;
  int momentum_cooldown = 0;
  int lr_hold = 0;     // 0 for a constant rate
  int split_step = 0;  // odd, as the updates of head and embedding are; 0: no split
  bool operator==(const StepCounts&) const = default;
};
StepCounts step_counts(const Config::Schedule& schedule);
int num_steps(const Config& config);

// The completed updates between which weight extrapolation acts, both included: extrapolation.start and stop times schedule.scale,
// rounded as above, within the run.
struct ExtrapolationSpan {
  int first = 0, last = 0;
};
ExtrapolationSpan extrapolation_span(const Config& config);

// Factor of every learning rate in step s; m is the lr_multiplier of its stage (1 without stages), end = steps - hold:
//   s < warmup            m · (s + 1) / warmup
//   s < end - cooldown    m
//   s < end               final + (m - final) · fall(r), r = (end - s) / cooldown: linear r, cosine (1 - cos πr) / 2, power r^power
//   else                  final
// Without stages it never rises again after the warm-up and is never below `final`.
double lr_factor(const Config::Schedule& schedule, int step);

// Muon's momentum in step s: start + (peak - start) · s / warmup in the warm-up, peak + (final - peak) · (s - (steps - cooldown)) /
// cooldown in the cool-down, peak (optim.muon.momentum) else.
double muon_momentum(const Config& config, int step);

// The keys of one group.
const Config::Group& group_config(const Config::Optim& optim, ParameterGroup group);

struct GroupStep {
  double lr = 0;            // lr · lr_multiplier · factor
  double weight_decay = 0;  // weight_decay · weight_decay_multiplier
  bool update = true;       // false: only sum the gradient in this step
};

// Shapes, windows and positions of a run of steps: what a CUDA graph of forward and backward is made for.
struct StageValues {
  int begin = 0, end = 0;  // steps
  int64_t batch_tokens = 0;
  int64_t row_tokens = 0;  // documents: batch_tokens / data.document_rows; rows: train.seq_len
  int64_t max_seq_len = 0;
  int window_short = 0, window_long = 0;  // tokens behind the query; 0: no limit
  double lr_multiplier = 1;
  int loss_terms = 1;  // tokens ahead in the loss, in all of the stage
  bool prefix_loss = false;
  // Rotary: angular frequencies of the rotating pairs (D/4 of them for main_track) and the attention scale. With model.yarn both
  // follow the long window from stage to stage (main_track only): from L to L' tokens, r = L·f/2π, c = clamp((r − 1)/31, 0, 1),
  // f ← f·(L/L' + c·(1 − L/L')), scale ← scale·(1 + 0.2·ln(L'/L)).
  std::vector<double> rotary_frequencies;
  double attention_scale = 0;
  bool operator==(const StageValues&) const = default;
};

// The stages of a run, at least one; with schedule.scale applied to each one's steps (a stage of n > 0 steps keeps at least 1).
// Stages of 0 steps are left out.
std::vector<StageValues> stages_of(const Config& config);
// The last stage with eval.final_window_short/long where they are set: windows of the last validation. No further YaRN.
StageValues final_evaluation_stage(const Config& config);

struct StepValues {
  int stage = 0;                             // index in stages_of
  std::array<double, 3> next_weights = {1};  // weights of the next tokens in the loss
  double prefix_weight = 0;
  // Embedding and head are one matrix in this step (model.tied_until_split): the embedding's gradient went to the head, the
  // embedding group does not update. split: after this step's update the embedding becomes a copy of the head, with its Adam state.
  bool tied = false, split = false;
  double lr_factor = 0;
  std::array<GroupStep, kNumParameterGroups> groups;  // by ParameterGroup
  double muon_momentum = 0;
  int64_t batch_tokens = 0;

  const GroupStep& group(ParameterGroup which) const { return groups[static_cast<size_t>(which)]; }
};
StepValues schedule_at(const Config& config, int step);

// Steps after which a run ends: the schedule's, or train.stop_step where that is fewer.
int end_step(const Config& config);

// Validate after `completed` steps? Multiples of eval.every; multiples of eval.dense_every from eval.dense_from of the steps on; 0
// if eval.at_start; the schedule's end and the run's always.
bool eval_due(const Config& config, int completed);

// Save after `completed` steps? Multiples of checkpoint.every, the run's end if checkpoint.at_end.
bool checkpoint_due(const Config& config, int completed);

// One line a step, its number first; the header line starts with '#' and names the columns: the rates of the groups that the
// architecture has (0 in a step that only sums gradients), shapes in tokens, windows (0: no limit), loss weights of the next tokens
// and of the prefix token. tied, eval and checkpoint are 0 or 1; the last two happen after the step. `write` gets the text in
// pieces of whole lines: a long schedule is never in memory.
void print_schedule(const Config& config, const std::function<void(const std::string&)>& write);

}  // namespace speedrun
