#include "src/data/shard_reader.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

ReaderOptions checked(ReaderOptions options) {
  if (options.shards.shards.empty()) throw InputError("data.train: no shards given");
  if (options.vocab_size < 1) throw InputError(fmt::format("model.vocab_size: expected at least 1, found {}", options.vocab_size));
  if (options.repeat < 1) throw InputError(fmt::format("data.repeat: expected at least 1, found {}", options.repeat));
  return options;
}

}  // namespace

ShardReader::ShardReader(ReaderOptions options, DocumentIndex index)
    : options_(checked(std::move(options))),
      files_(options_.shards.files()),
      cache_(options_.shards.shards, {options_.vocab_size, index == DocumentIndex::built, options_.bos_id}) {}

std::shared_ptr<const LoadedShard> ShardReader::load(const ReaderState& at) {
  const auto num_shards = static_cast<int64_t>(files_.size());
  int64_t next_index = at.shard + 1;
  if (next_index == num_shards) next_index = at.epoch + 1 < options_.repeat ? 0 : -1;
  return cache_.get(at.shard, next_index);
}

ShardReader::StepPlan ShardReader::find_step(ReaderState& at, const StepShape& shape) {
  const auto num_shards = static_cast<int64_t>(files_.size());
  StepPlan plan = plan_step(at, shape);
  // One pass over all shards tells: where none is long enough for the step, more epochs do not help.
  for (int64_t tried = 0; plan.missing_tokens > 0 && tried < num_shards; ++tried) {
    const bool last = at.shard + 1 == num_shards;
    if (last && at.epoch + 1 == options_.repeat) break;
    at = last ? ReaderState{at.epoch + 1, 0, 0} : ReaderState{at.epoch, at.shard + 1, 0};
    plan = plan_step(at, shape);
  }
  return plan;
}

ShardReader::StepPlan ShardReader::find_step_or_throw(ReaderState& at, const StepShape& shape) {
  check_shape(shape);
  const StepPlan plan = find_step(at, shape);
  if (plan.missing_tokens == 0) return plan;
  throw InputError(
      fmt::format("training data ends {} steps after the {}: shard {} ({} of {}, epoch {} of {}) has {} tokens left, {} too few "
                  "for a step of {} tokens; use "
                  "more or longer shards (data.train, now {}), raise data.repeat, or lower schedule.steps or train.batch_tokens",
                  steps_served_, restored_ ? "resume point" : "start", quoted_path(info(at).path), at.shard + 1, files_.size(),
                  at.epoch + 1, options_.repeat, info(at).num_tokens - at.position, plan.missing_tokens, shape.batch_tokens,
                  quoted_path(options_.shards.pattern)));
}

void ShardReader::commit(ReaderState at, const StepPlan& plan) {
  at.position = plan.next_position;
  state_ = at;
  ++steps_served_;
}

void ShardReader::next(const StepShape& shape, int rank, int world, StepRows& out) {
  ReaderState at = state_;
  require(world >= 1 && rank >= 0 && rank < world, "reader: rank ", rank, " of ", world);
  const StepPlan plan = find_step_or_throw(at, shape);
  const int64_t total_rows = shape.batch_tokens / shape.row_tokens;
  if (total_rows % world != 0) {
    throw InputError(fmt::format(
        "a step of {} rows ({} tokens in rows of {}) cannot be divided among {} ranks; use a number of ranks that divides {}",
        total_rows, shape.batch_tokens, shape.row_tokens, world, total_rows));
  }
  out.num_rows = total_rows / world;
  out.row_tokens = shape.row_tokens;
  const auto num_tokens = static_cast<size_t>(out.num_rows * out.row_tokens);
  for (std::vector<int32_t>* values : {&out.inputs, &out.targets, &out.doc_start}) values->resize(num_tokens);
  fill_rows(at, shape, out.num_rows * rank, out);
  commit(at, plan);
}

void ShardReader::skip(const StepShape& shape) {
  ReaderState at = state_;
  const StepPlan plan = find_step_or_throw(at, shape);
  commit(at, plan);
}

bool ShardReader::try_skip(const StepShape& shape) {
  check_shape(shape);
  ReaderState at = state_;
  const StepPlan plan = find_step(at, shape);
  if (plan.missing_tokens > 0) return false;
  commit(at, plan);
  return true;
}

void ShardReader::restore(const ReaderState& state) {
  const auto num_shards = static_cast<int64_t>(files_.size());
  if (state.shard < 0 || state.shard >= num_shards || state.position < 0 || state.position > info(state).num_tokens) {
    throw InputError(fmt::format(
        "data position of the checkpoint (epoch {}, shard {}, token {}) is not in the {} shards of {}: they are not the shards "
        "the run was started with",
        state.epoch, state.shard, state.position, num_shards, quoted_path(options_.shards.pattern)));
  }
  if (state.epoch < 0 || state.epoch >= options_.repeat) {
    throw InputError(fmt::format("data position of the checkpoint is in epoch {}, but data.repeat is {}; raise data.repeat",
                                 state.epoch + 1, options_.repeat));
  }
  check_restored(state);
  state_ = state;
  steps_served_ = 0;
  restored_ = true;
}

}  // namespace speedrun
