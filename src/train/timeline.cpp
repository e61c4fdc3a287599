#include "src/train/timeline.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/core/file.h"

namespace speedrun {
namespace {

constexpr int kDefaultSteps = 4;

// Four steps about the middle of [begin, end), later if that avoids a pause between them; fewer if there are no four.
TimelineSteps middle_steps(int begin, int end, const std::function<bool(int)>& pauses_after) {
  const int count = std::min(kDefaultSteps, end - begin);
  const int middle = begin + (end - begin - count) / 2;
  const auto is_whole = [&](int first) {
    for (int step = first; step < first + count - 1; ++step) {
      if (pauses_after(step)) return false;
    }
    return true;
  };
  for (int first = middle; first + count <= end; ++first) {
    if (is_whole(first)) return {first, count};
  }
  return {middle, count};
}

Device& require_cuda(Device& device) {
  if (!device.is_cuda())
    throw InputError("--timeline: records what a GPU does, and this run computes on the " + device.name() +
                     "; set train.device=cuda on a machine with a GPU");
  return device;
}

}  // namespace

TimelineSteps parse_timeline_steps(const std::string& text) {
  TimelineSteps steps;
  const char* const end = text.data() + text.size();
  const auto [colon, first_error] = std::from_chars(text.data(), end, steps.first);
  bool good = first_error == std::errc() && colon != end && *colon == ':';
  if (good) {
    const auto [rest, count_error] = std::from_chars(colon + 1, end, steps.count);
    good = count_error == std::errc() && rest == end && steps.first >= 0 && steps.count > 0;
  }
  if (!good)
    throw InputError(
        fmt::format("--timeline-steps: expected FIRST:COUNT, two integers such as 100:4 with COUNT at least 1, not '{}'", text));
  return steps;
}

void check_timeline_file(const std::string& file) {
  const std::filesystem::path path = file;
  if (file.empty() || std::filesystem::is_directory(path))
    throw InputError(fmt::format("--timeline: expected the name of a file to write, not '{}'", file));
  if (path.has_parent_path() && !std::filesystem::is_directory(path.parent_path()))
    throw InputError(fmt::format("--timeline {}: there is no folder {}", file, path.parent_path().string()));
}

std::vector<TimelineSteps> timeline_windows(const TimelineOptions& options, const std::vector<StageValues>& stages, int first,
                                            int end, const std::function<bool(int)>& pauses_after) {
  if (options.steps) {
    const auto last = static_cast<int>(std::min<int64_t>(int64_t{options.steps->first} + options.steps->count, end));
    const int begin = std::max(options.steps->first, first);
    if (begin >= last) {
      const std::string made = first < end ? fmt::format("the steps {} to {}", first, end - 1) : std::string("no steps");
      throw InputError(
          fmt::format("--timeline-steps {}:{}: the run makes {} (FIRST:COUNT are COUNT steps from FIRST on, counted from 0)",
                      options.steps->first, options.steps->count, made));
    }
    return {{begin, last - begin}};
  }
  std::vector<TimelineSteps> windows;
  for (const StageValues& stage : stages) {
    const int stage_first = std::max(stage.begin, first), stage_end = std::min(stage.end, end);
    if (stage_first < stage_end) windows.push_back(middle_steps(stage_first, stage_end, pauses_after));
  }
  return windows;
}

Timeline::Timeline(const TimelineOptions& options, Device& device, std::vector<StageValues> stages, int end,
                   std::function<void()> meet)
    : options_(options), device_(require_cuda(device)), stages_(std::move(stages)), end_(end), meet_(std::move(meet)) {
  // Steps that the run does not have are refused before the warm-up, not after it.
  timeline_windows(options_, stages_, 0, end_, [](int) { return false; });
  recorded_.label = device.name();
}

void Timeline::warmed_up(int first_step, const std::function<bool(int)>& pauses_after) {
  planned_ = timeline_windows(options_, stages_, first_step, end_, pauses_after);
  device_.synchronize();
  recorder_.stop();
}

const TimelineSteps* Timeline::window_of(int step) const {
  const auto found = std::find_if(planned_.begin(), planned_.end(), [&](const TimelineSteps& window) {
    return step >= window.first && step - window.first < window.count;
  });
  return found != planned_.end() ? &*found : nullptr;
}

int Timeline::stage_of(int step) const {
  const auto after = std::find_if(stages_.begin(), stages_.end(), [&](const StageValues& stage) { return step < stage.end; });
  return static_cast<int>(after - stages_.begin());
}

void Timeline::before_step(int step) {
  if (recording_ || window_of(step) == nullptr) return;
  device_.synchronize();
  recorder_.start();
  recorded_.windows.push_back({.first = step, .stage = stage_of(step)});
  recording_ = true;
  if (meet_) meet_();
}

void Timeline::after_step(int step) {
  if (!recording_) return;
  ++recorded_.windows.back().count;
  const TimelineSteps* next = window_of(step + 1);
  // Windows that follow each other stay apart: two stages are not averaged.
  if (next == nullptr || next->first == step + 1) interrupt();
}

void Timeline::interrupt() {
  if (!recording_) return;
  device_.synchronize();
  recorded_.windows.back().activities = recorder_.stop();
  recording_ = false;
}

std::vector<std::byte> Timeline::packed() {
  interrupt();
  recorded_.names = recorder_.names();
  recorded_.num_lost = recorder_.num_lost();
  return pack(recorded_);
}

void write_timeline(const std::string& file, const std::vector<std::vector<std::byte>>& ranks, Log& log) {
  std::vector<RankTimeline> timelines;
  for (const std::vector<std::byte>& message : ranks) timelines.push_back(unpack(message));
  if (timelines.empty() || timelines[0].windows.empty()) {
    log.warn("--timeline: the run ended before a step that was to be recorded; " + file + " was not written");
    return;
  }
  for (size_t rank = 0; rank < timelines.size(); ++rank) {
    if (timelines[rank].num_lost > 0)
      log.warn(fmt::format("--timeline: CUPTI lost {} records of rank {}: times are too small", timelines[rank].num_lost, rank));
  }
  log.line(timeline_text(timelines));
  write_file_atomically(file, chrome_trace(timelines));
  log.line(fmt::format("timeline {}: open it in ui.perfetto.dev or chrome://tracing", file));
}

}  // namespace speedrun
