#include "src/train/timeline_report.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <type_traits>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {
namespace {

constexpr size_t kKernelRows = 30, kKindRows = 40;
constexpr double kMsPerNs = 1e-6;

Interval interval_of(const Activity& activity) { return {activity.start_ns, activity.end_ns}; }

std::vector<KernelName> readable_names(const RankTimeline& timeline) {
  std::vector<KernelName> names;
  names.reserve(timeline.names.size());
  for (const std::string& name : timeline.names) names.push_back(kernel_name(name));
  return names;
}

bool is_communication(const Activity& activity, const std::vector<KernelName>& names) {
  return activity.kind == ActivityKind::kernel && names[activity.name].communication;
}

// First start and last end.
Interval extent(const std::vector<Activity>& activities) {
  if (activities.empty()) return {0, 0};
  Interval result = interval_of(activities[0]);
  for (const Activity& activity : activities) {
    result.first = std::min(result.first, activity.start_ns);
    result.second = std::max(result.second, activity.end_ns);
  }
  return result;
}

template <class KeyOf>
std::vector<TimelineRow> rows_by(const RecordedSteps& window, const KeyOf& key_of) {
  std::map<std::string, TimelineRow> rows;
  for (const Activity& activity : window.activities) {
    TimelineRow& row = rows[key_of(activity)];
    row.calls += 1;
    row.ms += static_cast<double>(activity.end_ns - activity.start_ns) * kMsPerNs;
  }
  std::vector<TimelineRow> sorted;
  for (auto& [name, row] : rows) sorted.push_back({name, row.calls / window.count, row.ms / window.count});
  std::stable_sort(sorted.begin(), sorted.end(), [](const TimelineRow& a, const TimelineRow& b) { return a.ms > b.ms; });
  return sorted;
}

double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

std::string steps_text(const RecordedSteps& window) {
  const int last = window.first + window.count - 1;
  return window.count == 1 ? fmt::format("step {}", window.first) : fmt::format("steps {} to {}", window.first, last);
}

std::string times_text(const StepTimes& times) {
  return fmt::format(
      "step {:.3f} ms, compute {:.3f} ms ({:.1f}%), communication {:.3f} ms, copies alone {:.3f} ms, idle {:.3f} ms ({:.1f}%); "
      "uncovered communication: {:.3f} ms of a step, {:.1f}%",
      times.length, times.compute, percent(times.compute, times.length), times.communication, times.copies_alone, times.idle,
      percent(times.idle, times.length), times.uncovered, percent(times.uncovered, times.length));
}

// Code points: what a terminal's columns are, for the characters that occur here.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

// ---------------------------------------------------------------- messages

static_assert(std::is_trivially_copyable_v<Activity>);

class Packer {
 public:
  void number(uint64_t value) { raw(&value, sizeof(value)); }
  void text(const std::string& value) {
    number(value.size());
    raw(value.data(), value.size());
  }
  void raw(const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    message_.insert(message_.end(), from, from + bytes);
  }
  std::vector<std::byte> take() { return std::move(message_); }

 private:
  std::vector<std::byte> message_;
};

class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> message) : rest_(message) {}
  uint64_t number() {
    uint64_t value = 0;
    raw(&value, sizeof(value));
    return value;
  }
  // How many items of `bytes` follow; no more than the message can hold.
  size_t count(size_t bytes) {
    const uint64_t value = number();
    require(value <= rest_.size() / bytes, "timeline: a rank's message is damaged");
    return static_cast<size_t>(value);
  }
  std::string text() {
    std::string value(count(1), '\0');
    raw(value.data(), value.size());
    return value;
  }
  void raw(void* to, size_t bytes) {
    require(bytes <= rest_.size(), "timeline: a rank's message is cut off");
    if (bytes > 0) std::memcpy(to, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

// ---------------------------------------------------------------- Chrome trace

// A stream's activities of one class; `lane` counts up where they overlap, since a track's events may only nest.
struct Track {
  uint32_t stream;
  bool communication;
  size_t lane;
  auto key() const { return std::tuple(communication, stream, lane); }
  bool operator<(const Track& other) const { return key() < other.key(); }
  std::string name() const {
    return fmt::format("{}stream {}{}", communication ? "NCCL, " : "", stream,
                       lane > 0 ? fmt::format(" (beside it {})", lane) : std::string());
  }
};

struct TraceEvent {
  uint64_t start_ns, end_ns;
  size_t rank;
  int tid;
  std::string text;  // all but the place in time: "\"name\":…"
};

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string event_text(const Activity& activity, const KernelName& name) {
  if (activity.kind != ActivityKind::kernel)
    return fmt::format(R"("name":{},"cat":"copy","args":{{"bytes":{}}})", quoted(name.text), activity.bytes);
  const auto& grid = activity.grid;
  const auto& block = activity.block;
  return fmt::format(
      R"("name":{},"cat":{},"args":{{"grid":"{} x {} x {}","block":"{} x {} x {}","registers":{},"shared_bytes":{}}})",
      quoted(name.text), quoted(name.kind), grid[0], grid[1], grid[2], block[0], block[1], block[2], activity.registers,
      activity.shared_bytes);
}

std::string metadata_event(const char* what, size_t rank, int tid, const std::string& value) {
  return fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{{}}}}})", what, rank, tid, value);
}

// Which track each activity of a rank is on, in the order of `order`: the first lane of its stream and class that is free again.
std::vector<Track> choose_tracks(const std::vector<const Activity*>& order, const std::vector<KernelName>& names) {
  std::map<std::pair<uint32_t, bool>, std::vector<uint64_t>> free_at;  // by lane
  std::vector<Track> tracks;
  tracks.reserve(order.size());
  for (const Activity* activity : order) {
    const bool communication = is_communication(*activity, names);
    std::vector<uint64_t>& lanes = free_at[{activity->stream, communication}];
    size_t lane = 0;
    while (lane < lanes.size() && lanes[lane] > activity->start_ns) ++lane;
    if (lane == lanes.size()) lanes.push_back(0);
    lanes[lane] = activity->end_ns;
    tracks.push_back({activity->stream, communication, lane});
  }
  return tracks;
}

// Appends a rank's events and the metadata that names its tracks; track 0 shows the windows.
void add_rank(size_t rank, const RankTimeline& timeline, std::vector<TraceEvent>& events, std::vector<std::string>& metadata) {
  const std::vector<KernelName> names = readable_names(timeline);
  std::vector<const Activity*> order;
  for (const RecordedSteps& window : timeline.windows) {
    for (const Activity& activity : window.activities) order.push_back(&activity);
    const auto [start, end] = extent(window.activities);
    if (!window.activities.empty())
      events.push_back({start, end, rank, 0,
                        fmt::format(R"("name":{},"cat":"steps","args":{{"stage":{}}})", quoted(steps_text(window)), window.stage)});
  }
  std::stable_sort(order.begin(), order.end(), [](const Activity* a, const Activity* b) { return a->start_ns < b->start_ns; });
  const std::vector<Track> tracks = choose_tracks(order, names);

  std::map<Track, int> tid_of_track;
  for (const Track& track : tracks) tid_of_track.emplace(track, 0);
  const std::string process = fmt::format("rank {}: {}", rank, timeline.label);
  metadata.push_back(metadata_event("process_name", rank, 0, fmt::format(R"("name":{})", quoted(process))));
  metadata.push_back(metadata_event("process_sort_index", rank, 0, fmt::format(R"("sort_index":{})", rank)));
  metadata.push_back(metadata_event("thread_name", rank, 0, R"("name":"steps")"));
  metadata.push_back(metadata_event("thread_sort_index", rank, 0, R"("sort_index":0)"));
  int next_tid = 1;
  for (auto& [track, tid] : tid_of_track) {
    tid = next_tid++;
    metadata.push_back(metadata_event("thread_name", rank, tid, fmt::format(R"("name":{})", quoted(track.name()))));
    metadata.push_back(metadata_event("thread_sort_index", rank, tid, fmt::format(R"("sort_index":{})", tid)));
  }
  for (size_t i = 0; i < order.size(); ++i) {
    const Activity& activity = *order[i];
    events.push_back(
        {activity.start_ns, activity.end_ns, rank, tid_of_track[tracks[i]], event_text(activity, names[activity.name])});
  }
}

nlohmann::ordered_json windows_json(const std::vector<RankTimeline>& ranks) {
  nlohmann::ordered_json windows = nlohmann::ordered_json::array();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<KernelName> names = readable_names(ranks[rank]);
    for (const RecordedSteps& window : ranks[rank].windows) {
      const StepTimes times = step_times(window, names);
      windows.push_back({{"rank", rank},
                         {"first_step", window.first},
                         {"steps", window.count},
                         {"stage", window.stage},
                         {"step_ms", times.length},
                         {"compute_ms", times.compute},
                         {"communication_ms", times.communication},
                         {"uncovered_communication_ms", times.uncovered},
                         {"copies_alone_ms", times.copies_alone},
                         {"idle_ms", times.idle}});
    }
  }
  return windows;
}

// ns → µs with all digits: doubles would lose the last ones.
std::string microseconds(uint64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

}  // namespace

std::vector<std::byte> pack(const RankTimeline& timeline) {
  Packer packer;
  packer.text(timeline.label);
  packer.number(static_cast<uint64_t>(timeline.num_lost));
  packer.number(timeline.names.size());
  for (const std::string& name : timeline.names) packer.text(name);
  packer.number(timeline.windows.size());
  for (const RecordedSteps& window : timeline.windows) {
    for (const int value : {window.first, window.count, window.stage}) packer.number(static_cast<uint64_t>(value));
    packer.number(window.activities.size());
    packer.raw(window.activities.data(), window.activities.size() * sizeof(Activity));
  }
  return packer.take();
}

RankTimeline unpack(std::span<const std::byte> message) {
  Unpacker unpacker(message);
  RankTimeline timeline;
  timeline.label = unpacker.text();
  timeline.num_lost = static_cast<int64_t>(unpacker.number());
  timeline.names.resize(unpacker.count(sizeof(uint64_t)));
  for (std::string& name : timeline.names) name = unpacker.text();
  timeline.windows.resize(unpacker.count(4 * sizeof(uint64_t)));
  for (RecordedSteps& window : timeline.windows) {
    for (int* value : {&window.first, &window.count, &window.stage}) *value = static_cast<int>(unpacker.number());
    window.activities.resize(unpacker.count(sizeof(Activity)));
    unpacker.raw(window.activities.data(), window.activities.size() * sizeof(Activity));
    for (const Activity& activity : window.activities)
      require(activity.name < timeline.names.size() && window.count > 0, "timeline: a rank's message is damaged");
  }
  require(unpacker.at_end(), "timeline: a rank's message is too long");
  return timeline;
}

std::vector<Interval> interval_union(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> result;
  for (const Interval& interval : intervals) {
    if (interval.first >= interval.second) continue;
    if (!result.empty() && interval.first <= result.back().second) {
      result.back().second = std::max(result.back().second, interval.second);
    } else {
      result.push_back(interval);
    }
  }
  return result;
}

uint64_t total_length(const std::vector<Interval>& disjoint) {
  uint64_t total = 0;
  for (const Interval& interval : disjoint) total += interval.second - interval.first;
  return total;
}

uint64_t overlap_length(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  uint64_t total = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const uint64_t begin = std::max(a[i].first, b[j].first), end = std::min(a[i].second, b[j].second);
    if (begin < end) total += end - begin;
    if (a[i].second < b[j].second) {
      ++i;
    } else {
      ++j;
    }
  }
  return total;
}

StepTimes step_times(const RecordedSteps& window, const std::vector<KernelName>& names) {
  std::vector<Interval> compute, communication, kernels, all;
  for (const Activity& activity : window.activities) {
    const Interval interval = interval_of(activity);
    all.push_back(interval);
    if (activity.kind != ActivityKind::kernel) continue;
    kernels.push_back(interval);
    (is_communication(activity, names) ? communication : compute).push_back(interval);
  }
  compute = interval_union(std::move(compute));
  communication = interval_union(std::move(communication));
  const uint64_t kernels_ns = total_length(interval_union(std::move(kernels)));
  const uint64_t all_ns = total_length(interval_union(std::move(all)));
  const uint64_t communication_ns = total_length(communication);
  const auto [first_start, last_end] = extent(window.activities);
  const auto per_step = [&](uint64_t ns) { return static_cast<double>(ns) * kMsPerNs / window.count; };
  return {.length = per_step(last_end - first_start),
          .compute = per_step(total_length(compute)),
          .communication = per_step(communication_ns),
          .uncovered = per_step(communication_ns - overlap_length(communication, compute)),
          .copies_alone = per_step(all_ns - kernels_ns),
          .idle = per_step(last_end - first_start - all_ns)};
}

std::vector<TimelineRow> rows_by_kernel(const RecordedSteps& window, const std::vector<KernelName>& names) {
  return rows_by(window, [&](const Activity& activity) { return names[activity.name].text; });
}

std::vector<TimelineRow> rows_by_kind(const RecordedSteps& window, const std::vector<KernelName>& names) {
  return rows_by(window, [&](const Activity& activity) {
    return activity.kind == ActivityKind::kernel ? names[activity.name].kind : std::string("copies and memory sets");
  });
}

std::string timeline_table(const std::string& heading, const std::vector<TimelineRow>& rows, double step_ms, size_t max_rows) {
  std::vector<TimelineRow> shown(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(std::min(rows.size(), max_rows)));
  if (rows.size() > max_rows) {
    TimelineRow rest{.name = fmt::format("{} others", rows.size() - max_rows)};
    for (size_t i = max_rows; i < rows.size(); ++i) {
      rest.calls += rows[i].calls;
      rest.ms += rows[i].ms;
    }
    shown.push_back(rest);
  }
  TimelineRow sum{.name = "sum"};
  for (const TimelineRow& row : rows) {
    sum.calls += row.calls;
    sum.ms += row.ms;
  }
  shown.push_back(sum);
  size_t width = width_of(heading);
  for (const TimelineRow& row : shown) width = std::max(width, width_of(row.name));
  const auto padded = [&](const std::string& text) { return text + std::string(width - width_of(text), ' '); };
  std::string text = fmt::format("  {}  {:>11}  {:>9}  {:>6}\n", padded(heading), "calls/step", "ms/step", "share");
  for (const TimelineRow& row : shown) {
    text += fmt::format("  {}  {:>11.6g}  {:>9.3f}  {:>5.1f}%\n", padded(row.name), row.calls, row.ms, percent(row.ms, step_ms));
  }
  return text;
}

std::string timeline_text(const std::vector<RankTimeline>& ranks) {
  std::vector<std::vector<KernelName>> names;
  for (const RankTimeline& rank : ranks) names.push_back(readable_names(rank));
  std::string text;
  for (size_t w = 0; !ranks.empty() && w < ranks[0].windows.size(); ++w) {
    const RecordedSteps& window = ranks[0].windows[w];
    text += fmt::format("timeline of {} (stage {}), mean of {}:\n", steps_text(window), window.stage,
                        window.count == 1 ? "1 step" : fmt::format("{} steps", window.count));
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (w >= ranks[rank].windows.size()) continue;
      const std::string who = ranks.size() > 1 ? fmt::format("rank {}: ", rank) : std::string();
      text += fmt::format("  {}{}\n", who, times_text(step_times(ranks[rank].windows[w], names[rank])));
    }
    const double step_ms = step_times(window, names[0]).length;
    text += timeline_table("kind", rows_by_kind(window, names[0]), step_ms, kKindRows);
    text += timeline_table("kernel", rows_by_kernel(window, names[0]), step_ms, kKernelRows);
  }
  if (!text.empty()) text.pop_back();
  return text;
}

std::string chrome_trace(const std::vector<RankTimeline>& ranks) {
  std::vector<TraceEvent> events;
  std::vector<std::string> metadata;
  for (size_t rank = 0; rank < ranks.size(); ++rank) add_rank(rank, ranks[rank], events, metadata);
  // Of two that start together the longer one comes first: a viewer nests the shorter one in it.
  std::stable_sort(events.begin(), events.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return a.start_ns != b.start_ns ? a.start_ns < b.start_ns : a.end_ns > b.end_ns;
  });
  const uint64_t origin = events.empty() ? 0 : events.front().start_ns;
  std::string text =
      "{\"displayTimeUnit\":\"ms\",\n\"otherData\":{\"windows\":" + windows_json(ranks).dump() + "},\n\"traceEvents\":[\n";
  const char* separator = "";
  for (const std::string& event : metadata) {
    text += separator + event;
    separator = ",\n";
  }
  for (const TraceEvent& event : events) {
    text += fmt::format(R"({}{{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},{}}})", separator, event.rank, event.tid,
                        microseconds(event.start_ns - origin), microseconds(event.end_ns - event.start_ns), event.text);
    separator = ",\n";
  }
  text += "\n]}\n";
  return text;
}

}  // namespace speedrun
