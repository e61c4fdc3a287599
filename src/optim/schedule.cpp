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

// A stage that has steps: [begin, end).
struct StageSpan {
  const Config::Schedule::Stage* stage = nullptr;
  int begin = 0, end = 0;
};

// Those with steps, one after the other; the whole run where the config has no stages.
std::vector<StageSpan> stage_spans(const Config::Schedule& schedule) {
  static const Config::Schedule::Stage kWholeRun;
  if (schedule.stages.empty()) return {{&kWholeRun, 0, scaled(schedule.steps, schedule.scale)}};
  std::vector<StageSpan> spans;
  int begin = 0;
  for (const auto& [index, stage] : schedule.stages) {
    const int end = begin + scaled(stage.steps, schedule.scale);
    if (end > begin) spans.push_back({&stage, begin, end});
    begin = end;
  }
  if (spans.empty()) spans.push_back({&kWholeRun, 0, 0});
  return spans;
}

// The index of the stage of a step; steps beyond the end belong to the last one.
size_t span_at(const std::vector<StageSpan>& spans, int step) {
  size_t index = 0;
  while (index + 1 < spans.size() && step >= spans[index].end) ++index;
  return index;
}

// YaRN, from a long window of `from` tokens to one of `to` tokens (Peng et al. 2023, with α = 1, β = 32): slow rotations are
// stretched by to / from, fast ones stay, and the scores grow with the logarithm.
void stretch_positions(StageValues& values, int from, int to) {
  constexpr double kAlpha = 1, kBeta = 32, kScaleGrowth = 0.2;
  const double ratio = static_cast<double>(from) / to;
  for (double& frequency : values.rotary_frequencies) {
    const double rotations = from * frequency / (2 * std::numbers::pi);
    const double kept = std::clamp((rotations - kAlpha) / (kBeta - kAlpha), 0.0, 1.0);
    frequency *= ratio + kept * (1 - ratio);
  }
  values.attention_scale *= 1 + kScaleGrowth * std::log(1 / ratio);
}

std::vector<double> unstretched_frequencies(const Config::Model& model) {
  if (model.positions != PositionKind::rotary) return {};
  const int pairs = static_cast<int>(model.rotary_fraction * model.head_size() / 2);
  std::vector<double> frequencies;
  for (int i = 0; i < pairs; ++i) frequencies.push_back(std::pow(model.rotary_base, -static_cast<double>(i) / (pairs - 1)));
  return frequencies;
}

// The groups that a model of the architecture may have parameters in.
std::vector<ParameterGroup> groups_of(Architecture architecture) {
  using enum ParameterGroup;
  if (architecture == Architecture::gpt) return {embedding, position, head, matrix, vector};
  return {embedding, head,       matrix,       down,        bigram, value_embedding, scalar,
          smear,     value_gate, resid_lambda, post_lambda, mudd,   mudd_gate};
}

}  // namespace

StepCounts step_counts(const Config::Schedule& schedule) {
  StepCounts counts;
  counts.steps = stage_spans(schedule).back().end;
  counts.lr_warmup = std::min(scaled(schedule.lr.warmup_steps, schedule.scale), counts.steps);
  if (schedule.lr.shape != DecayShape::constant) {
    const int after_warmup = counts.steps - counts.lr_warmup;
    counts.lr_hold = std::min(scaled(schedule.lr.hold_steps, schedule.scale), after_warmup);
    const int before_hold = after_warmup - counts.lr_hold;
    const int asked = schedule.lr.cooldown_steps == 0 ? before_hold : scaled(schedule.lr.cooldown_steps, schedule.scale);
    counts.lr_cooldown = std::min(asked, before_hold);
  }
  counts.momentum_warmup = std::min(scaled(schedule.momentum.warmup_steps, schedule.scale), counts.steps);
  counts.momentum_cooldown =
      std::min(scaled(schedule.momentum.cooldown_steps, schedule.scale), counts.steps - counts.momentum_warmup);
  if (schedule.split_step > 0) counts.split_step = scaled(schedule.split_step, schedule.scale) | 1;
  return counts;
}

int num_steps(const Config& config) { return step_counts(config.schedule).steps; }

ExtrapolationSpan extrapolation_span(const Config& config) {
  const int steps = num_steps(config);
  const auto within = [&](int updates) { return std::min(scaled(updates, config.schedule.scale), steps); };
  return {within(config.extrapolation.start), config.extrapolation.stop == 0 ? steps : within(config.extrapolation.stop)};
}

double lr_factor(const Config::Schedule& schedule, int step) {
  const StepCounts counts = step_counts(schedule);
  const std::vector<StageSpan> spans = stage_spans(schedule);
  const double peak = spans[span_at(spans, step)].stage->lr_multiplier;
  if (step < counts.lr_warmup) return peak * (step + 1.0) / counts.lr_warmup;
  if (schedule.lr.shape == DecayShape::constant) return peak;
  const int fall_end = counts.steps - counts.lr_hold;
  const double final_factor = schedule.lr.final_fraction;
  if (step >= fall_end) return final_factor;
  if (step <= fall_end - counts.lr_cooldown) return peak;
  const double remaining = static_cast<double>(fall_end - step) / counts.lr_cooldown;
  return final_factor + (peak - final_factor) * fall(schedule.lr, remaining);
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
  const Config::Group* groups[kNumParameterGroups] = {
      &optim.embedding,   &optim.position, &optim.head,       &optim.matrix,
      &optim.vector,      &optim.down,     &optim.bigram,     &optim.value_embedding,
      &optim.scalar,      &optim.smear,    &optim.value_gate, &optim.resid_lambda,
      &optim.post_lambda, &optim.mudd,     &optim.mudd_gate};
  return *groups[static_cast<int>(group)];
}

std::vector<StageValues> stages_of(const Config& config) {
  const Config::Model& model = config.model;
  const auto or_else = [](auto value, auto without_stages) { return value != 0 ? value : without_stages; };
  std::vector<StageValues> stages;
  for (const auto& [stage, begin, end] : stage_spans(config.schedule)) {
    StageValues values;
    values.begin = begin;
    values.end = end;
    values.batch_tokens = or_else(stage->batch_tokens, config.train.batch_tokens);
    values.row_tokens =
        config.data.reader == ReaderKind::rows ? config.train.seq_len : values.batch_tokens / config.data.document_rows;
    values.max_seq_len = or_else(stage->max_seq_len, config.data.max_seq_len);
    values.window_short = or_else(stage->window_short, model.window_short);
    values.window_long = or_else(stage->window_long, model.window_long);
    values.lr_multiplier = stage->lr_multiplier;
    for (size_t k = 1; k < stage->mtp_start.size(); ++k) {
      if (stage->mtp_start[k] != 0 || stage->mtp_end[k] != 0) values.loss_terms = static_cast<int>(k) + 1;
    }
    values.prefix_loss = stage->prefix_start != 0 || stage->prefix_end != 0;
    if (stages.empty()) {
      values.rotary_frequencies = unstretched_frequencies(model);
      values.attention_scale = model.attention_scale != 0 ? model.attention_scale : 1 / std::sqrt(model.head_size());
    } else {
      values.rotary_frequencies = stages.back().rotary_frequencies;
      values.attention_scale = stages.back().attention_scale;
      if (model.yarn) stretch_positions(values, stages.back().window_long, values.window_long);
    }
    stages.push_back(std::move(values));
  }
  return stages;
}

StageValues final_evaluation_stage(const Config& config) {
  StageValues values = stages_of(config).back();
  if (config.eval.final_window_short != 0) values.window_short = config.eval.final_window_short;
  if (config.eval.final_window_long != 0) values.window_long = config.eval.final_window_long;
  return values;
}

StepValues schedule_at(const Config& config, int step) {
  StepValues values;
  const std::vector<StageSpan> spans = stage_spans(config.schedule);
  const size_t index = span_at(spans, step);
  const StageSpan& span = spans[index];
  const Config::Schedule::Stage& stage = *span.stage;
  values.stage = static_cast<int>(index);
  values.batch_tokens = stage.batch_tokens != 0 ? stage.batch_tokens : config.train.batch_tokens;
  const double progress = span.end > span.begin ? static_cast<double>(step - span.begin) / (span.end - span.begin) : 0;
  for (size_t k = 0; k < stage.mtp_start.size(); ++k) {
    values.next_weights[k] = stage.mtp_start[k] + (stage.mtp_end[k] - stage.mtp_start[k]) * progress;
  }
  values.prefix_weight = stage.prefix_start + (stage.prefix_end - stage.prefix_start) * progress;

  const int split_step = step_counts(config.schedule).split_step;
  values.tied = config.model.tied_until_split && (split_step == 0 || step <= split_step);
  values.split = values.tied && step == split_step && split_step > 0;

  values.lr_factor = lr_factor(config.schedule, step);
  for (int i = 0; i < kNumParameterGroups; ++i) {
    const auto which = static_cast<ParameterGroup>(i);
    const Config::Group& group = group_config(config.optim, which);
    const bool follows_head = values.tied && which == ParameterGroup::embedding;
    values.groups[static_cast<size_t>(i)] = {.lr = group.lr * group.lr_multiplier * values.lr_factor,
                                             .weight_decay = group.weight_decay * group.weight_decay_multiplier,
                                             .update = !follows_head && (int64_t{step} + 1) % group.every == 0};
  }
  values.muon_momentum = muon_momentum(config, step);
  return values;
}

int end_step(const Config& config) {
  const int steps = num_steps(config), stop = config.train.stop_step;
  return stop > 0 ? std::min(stop, steps) : steps;
}

bool eval_due(const Config& config, int completed) {
  const Config::Eval& eval = config.eval;
  const int steps = num_steps(config);
  if (completed == steps || completed == end_step(config)) return true;
  if (completed == 0) return eval.at_start;
  if (completed < 0 || completed > steps) return false;
  if (eval.every > 0 && completed % eval.every == 0) return true;
  const double dense_start = eval.dense_from * steps * (1 - 1e-12);  // 0.9 is not 9/10: no step is lost to rounding
  return eval.dense_every > 0 && completed >= dense_start && completed % eval.dense_every == 0;
}

bool checkpoint_due(const Config& config, int completed) {
  const Config::Checkpoint& checkpoint = config.checkpoint;
  const int steps = num_steps(config);
  if (completed == end_step(config) && checkpoint.at_end) return true;
  return checkpoint.every > 0 && completed > 0 && completed <= steps && completed % checkpoint.every == 0;
}

void print_schedule(const Config& config, const std::function<void(const std::string&)>& write) {
  constexpr size_t kPieceBytes = 1 << 16;
  const std::vector<ParameterGroup> groups = groups_of(config.model.architecture);
  const std::vector<StageValues> stages = stages_of(config);
  std::string out = "# step lr_factor";
  for (const ParameterGroup group : groups) out.append(" lr.").append(group_name(group));
  out +=
      " momentum batch_tokens row_tokens max_seq_len window_short window_long attention_scale next_1 next_2 next_3 prefix tied "
      "eval "
      "checkpoint\n";
  const int steps = num_steps(config);
  const auto end = std::back_inserter(out);
  for (int step = 0; step < steps; ++step) {
    const StepValues values = schedule_at(config, step);
    const StageValues& stage = stages[static_cast<size_t>(values.stage)];
    fmt::format_to(end, "{} {:.8g}", step, values.lr_factor);
    for (const ParameterGroup group : groups) {
      const GroupStep& settings = values.group(group);
      fmt::format_to(end, " {:.8g}", settings.update ? settings.lr : 0.0);
    }
    fmt::format_to(end, " {:.8g} {} {} {} {} {} {:.8g}", values.muon_momentum, stage.batch_tokens, stage.row_tokens,
                   stage.max_seq_len, stage.window_short, stage.window_long, stage.attention_scale);
    for (const double weight : values.next_weights) fmt::format_to(end, " {:.8g}", weight);
    fmt::format_to(end, " {:.8g} {:d} {:d} {:d}\n", values.prefix_weight, values.tied, eval_due(config, step + 1),
                   checkpoint_due(config, step + 1));
    if (out.size() < kPieceBytes) continue;
    write(out);
    out.clear();
  }
  write(out);
}

}  // namespace speedrun
