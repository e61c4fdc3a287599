#include "src/train/data_setup.h"

#include "kernels/base/error.h"
#include "src/optim/schedule.h"

namespace speedrun {

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
                           .row_tokens = row_tokens(config),
                           .borders = config.data.reader == ReaderKind::rows ? DocumentBorders::ignored : DocumentBorders::kept});
}

int64_t row_tokens(const Config& config) {
  return config.data.reader == ReaderKind::rows ? config.train.seq_len : config.train.batch_tokens / config.data.document_rows;
}

StepShape step_shape(const Config& config, int step) {
  return {.batch_tokens = schedule_at(config, step).batch_tokens,
          .row_tokens = row_tokens(config),
          .max_seq_len = config.data.max_seq_len};
}

std::vector<StepRun> step_runs(const Config& config) { return {{step_shape(config, 0), num_steps(config)}}; }

}  // namespace speedrun
