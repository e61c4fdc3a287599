#include "src/train/run_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "fmt/format.h"
#include "src/optim/schedule.h"

namespace speedrun {
namespace {

using Json = nlohmann::ordered_json;

std::string rate(double tokens_per_s) {
  if (tokens_per_s >= 1e6) return fmt::format("{:.2f} M tok/s", tokens_per_s * 1e-6);
  return fmt::format("{:.1f} k tok/s", tokens_per_s * 1e-3);
}

// Tokens of steps first … end − 1.
int64_t tokens_between(const Config& config, int first, int end) {
  int64_t tokens = 0;
  for (const StageValues& stage : stages_of(config))
    tokens += std::max(std::min(end, stage.end) - std::max(first, stage.begin), 0) * stage.batch_tokens;
  return tokens;
}

std::string reason(kernels::JumpRefusal refusal) {
  switch (refusal) {
    case kernels::JumpRefusal::singular:
      return "singular";
    case kernels::JumpRefusal::not_finite:
      return "not finite";
    case kernels::JumpRefusal::no_change:
      return "no change";
    case kernels::JumpRefusal::none:
      break;
  }
  return "";
}

}  // namespace

std::string duration_text(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<long>(std::lround(seconds));
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole / 60 % 60);
}

RunReport::RunReport(const Config& config, Log& log, double peak_flops, int completed)
    : config_(config),
      log_(log),
      peak_flops_(peak_flops),
      steps_(num_steps(config)),
      end_(end_step(config)),
      tokens_(tokens_between(config, 0, completed)) {}

void RunReport::open_metrics(const std::filesystem::path& file) { metrics_.emplace(file); }

void RunReport::training_begins(double clock_s) {
  speed_clock_ = clock_s;
  speed_tokens_ = tokens_;
}

void RunReport::write(Json line) {
  if (metrics_) metrics_->write(std::move(line));
}

void RunReport::step(const StepResult& result, double flops, const PhaseClock& phases) {
  const int completed = result.step + 1;
  const StepValues values = schedule_at(config_, result.step);
  tokens_ += values.batch_tokens;
  flops_ += flops * static_cast<double>(values.batch_tokens);
  const double clock = phases.seconds(Phase::training);
  // Speed over the last second or so, so that a line shows the present and not the mean since the start.
  if (clock - speed_clock_ > 1 || tokens_per_s_ == 0) {
    tokens_per_s_ = static_cast<double>(tokens_ - speed_tokens_) / std::max(clock - speed_clock_, 1e-9);
    speed_clock_ = clock;
    speed_tokens_ = tokens_;
  }
  const double mfu = peak_flops_ > 0 ? tokens_per_s_ * flops / peak_flops_ : 0;
  if (result.step % config_.train.log_every == 0) {
    Json rates;
    for (int g = 0; g < kNumParameterGroups; ++g)
      rates[group_name(static_cast<ParameterGroup>(g))] = values.groups[static_cast<size_t>(g)].lr;
    Json line = {{"step", result.step}, {"loss", result.loss}, {"grad_norm", result.grad_norm},
                 {"lr", rates},         {"tokens", tokens_},   {"tokens_per_s", tokens_per_s_}};
    if (mfu > 0) line["mfu"] = mfu;
    line["clock_s"] = clock;
    write(std::move(line));
  }
  const double wall = phases.total();
  if (progress_at_ >= 0 && wall - progress_at_ < log_.progress_interval_s() && completed != end_) return;
  progress_at_ = wall;
  const double left = static_cast<double>(tokens_between(config_, completed, end_)) / std::max(tokens_per_s_, 1.0);
  log_.progress(fmt::format("step {}/{}  loss {:.4f}  {}{}  clock {}  left {}", completed, steps_, result.loss, rate(tokens_per_s_),
                            mfu > 0 ? fmt::format("  MFU {:.1f}%", mfu * 100) : std::string(), duration_text(clock),
                            duration_text(left)));
}

void RunReport::bad_step(const StepResult& result) {
  write({{"step", result.step}, {"loss", result.loss}, {"grad_norm", result.grad_norm}, {"bad_tensor", result.bad_tensor}});
}

void RunReport::jump(int completed, const kernels::JumpReport& report, bool readout) {
  const bool refused = report.refusal != kernels::JumpRefusal::none;
  const std::span coefficients(report.c, static_cast<size_t>(report.differences));
  Json line = {{"step", completed},
               {"jump", report.jump},
               {"jump_capped", report.capped_jump},
               {"condition", report.condition},
               {"c", coefficients},
               {"refused", refused ? Json(reason(report.refusal)) : Json(nullptr)}};
  if (readout) line["readout"] = true;
  write(std::move(line));
  const std::string what = fmt::format("step {}: {} {}", completed, readout ? "read-out" : "jump",
                                       kExtrapolationNames[static_cast<size_t>(config_.extrapolation.method)]);
  if (refused) {
    log_.line(fmt::format("{} refused: {}, the weights are as they were", what, reason(report.refusal)));
    return;
  }
  std::string text = fmt::format("{} {:.3g} of the weights' norm", what, report.jump);
  if (report.capped_jump < report.jump) text += fmt::format(", capped to {:.3g}", report.capped_jump);
  // linear and the averages solve nothing.
  if (report.condition > 0) text += fmt::format(", c = {:.3g}, condition {:.3g}", fmt::join(coefficients, " "), report.condition);
  log_.line(text);
}

void RunReport::validation(const Validation& validation) {
  const auto& [completed, loss, raw, clock] = validation;
  Json line = {{"step", completed}, {"val_loss", loss}};
  if (raw) line["val_loss_raw"] = *raw;
  line["val_tokens"] = config_.eval.tokens;
  line["clock_s"] = clock;
  write(std::move(line));
  std::string text = fmt::format("step {}/{}  validation loss {:.4f}", completed, steps_, loss);
  if (raw) text += fmt::format(" ({:.4f} without the read-out)", *raw);
  text += fmt::format(" on {} tokens  clock {:.3f} s", config_.eval.tokens, clock);
  if (loss <= config_.train.target_loss) text += fmt::format("  (target {} reached)", config_.train.target_loss);
  log_.line(text);
}

// Which tensors lost more than the config wants to be told of, and the worst of all.
void RunReport::fp8(const std::vector<Fp8Losses>& all) {
  const Fp8Losses* worst = nullptr;
  const auto share = [](const Fp8Losses& losses) {
    return static_cast<double>(std::max(losses.saturated, losses.flushed)) /
           static_cast<double>(std::max<int64_t>(losses.values, 1));
  };
  for (const Fp8Losses& losses : all) {
    if (worst == nullptr || share(losses) > share(*worst)) worst = &losses;
    if (share(losses) <= config_.fp8.warn_saturated) continue;
    log_.warn(fmt::format("FP8: {}: {:.3g}% of its values saturated, {:.3g}% flushed to zero (fp8.warn_saturated {})", losses.name,
                          100.0 * static_cast<double>(losses.saturated) / static_cast<double>(losses.values),
                          100.0 * static_cast<double>(losses.flushed) / static_cast<double>(losses.values),
                          config_.fp8.warn_saturated));
  }
  if (worst != nullptr) log_.line(fmt::format("FP8: worst tensor {}, {:.3g}% lost", worst->name, 100 * share(*worst)));
}

void RunReport::end(const RunRecord& record, const PhaseClock& clock) {
  log_.line(
      fmt::format("clock {:.3f} s (start-up {:.1f} s, warm-up {:.1f} s, validation {:.1f} s, checkpoints {:.1f} s, total {:.1f} s)",
                  clock.seconds(Phase::training), clock.seconds(Phase::startup), clock.seconds(Phase::warmup),
                  clock.seconds(Phase::validation), clock.seconds(Phase::checkpoint), clock.total()));
  if (record.joules > 0 && tokens_ > 0)
    log_.line(fmt::format("{:.0f} J, {:.3f} mJ a token", record.joules, record.joules / static_cast<double>(tokens_) * 1e3));
}

}  // namespace speedrun
