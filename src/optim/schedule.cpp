#include "src/optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

namespace speedrun {
namespace {

int scaled(int count, double scale) {
  if (count == 0) return 0;
  return std::max(1, static_cast<int>(std::floor(count * scale + 0.5)));
}

// Falls from 1 at remaining = 1 to 0 at remaining = 0.
double fall(const Config::Schedule::LearningRate& lr, double remaining) {
  switch (lr.shape) {
    case DecayShape::constant:
      return 1;
    case DecayShape::linear:
      return remaining;
    case DecayShape::cosine:
      return 0.5 * (1 - std::cos(std::numbers::pi * remaining));
    case DecayShape::power:
      return std::pow(remaining, lr.power);
  }
  return 1;
}

}  // namespace

StepCounts step_counts(const Config::Schedule& schedule) {
  StepCounts counts;
  counts.steps = scaled(schedule.steps, schedule.scale);
  counts.lr_warmup = std::min(scaled(schedule.lr.warmup_steps, schedule.scale), counts.steps);
  const int after_warmup = counts.steps - counts.lr_warmup;
  if (schedule.lr.shape != DecayShape::constant) {
    const int asked = schedule.lr.cooldown_steps == 0 ? after_warmup : scaled(schedule.lr.cooldown_steps, schedule.scale);
    counts.lr_cooldown = std::min(asked, after_warmup);
  }
  counts.momentum_warmup = std::min(scaled(schedule.momentum.warmup_steps, schedule.scale), counts.steps);
  counts.momentum_cooldown =
      std::min(scaled(schedule.momentum.cooldown_steps, schedule.scale), counts.steps - counts.momentum_warmup);
  return counts;
}

int num_steps(const Config& config) { return step_counts(config.schedule).steps; }

double lr_factor(const Config::Schedule& schedule, int step) {
  const StepCounts counts = step_counts(schedule);
  if (step < counts.lr_warmup) return (step + 1.0) / counts.lr_warmup;
  const int fall_start = counts.steps - counts.lr_cooldown;
  if (schedule.lr.shape == DecayShape::constant || step < fall_start) return 1;
  const double final_factor = schedule.lr.final_fraction;
  if (step >= counts.steps) return final_factor;
  const double remaining = static_cast<double>(counts.steps - step) / counts.lr_cooldown;
  return final_factor + (1 - final_factor) * fall(schedule.lr, remaining);
}

double muon_momentum(const Config& config, int step) {
  const Config::Schedule::Momentum& momentum = config.schedule.momentum;
  const double peak = config.optim.muon.momentum;
  const StepCounts counts = step_counts(config.schedule);
  if (step < counts.momentum_warmup) return momentum.start + (peak - momentum.start) * step / counts.momentum_warmup;
  const int into_cooldown = std::min(step, counts.steps) - (counts.steps - counts.momentum_cooldown);
  if (counts.momentum_cooldown == 0 || into_cooldown <= 0) return peak;
  return peak + (momentum.final - peak) * into_cooldown / counts.momentum_cooldown;
}

const Config::Group& group_config(const Config::Optim& optim, ParameterGroup group) {
  const Config::Group* groups[kNumParameterGroups] = {&optim.embedding, &optim.position, &optim.head, &optim.matrix, &optim.vector};
  return *groups[static_cast<int>(group)];
}

StepValues schedule_at(const Config& config, int step) {
  StepValues values;
  values.lr_factor = lr_factor(config.schedule, step);
  for (int i = 0; i < kNumParameterGroups; ++i) {
    const Config::Group& group = group_config(config.optim, static_cast<ParameterGroup>(i));
    values.groups[static_cast<size_t>(i)] = {.lr = group.lr * group.lr_multiplier * values.lr_factor,
                                             .weight_decay = group.weight_decay * group.weight_decay_multiplier,
                                             .update = (int64_t{step} + 1) % group.every == 0};
  }
  values.muon_momentum = muon_momentum(config, step);
  values.batch_tokens = config.train.batch_tokens;
  return values;
}

bool eval_due(const Config& config, int completed) {
  const Config::Eval& eval = config.eval;
  const int steps = num_steps(config);
  if (completed == steps) return true;
  if (completed == 0) return eval.at_start;
  if (completed < 0 || completed > steps) return false;
  if (eval.every > 0 && completed % eval.every == 0) return true;
  const double dense_start = eval.dense_from * steps * (1 - 1e-12);  // 0.9 is not 9/10: no step is lost to rounding
  return eval.dense_every > 0 && completed >= dense_start && completed % eval.dense_every == 0;
}

bool checkpoint_due(const Config& config, int completed) {
  const Config::Checkpoint& checkpoint = config.checkpoint;
  const int steps = num_steps(config);
  if (completed == steps && checkpoint.at_end) return true;
  return checkpoint.every > 0 && completed > 0 && completed <= steps && completed % checkpoint.every == 0;
}

void print_schedule(const Config& config, const std::function<void(const std::string&)>& write) {
  constexpr size_t kPieceBytes = 1 << 16;
  std::string out = "# step lr_factor lr.embedding lr.position lr.head lr.matrix lr.vector momentum batch_tokens eval checkpoint\n";
  const int steps = num_steps(config);
  const auto end = std::back_inserter(out);
  for (int step = 0; step < steps; ++step) {
    const StepValues values = schedule_at(config, step);
    fmt::format_to(end, "{} {:.8g}", step, values.lr_factor);
    for (const GroupStep& group : values.groups) fmt::format_to(end, " {:.8g}", group.update ? group.lr : 0.0);
    fmt::format_to(end, " {:.8g} {} {:d} {:d}\n", values.muon_momentum, values.batch_tokens, eval_due(config, step + 1),
                   checkpoint_due(config, step + 1));
    if (out.size() < kPieceBytes) continue;
    write(out);
    out.clear();
  }
  write(out);
}

}  // namespace speedrun
