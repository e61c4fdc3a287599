#pragma once
// What is made of recorded steps: where a step's time went, as numbers, as tables and as a Chrome trace.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/core/activity_recorder.h"
#include "src/train/kernel_name.h"

namespace speedrun {

// A window of steps that ran back to back on a GPU that was idle before and after.
struct RecordedSteps {
  int first = 0, count = 0;
  int stage = 0;  // of the schedule
  std::vector<Activity> activities = {};
};

struct RankTimeline {
  std::string label;               // of the rank's device
  std::vector<std::string> names;  // that activities index
  std::vector<RecordedSteps> windows;
  int64_t num_lost = 0;  // activities that are missing in them
};

// To and from one message.
std::vector<std::byte> pack(const RankTimeline& timeline);
RankTimeline unpack(std::span<const std::byte> message);  // throws Error if it is damaged

// Half-open [first, second) on the GPU's clock, ns.
using Interval = std::pair<uint64_t, uint64_t>;
std::vector<Interval> interval_union(std::vector<Interval> intervals);  // sorted, disjoint, none empty
uint64_t total_length(const std::vector<Interval>& disjoint);
uint64_t overlap_length(const std::vector<Interval>& a, const std::vector<Interval>& b);  // of two unions

// Mean of a window's steps, ms. Times of a class are times in which at least one of it runs:
// length = compute + uncovered + copies_alone + idle.
struct StepTimes {
  double length = 0;         // first start to last end, by the number of steps
  double compute = 0;        // kernels other than NCCL's
  double communication = 0;  // NCCL's kernels, which includes their waiting for the other ranks
  double uncovered = 0;      // communication while no other kernel ran
  double copies_alone = 0;   // copies and memory sets while no kernel ran
  double idle = 0;           // nothing at all
};
StepTimes step_times(const RecordedSteps& window, const std::vector<KernelName>& names);

struct TimelineRow {
  std::string name;
  double calls = 0, ms = 0;  // of one step; ms summed over calls, also of those that ran at the same time
};
// Longest first; equal ones by name.
std::vector<TimelineRow> rows_by_kernel(const RecordedSteps& window, const std::vector<KernelName>& names);
std::vector<TimelineRow> rows_by_kind(const RecordedSteps& window, const std::vector<KernelName>& names);
// Share is that of the step's length. Rows beyond max_rows become one.
std::string timeline_table(const std::string& heading, const std::vector<TimelineRow>& rows, double step_ms, size_t max_rows);

// Every window: a summary for each rank, the tables of rank 0.
std::string timeline_text(const std::vector<RankTimeline>& ranks);

// For chrome://tracing and Perfetto: a process for each rank; a track for each stream, a second one where things of the same stream
// overlap, and collectives on tracks of their own; times in µs from the first start of all. Events are sorted by time. "otherData"
// holds every window's StepTimes of every rank.
std::string chrome_trace(const std::vector<RankTimeline>& ranks);

}  // namespace speedrun
