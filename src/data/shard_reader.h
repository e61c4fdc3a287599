#pragma once
// What the two readers have in common: the walk over shards and epochs, ranks, the end of the data.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/data/loaded_shard.h"
#include "src/data/reader.h"

namespace speedrun {

class ShardReader : public Reader {
 public:
  void next(const StepShape& shape, int rank, int world, StepRows& out) final;
  void skip(const StepShape& shape) final;
  ReaderState state() const final { return state_; }
  void restore(const ReaderState& state) final;
  const std::vector<std::string>& files() const final { return files_; }

  // skip(), but false at the end of the data instead of an error; the cursor then stays where it was.
  bool try_skip(const StepShape& shape);

 protected:
  enum class DocumentIndex { none, built };
  ShardReader(ReaderOptions options, DocumentIndex index);

  // A step that starts at some place of a shard.
  struct StepPlan {
    int64_t next_position = 0;   // the cursor after it
    int64_t missing_tokens = 0;  // > 0: the rest of the shard is too short
  };
  virtual void check_shape(const StepShape& shape) const = 0;
  virtual StepPlan plan_step(const ReaderState& at, const StepShape& shape) = 0;
  // Fills out.inputs, targets, doc_start, all sized, with rows first_row … of the step planned last.
  virtual void fill_rows(const ReaderState& at, const StepShape& shape, int64_t first_row, StepRows& out) = 0;
  virtual void check_restored(const ReaderState& state) const = 0;

  const ReaderOptions& options() const { return options_; }
  const ShardInfo& info(const ReaderState& at) const { return options_.shards.shards[static_cast<size_t>(at.shard)]; }
  std::shared_ptr<const LoadedShard> load(const ReaderState& at);

 private:
  // Moves `at` to where the next step starts (this shard or a later one) and plans it; missing_tokens > 0 at the end of the data:
  // `at` is then the place in the last shard tried.
  StepPlan find_step(ReaderState& at, const StepShape& shape);
  StepPlan find_step_or_throw(ReaderState& at, const StepShape& shape);
  void commit(ReaderState at, const StepPlan& plan);

  ReaderOptions options_;
  std::vector<std::string> files_;
  ShardCache cache_;
  ReaderState state_;
  int64_t steps_served_ = 0;  // since the start or the last restore
  bool restored_ = false;
};

std::unique_ptr<ShardReader> make_shard_row_reader(ReaderOptions options);
std::unique_ptr<ShardReader> make_shard_document_reader(ReaderOptions options);

}  // namespace speedrun
