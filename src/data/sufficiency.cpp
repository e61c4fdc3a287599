#include "src/data/sufficiency.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "src/data/shard_reader.h"

namespace speedrun {
namespace {

// Passes over the shards beyond the configured ones in which the smallest sufficient repeat is sought.
constexpr int64_t kExtraEpochs = 64;

std::string describe(const Sufficiency& result, ReaderRule rule, const ReaderOptions& options,
                     const std::vector<StepRun>& schedule) {
  const std::string present = fmt::format("{} shards of {} hold {} tokens (data.repeat {})", options.shards.shards.size(),
                                          quoted_path(options.shards.pattern), result.tokens_present, options.repeat);
  if (result.sufficient)
    return fmt::format("training data suffices: {} steps need {} tokens, {}", result.steps_needed, result.tokens_needed, present);
  const std::string fewer = fmt::format("lower {} to {}", schedule.size() > 1 ? "the steps of schedule.stages" : "schedule.steps",
                                        result.steps_available);
  std::string way_out;
  if (result.repeat_needed > 0) {
    way_out = fmt::format("set data.repeat to {}, add shards, or {}", result.repeat_needed, fewer);
  } else if (result.steps_available > 0) {
    way_out = fmt::format("add shards or {}", fewer);
  } else if (rule == ReaderRule::documents) {
    way_out = fmt::format(
        "no shard has the documents for one step (token id {} starts one, data.max_seq_len = {} cuts it; `speedrun data inspect` "
        "counts them): use other shards, raise data.max_seq_len, or lower train.batch_tokens",
        options.bos_id, schedule.front().shape.max_seq_len);
  } else {
    way_out = "no shard is long enough for one step: use longer shards or lower train.batch_tokens";
  }
  return fmt::format(
      "training data ends at step {} of {}: the schedule needs {} tokens (plus what is dropped at the ends of shards and "
      "documents), {}; {}",
      result.steps_available, result.steps_needed, result.tokens_needed, present, way_out);
}

}  // namespace

Sufficiency check_sufficient(ReaderRule rule, const ReaderOptions& options, const std::vector<StepRun>& schedule) {
  Sufficiency result;
  for (const StepRun& run : schedule) {
    result.steps_needed += run.count;
    result.tokens_needed += run.count * run.shape.batch_tokens;
  }
  if (__builtin_mul_overflow(options.shards.total_tokens, options.repeat, &result.tokens_present)) {
    result.tokens_present = std::numeric_limits<int64_t>::max();
  }

  ReaderOptions endless = options;
  endless.repeat = std::numeric_limits<int64_t>::max();
  const auto reader = rule == ReaderRule::rows ? make_shard_row_reader(endless) : make_shard_document_reader(endless);
  int64_t step = 0;
  int64_t first_without_data = -1;
  const auto walk = [&] {
    for (const StepRun& run : schedule) {
      for (int64_t i = 0; i < run.count; ++i, ++step) {
        const bool served = reader->try_skip(run.shape);
        if (first_without_data < 0 && (!served || reader->state().epoch >= options.repeat)) first_without_data = step;
        if (!served || reader->state().epoch >= options.repeat + kExtraEpochs) return false;
      }
    }
    return true;
  };
  const bool walked_through = walk();
  result.sufficient = first_without_data < 0;
  result.steps_available = result.sufficient ? result.steps_needed : first_without_data;
  result.repeat_needed = walked_through ? reader->state().epoch + 1 : 0;
  result.message = describe(result, rule, options, schedule);
  return result;
}

}  // namespace speedrun
