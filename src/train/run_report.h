#pragma once
// What a run tells while it goes on: the lines of its log and of metrics.jsonl about steps, jumps of the weights, validations, FP8.
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "src/config/config.h"
#include "src/core/log.h"
#include "src/train/clock.h"
#include "src/train/engine.h"
#include "src/train/run_folder.h"
#include "src/train/run_record.h"

namespace speedrun {

std::string duration_text(double seconds);  // "12.3 s", "4:05 min", "1:02 h"

// One validation. loss is what counts; raw: that of the weights as they are, where loss is of a read-out.
struct Validation {
  int completed = 0;
  double loss = 0;
  std::optional<double> raw;
  double clock_s = 0;
};

class RunReport {
 public:
  // Of a run that goes on after `completed` updates. peak_flops: BF16, of all ranks together; 0: unknown.
  RunReport(const Config& config, Log& log, double peak_flops, int completed);

  void open_metrics(const std::filesystem::path& file);  // without it there are none
  void training_begins(double clock_s);                  // the speed is measured from here

  // flops: of the model, for a token of this step.
  void step(const StepResult& result, double flops, const PhaseClock& clock);
  void bad_step(const StepResult& result);
  void jump(int completed, const kernels::JumpReport& report, bool readout);
  void validation(const Validation& validation);
  void fp8(const std::vector<Fp8Losses>& losses);
  void end(const RunRecord& record, const PhaseClock& clock);

  int64_t tokens() const { return tokens_; }  // of all updates so far
  double flops() const { return flops_; }     // of those since `completed`

 private:
  void write(nlohmann::ordered_json line);

  const Config& config_;
  Log& log_;
  double peak_flops_;
  int steps_, end_;  // of the schedule; of the run
  std::optional<MetricsFile> metrics_;
  int64_t tokens_ = 0;
  double flops_ = 0;
  double progress_at_ = -1;  // wall seconds of the last progress line
  double speed_clock_ = 0;   // where the current speed window began: clock, tokens
  int64_t speed_tokens_ = 0;
  double tokens_per_s_ = 0;
};

}  // namespace speedrun
