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
// at least 1). Where rounding makes warm-up and cool-down longer than the run, the cool-down gives way.
struct StepCounts {
  int steps = 0;
  int lr_warmup = 0;
  int lr_cooldown = 0;  // 0 of the config ("all after the warm-up") is resolved here; 0 for a constant rate
  int momentum_warmup = 0;
  int momentum_cooldown = 0;
  bool operator==(const StepCounts&) const = default;
};
StepCounts step_counts(const Config::Schedule& schedule);
int num_steps(const Config& config);

// Factor of every learning rate in step s:
//   s < warmup              (s + 1) / warmup
//   s < steps - cooldown    1
//   else                    final + (1 - final) · fall(r), r = (steps - s) / cooldown: linear r, cosine (1 - cos πr) / 2, power
//   r^power
// From s = steps on it is `final`; it never rises again and is never below it.
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

struct StepValues {
  double lr_factor = 0;
  std::array<GroupStep, kNumParameterGroups> groups;  // by ParameterGroup
  double muon_momentum = 0;
  int64_t batch_tokens = 0;

  const GroupStep& group(ParameterGroup which) const { return groups[static_cast<size_t>(which)]; }
};
StepValues schedule_at(const Config& config, int step);

// Validate after `completed` steps? Multiples of eval.every; multiples of eval.dense_every from eval.dense_from of the steps on; 0
// if eval.at_start; the end always.
bool eval_due(const Config& config, int completed);

// Save after `completed` steps? Multiples of checkpoint.every, the end if checkpoint.at_end.
bool checkpoint_due(const Config& config, int completed);

// One line a step, its number first; the header line starts with '#'. A group that only sums gradients in a step shows lr 0. eval
// and checkpoint (0 or 1) are what happens after the step. `write` gets the text in pieces of whole lines: a long schedule is never
// in memory.
void print_schedule(const Config& config, const std::function<void(const std::string&)>& write);

}  // namespace speedrun
