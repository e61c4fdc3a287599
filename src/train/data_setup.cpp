#include "src/train/data_setup.h"

#include <algorithm>

#include "kernels/base/error.h"
#include "src/optim/schedule.h"

namespace speedrun {
namespace {

StepShape shape_of(const StageValues& stage) {
  return {.batch_tokens = stage.batch_tokens, .row_tokens = stage.row_tokens, .max_seq_len = stage.max_seq_len};
}

}  // namespace

ReaderOptions train_reader_options(const Config& config) {
  if (config.data.train.empty())
    throw InputError(
        "data.train: not set; give a pattern of .bin shards, for example --set data.train=data/fineweb/fineweb_train_*.bin");
  return {.shards = list_shards(config.data.train),
          .vocab_size = config.model.vocab_size,
          .bos_id = config.model.vocab_size - 1,
          .repeat = config.data.repeat,
          .document_rows = config.data.document_rows};
}

std::unique_ptr<Reader> make_train_reader(const Config& config, ReaderOptions options) {
  return config.data.reader == ReaderKind::rows ? make_row_reader(std::move(options)) : make_document_reader(std::move(options));
}

ValidationReader make_validation_reader(const Config& config) {
  if (config.data.val.empty()) throw InputError("data.val: not set; give a pattern of .bin shards");
  return ValidationReader({.shards = list_shards(config.data.val),
                           .vocab_size = config.model.vocab_size,
                           .bos_id = config.model.vocab_size - 1,
                           .tokens = config.eval.tokens,
                           .row_tokens = eval_row_tokens(config),
                           .borders = config.data.reader == ReaderKind::rows ? DocumentBorders::ignored : DocumentBorders::kept});
}

int64_t row_tokens(const Config& config) {
  int64_t longest = 0;
  for (const StageValues& stage : stages_of(config)) longest = std::max(longest, stage.row_tokens);
  return longest;
}

int64_t eval_row_tokens(const Config& config) {
  return config.eval.row_tokens != 0 ? config.eval.row_tokens : stages_of(config).front().row_tokens;
}

StepShape step_shape(const Config& config, int step) {
  return shape_of(stages_of(config)[static_cast<size_t>(schedule_at(config, step).stage)]);
}

std::vector<StepRun> step_runs(const Config& config, int steps) {
  std::vector<StepRun> runs;
  for (const StageValues& stage : stages_of(config)) {
    if (stage.begin < steps) runs.push_back({shape_of(stage), std::min(stage.end, steps) - stage.begin});
  }
  return runs;
}

}  // namespace speedrun
