// Combinations of keys that cannot be trained. Types and ranges of single keys are checked where they are read.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"
#include "src/config/config_io.h"
#include "src/core/text.h"

namespace speedrun {
namespace {

class Check {
 public:
  explicit Check(const std::string& source) : source_(source) {}
  // Refuses the config, with the message made of `parts`, unless the condition holds.
  template <class... Parts>
  void that(bool condition, fmt::format_string<Parts...> message, Parts&&... parts) const {
    if (!condition) throw InputError(source_ + ": " + fmt::format(message, std::forward<Parts>(parts)...));
  }

 private:
  const std::string& source_;
};

void check_model(const Check& check, const Config::Model& model) {
  check.that(model.width % model.num_heads == 0, "model.width = {} must be a multiple of model.num_heads = {}", model.width,
             model.num_heads);
  if (model.positions == PositionKind::rotary) {
    check.that(model.head_size() % 2 == 0, "rotary positions need an even head size; model.width / model.num_heads is {}",
               model.head_size());
    const double pairs = model.rotary_fraction * model.head_size() / 2;
    check.that(
        pairs == std::floor(pairs) && pairs >= 2,
        "model.rotary_fraction = {} of head size {} makes {} rotating pairs of channels; it must be a whole number from 2 on",
        model.rotary_fraction, model.head_size(), pairs);
  }
  check.that(model.window_short == 0 || model.window_long == 0 || model.window_short <= model.window_long,
             "model.window_short = {} must not exceed model.window_long = {}", model.window_short, model.window_long);
  check.that(!model.tied_head || model.init != InitKind::zero_projections,
             "model.init = zero_projections starts the head at 0, which a tied head cannot do: set model.tied_head to false");
  if (!model.layers.empty()) {
    const int last = model.layers.rbegin()->first;
    check.that(last < model.num_layers, "model.layers.{} does not exist: model.num_layers is {}, the last layer is {}", last,
               model.num_layers, model.num_layers - 1);
  }
}

void check_batch(const Check& check, const Config& config) {
  const Config::Train& train = config.train;
  int64_t row = train.seq_len;
  std::string row_name = fmt::format("train.seq_len = {}", row);
  if (config.data.reader == ReaderKind::rows) {
    check.that(train.batch_tokens % row == 0, "train.batch_tokens = {} must be a multiple of {}", train.batch_tokens, row_name);
    check.that(config.eval.tokens % row == 0, "eval.tokens = {} must be a multiple of {}", config.eval.tokens, row_name);
  } else {
    check.that(train.batch_tokens % config.data.document_rows == 0,
               "train.batch_tokens = {} must be a multiple of data.document_rows = {}", train.batch_tokens,
               config.data.document_rows);
    row = train.batch_tokens / config.data.document_rows;
    row_name = fmt::format("the row length {} (train.batch_tokens / data.document_rows)", row);
  }
  if (config.model.positions == PositionKind::learned) {
    check.that(row <= config.model.max_positions, "model.max_positions = {} is too small for {}", config.model.max_positions,
               row_name);
  }
  if (train.micro_batch_tokens == 0) return;
  check.that(train.micro_batch_tokens % row == 0, "train.micro_batch_tokens = {} must be a multiple of {}",
             train.micro_batch_tokens, row_name);
  check.that(train.batch_tokens % train.micro_batch_tokens == 0,
             "train.batch_tokens = {} must be a multiple of train.micro_batch_tokens = {}", train.batch_tokens,
             train.micro_batch_tokens);
}

void check_optim(const Check& check, const Config& config) {
  const Config::Optim& optim = config.optim;
  for (const auto& [name, group] : {std::pair<const char*, const Config::Group*>{"embedding", &optim.embedding},
                                    {"position", &optim.position},
                                    {"head", &optim.head},
                                    {"vector", &optim.vector}}) {
    check.that(group->optimizer == OptimizerKind::adamw, "optim.{}.optimizer = muon: Muon is for hidden matrices, optim.matrix",
               name);
  }
  // One matrix has one optimizer: values for the head that would do nothing are refused instead of dropped.
  check.that(!config.model.tied_head || optim.head == Config::Group{} || optim.head == optim.embedding,
             "optim.head differs from optim.embedding, but with model.tied_head they are one matrix: remove optim.head or repeat "
             "optim.embedding's values there");
}

void check_schedule(const Check& check, const Config::Schedule& schedule) {
  const int64_t lr_steps = int64_t{schedule.lr.warmup_steps} + schedule.lr.cooldown_steps;
  check.that(lr_steps <= schedule.steps,
             "schedule.lr.warmup_steps + schedule.lr.cooldown_steps = {} must not exceed schedule.steps = {}", lr_steps,
             schedule.steps);
  check.that(schedule.lr.shape != DecayShape::constant || schedule.lr.cooldown_steps == 0,
             "schedule.lr.cooldown_steps = {} has no effect with schedule.lr.shape = constant: name a shape, or set it to 0",
             schedule.lr.cooldown_steps);
  const int64_t momentum_steps = int64_t{schedule.momentum.warmup_steps} + schedule.momentum.cooldown_steps;
  check.that(momentum_steps <= schedule.steps,
             "schedule.momentum.warmup_steps + schedule.momentum.cooldown_steps = {} must not exceed schedule.steps = {}",
             momentum_steps, schedule.steps);
  constexpr double kMaxSteps = 1e9;
  check.that(schedule.steps * schedule.scale <= kMaxSteps, "schedule.steps = {} times schedule.scale = {} is more than {} steps",
             schedule.steps, schedule.scale, kMaxSteps);
}

void check_run(const Check& check, const Config::Run& run) {
  check.that(!run.dir.empty(), "run.dir is empty: name a folder, for example runs, or . for the working directory");
  check.that(std::none_of(run.name.begin(), run.name.end(), is_control),
             "run.name holds control characters; expected the name of a folder");
  check.that(run.name != "." && run.name != ".." && run.name.find('/') == std::string::npos,
             "run.name = {} must be the name of one folder; the folder it is made in is run.dir", run.name);
}

}  // namespace

void validate(const Config& config, const std::string& source) {
  const Check check(source);
  check_model(check, config.model);
  check_batch(check, config);
  check_optim(check, config);
  check_schedule(check, config.schedule);
  check_run(check, config.run);
}

void validate_for_cuda(const Config& config, const std::string& source) {
  const Check check(source);
  const Config::Model& model = config.model;
  check.that(
      model.head_size() == 64 || model.head_size() == 128,
      "the CUDA device has attention for head sizes 64 and 128; model.width / model.num_heads = {} / {} is {} (train.device = cpu "
      "takes any)",
      model.width, model.num_heads, model.head_size());
  constexpr int kVectorChannels = 8;  // 16 bytes of BF16
  check.that(model.mlp_hidden % kVectorChannels == 0, "the CUDA device needs model.mlp_hidden = {} to be a multiple of {}",
             model.mlp_hidden, kVectorChannels);
  check.that(model.padded_vocab_size() % kVectorChannels == 0,
             "the CUDA device needs a padded vocabulary that is a multiple of {}; model.vocab_padding = {} makes {}",
             kVectorChannels, model.vocab_padding, model.padded_vocab_size());
}

}  // namespace speedrun
