#pragma once
// `speedrun train --timeline FILE`: records what the GPU does in some steps (src/core/activity_recorder.h), prints where their time
// went and writes a Chrome trace.
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/core/activity_recorder.h"
#include "src/core/device.h"
#include "src/core/log.h"
#include "src/optim/schedule.h"
#include "src/train/timeline_report.h"

namespace speedrun {

struct TimelineSteps {
  int first = 0, count = 0;
};

struct TimelineOptions {
  std::string file;                         // of the trace; empty: no timeline
  std::optional<TimelineSteps> steps = {};  // else some in the middle of every stage
};

// "FIRST:COUNT" of --timeline-steps; throws InputError.
TimelineSteps parse_timeline_steps(const std::string& text);
// Throws InputError if the file cannot be one that is written to in the end: no folder for it, or a folder itself.
void check_timeline_file(const std::string& file);

// Which of the run's steps first … end − 1 are recorded, in order: `options.steps` as far as the run makes them, or four in the
// middle of every stage, later where else a pause (a validation, a checkpoint) would fall between them. pauses_after(step): there
// is one after that step. Throws InputError if none of options.steps is made.
std::vector<TimelineSteps> timeline_windows(const TimelineOptions& options, const std::vector<StageValues>& stages, int first,
                                            int end, const std::function<bool(int)>& pauses_after);

class Timeline {
 public:
  // Between the device's creation and the engine's: graphs are to be made with the recorder present. `meet` brings the ranks
  // together before a window, so that none records how long it waits for the others (empty: one rank). Throws InputError if the
  // device is a CPU or CUPTI is missing. end: steps of the run.
  Timeline(const TimelineOptions& options, Device& device, std::vector<StageValues> stages, int end, std::function<void()> meet);

  // All graphs are made; the run goes on from first_step. pauses_after, errors: as of timeline_windows.
  void warmed_up(int first_step, const std::function<bool(int)>& pauses_after);

  // Around the submission of a step. The device is waited for before the first and after the last step of a window; all else is
  // asynchronous. interrupt: before other work of the device (a validation, a checkpoint); what is left becomes a window of its
  // own.
  void before_step(int step);
  void after_step(int step);
  void interrupt();

  std::vector<std::byte> packed();  // ends an open window; for write_timeline

 private:
  const TimelineSteps* window_of(int step) const;
  int stage_of(int step) const;

  TimelineOptions options_;
  Device& device_;
  std::vector<StageValues> stages_;
  int end_;
  std::function<void()> meet_;
  std::vector<TimelineSteps> planned_;
  ActivityRecorder recorder_;
  RankTimeline recorded_;
  bool recording_ = false;
};

// On rank 0: what packed() gave on each rank, by rank. Writes the file and logs the report.
void write_timeline(const std::string& file, const std::vector<std::vector<std::byte>>& ranks, Log& log);

}  // namespace speedrun
