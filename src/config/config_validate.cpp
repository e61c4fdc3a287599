// Combinations of keys that cannot be trained. Types and ranges of single keys are checked where they are read.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <vector>

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

void check_windows(const Check& check, int window_short, int window_long, const std::string& at) {
  check.that(window_short == 0 || window_long == 0 || window_short <= window_long,
             "{}window_short = {} must not exceed {}window_long = {}", at, window_short, at, window_long);
}

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
  check_windows(check, model.window_short, model.window_long, "model.");
  check.that(!model.tied_head || model.init != InitKind::zero_projections,
             "model.init = zero_projections starts the head at 0, which a tied head cannot do: set model.tied_head to false");
  if (!model.layers.empty()) {
    const int last = model.layers.rbegin()->first;
    check.that(last < model.num_layers, "model.layers.{} does not exist: model.num_layers is {}, the last layer is {}", last,
               model.num_layers, model.num_layers - 1);
  }
}

// Keys that one architecture alone has; a key that ends with a point stands for its whole group.
constexpr std::string_view kMainTrackKeys[] = {"model.smear",
                                               "model.smear_channels",
                                               "model.bigram_rows",
                                               "model.bigram_sign_rows",
                                               "model.value_gate_channels",
                                               "model.x0_injection",
                                               "model.residual_lambdas",
                                               "model.weight_lambdas",
                                               "model.mudd_gates",
                                               "model.mudd_gate_split",
                                               "model.mudd",
                                               "model.mudd_early",
                                               "model.mudd_late",
                                               "model.gate_hidden",
                                               "model.dc_window",
                                               "model.tied_until_split",
                                               "model.yarn",
                                               "optim.down.",
                                               "optim.bigram.",
                                               "optim.value_embedding.",
                                               "optim.scalar.",
                                               "optim.smear.",
                                               "optim.value_gate.",
                                               "optim.resid_lambda.",
                                               "optim.post_lambda.",
                                               "optim.mudd.",
                                               "optim.mudd_gate.",
                                               "schedule.split_step",
                                               "fp8."};
constexpr std::string_view kGptKeys[] = {"model.max_positions", "optim.position.", "optim.vector."};

// Values for the other architecture would do nothing: they are refused instead of dropped.
void check_architecture_keys(const Check& check, const Config& config) {
  const bool gpt = config.model.architecture == Architecture::gpt;
  const std::span<const std::string_view> foreign = gpt ? std::span<const std::string_view>(kMainTrackKeys) : kGptKeys;
  for (const KeyChange& change : changed_keys(Config{}, config)) {
    const std::string& key = change.key;
    const bool indexed_feature = gpt && ((key.starts_with("model.layers.") && !key.ends_with(".window")) ||
                                         (key.starts_with("schedule.stages.") && key.find(".prefix_") != std::string::npos));
    const bool is_foreign = std::any_of(foreign.begin(), foreign.end(), [&](std::string_view other) {
      return other.ends_with('.') ? key.starts_with(other) : key == other;
    });
    check.that(!indexed_feature && !is_foreign, "{} = {} needs model.architecture = {}; here it is {}", key, change.after,
               gpt ? "main_track" : "gpt", gpt ? "gpt" : "main_track");
  }
}

void check_main_track_layer(const Check& check, const Config::Model& model, int index, const Config::Model::Layer& layer) {
  const std::string at = fmt::format("model.layers.{}", index);
  const auto excludes = [&](bool feature, const char* name, bool other, const char* other_name) {
    check.that(!feature || !other, "{}.{} and {}.{} exclude each other", at, name, at, other_name);
  };
  for (const auto& [used, name] : {std::pair(layer.paired_heads, "paired_heads"), std::pair(layer.key_offset, "key_offset"),
                                   std::pair(layer.value_embedding, "value_embedding"), std::pair(layer.xsa, "xsa"),
                                   std::pair(layer.gate, "gate"), std::pair(layer.dc, "dc")}) {
    check.that(layer.attention || !used, "{}.{} = true needs attention, but {}.attention is false", at, name, at);
  }
  check.that(layer.attention || layer.input_from < 0, "{}.input_from = {} needs attention, but {}.attention is false", at,
             layer.input_from, at);
  check.that(!layer.attention || layer.skip_from < 0,
             "{}.skip_from = {} is for layers without attention: set {}.attention to false", at, layer.skip_from, at);
  for (const auto& [from, name] : {std::pair(layer.input_from, "input_from"), std::pair(layer.skip_from, "skip_from")}) {
    check.that(from < index, "{}.{} = {} must be an earlier layer (or -1: none)", at, name, from);
  }
  check.that(!layer.paired_heads || model.num_heads % 2 == 0,
             "{}.paired_heads = true needs an even number of heads; model.num_heads is {}", at, model.num_heads);
  excludes(layer.paired_heads, "paired_heads", layer.xsa, "xsa");
  excludes(layer.paired_heads, "paired_heads", layer.dc, "dc");
  excludes(layer.paired_heads, "paired_heads", layer.key_offset, "key_offset");
  const int last = model.num_layers - 1;
  check.that(!layer.dc || index == last, "{}.dc = true: only the last layer, {}, can have DC attention", at, last);
}

void check_main_track(const Check& check, const Config& config) {
  const Config::Model& model = config.model;
  for (const auto& [holds, setting] :
       {std::pair(model.norm == NormKind::rmsnorm, "model.norm = rmsnorm"), std::pair(!model.norm_gain, "model.norm_gain = false"),
        std::pair(model.embedding_norm, "model.embedding_norm = true"),
        std::pair(model.positions == PositionKind::rotary, "model.positions = rotary"),
        std::pair(model.rotary_fraction == 0.5, "model.rotary_fraction = 0.5"), std::pair(model.qk_norm, "model.qk_norm = true"),
        std::pair(model.activation == ActivationKind::relu2, "model.activation = relu2"),
        std::pair(!model.bias, "model.bias = false"),
        std::pair(!model.tied_head, "model.tied_head = false (model.tied_until_split ties it)"),
        std::pair(!model.head_bias, "model.head_bias = false"),
        std::pair(model.init == InitKind::zero_projections, "model.init = zero_projections")}) {
    check.that(holds, "model.architecture = main_track needs {}", setting);
  }
  check.that(model.smear_channels <= model.width, "model.smear_channels = {} must not exceed model.width = {}",
             model.smear_channels, model.width);
  check.that(model.value_gate_channels <= model.width, "model.value_gate_channels = {} must not exceed model.width = {}",
             model.value_gate_channels, model.width);
  check.that(model.bigram_rows != 1, "model.bigram_rows = 1 leaves no row for pairs of tokens: at least 2, or 0 for none");
  int shared = -1;  // the layer that others take their attention's input from
  for (const auto& [index, layer] : model.layers) {
    check_main_track_layer(check, model, index, layer);
    if (layer.input_from < 0) continue;
    check.that(shared < 0 || layer.input_from == shared, "model.layers.{}.input_from = {} differs from another layer's, {}", index,
               layer.input_from, shared);
    shared = layer.input_from;
  }

  const int last = model.num_layers - 1;
  check.that(model.mudd_gate_split <= last, "model.mudd_gate_split = {} must be one of the layers 1 to {}", model.mudd_gate_split,
             last);
  if (model.mudd) {
    check.that(model.mudd_early < model.mudd_late && model.mudd_late < last,
               "model.mudd needs mudd_early < mudd_late < last layer; they are {}, {} and {}", model.mudd_early, model.mudd_late,
               last);
    check.that(model.layer(last).attention,
               "model.mudd mixes into the last layer's attention, but model.layers.{}.attention is false", last);
  }
  check.that(config.fp8.backward_scaling != ScalingKind::fixed,
             "fp8.backward_scaling = fixed: nobody knows a bound of these tensors; expected current or delayed");
  if (model.tied_until_split) {
    const Config::Group &embedding = config.optim.embedding, &head = config.optim.head;
    check.that(
        embedding.optimizer == head.optimizer && embedding.every == head.every && embedding.master == head.master &&
            embedding.state == head.state,
        "model.tied_until_split hands the head's weights and state to the embedding: optim.embedding and optim.head must have "
        "the same optimizer, every, master and state");
    check.that(head.every <= 2, "model.tied_until_split needs optim.head.every = 1 or 2, found {}", head.every);
  }
}

// The row length of a step of `batch_tokens`, and its name for messages.
struct Row {
  int64_t tokens;
  std::string name;
};

Row check_rows(const Check& check, const Config& config, int64_t batch_tokens, const std::string& key) {
  if (config.data.reader == ReaderKind::rows) {
    const Row row = {config.train.seq_len, fmt::format("train.seq_len = {}", config.train.seq_len)};
    check.that(batch_tokens % row.tokens == 0, "{} = {} must be a multiple of {}", key, batch_tokens, row.name);
    return row;
  }
  const int document_rows = config.data.document_rows;
  check.that(batch_tokens % document_rows == 0, "{} = {} must be a multiple of data.document_rows = {}", key, batch_tokens,
             document_rows);
  const int64_t tokens = batch_tokens / document_rows;
  return {tokens, fmt::format("the row length {} ({} / data.document_rows)", tokens, key)};
}

std::vector<Row> stage_rows(const Check& check, const Config& config) {
  const Config::Train& train = config.train;
  std::vector<Row> rows;
  for (const auto& [index, stage] : config.schedule.stages) {
    if (stage.steps == 0) continue;
    rows.push_back(stage.batch_tokens == 0
                       ? check_rows(check, config, train.batch_tokens, "train.batch_tokens")
                       : check_rows(check, config, stage.batch_tokens, fmt::format("schedule.stages.{}.batch_tokens", index)));
  }
  if (rows.empty()) rows.push_back(check_rows(check, config, train.batch_tokens, "train.batch_tokens"));
  return rows;
}

void check_batch(const Check& check, const Config& config) {
  const Config::Train& train = config.train;
  const std::vector<Row> rows = stage_rows(check, config);
  const Row eval_row = config.eval.row_tokens == 0
                           ? rows.front()
                           : Row{config.eval.row_tokens, fmt::format("eval.row_tokens = {}", config.eval.row_tokens)};
  check.that(config.eval.tokens % eval_row.tokens == 0, "eval.tokens = {} must be a multiple of {}", config.eval.tokens,
             eval_row.name);
  const Row& longest = *std::max_element(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.tokens < b.tokens; });
  if (config.model.positions == PositionKind::learned) {
    for (const Row& row : {longest, eval_row}) {
      check.that(row.tokens <= config.model.max_positions, "model.max_positions = {} is too small for {}",
                 config.model.max_positions, row.name);
    }
  }
  if (train.micro_batch_tokens == 0) return;
  if (!config.schedule.stages.empty()) {  // each stage takes as many of its rows as fit
    check.that(train.micro_batch_tokens >= longest.tokens, "train.micro_batch_tokens = {} must be at least {}",
               train.micro_batch_tokens, longest.name);
    return;
  }
  check.that(train.micro_batch_tokens % longest.tokens == 0, "train.micro_batch_tokens = {} must be a multiple of {}",
             train.micro_batch_tokens, longest.name);
  check.that(train.batch_tokens % train.micro_batch_tokens == 0,
             "train.batch_tokens = {} must be a multiple of train.micro_batch_tokens = {}", train.batch_tokens,
             train.micro_batch_tokens);
}

void check_optim(const Check& check, const Config& config) {
  const Config::Optim& optim = config.optim;
  for (const auto& [name, group] : {std::pair<const char*, const Config::Group*>{"embedding", &optim.embedding},
                                    {"position", &optim.position},
                                    {"head", &optim.head},
                                    {"vector", &optim.vector},
                                    {"bigram", &optim.bigram},
                                    {"value_embedding", &optim.value_embedding},
                                    {"scalar", &optim.scalar},
                                    {"smear", &optim.smear},
                                    {"value_gate", &optim.value_gate},
                                    {"resid_lambda", &optim.resid_lambda},
                                    {"post_lambda", &optim.post_lambda},
                                    {"mudd", &optim.mudd},
                                    {"mudd_gate", &optim.mudd_gate}}) {
    const bool muon = group->optimizer == OptimizerKind::muon, normuon = group->optimizer == OptimizerKind::normuon;
    check.that(!muon && !normuon, "optim.{}.optimizer = {}: Muon is for hidden matrices, optim.matrix and optim.down", name,
               muon ? "muon" : "normuon");
  }
  // One matrix has one optimizer: values for the head that would do nothing are refused instead of dropped.
  check.that(!config.model.tied_head || optim.head == Config::Group{} || optim.head == optim.embedding,
             "optim.head differs from optim.embedding, but with model.tied_head they are one matrix: remove optim.head or repeat "
             "optim.embedding's values there");
}

// Steps of the run without schedule.scale, and how messages call them.
struct Steps {
  int64_t count;
  std::string name;
};

Steps check_stages(const Check& check, const Config& config) {
  const Config::Schedule& schedule = config.schedule;
  const auto or_else = [](int value, int without_stages) { return value != 0 ? value : without_stages; };
  int64_t steps = 0;
  int expected = 0;
  int window_short = 0, window_long = 0;  // of the last stage
  for (const auto& [index, stage] : schedule.stages) {
    const std::string at = fmt::format("schedule.stages.{}.", index);
    check.that(index == expected, "schedule.stages.{} is missing: stages are numbered from 0 without gaps", expected);
    ++expected;
    steps += stage.steps;
    const size_t terms = stage.mtp_start.size();
    check.that(terms >= 1 && terms <= 3, "{}mtp_start has {} numbers; expected 1 to 3", at, terms);
    check.that(stage.mtp_end.size() == terms, "{}mtp_start and {}mtp_end must be of the same length; they have {} and {} numbers",
               at, at, terms, stage.mtp_end.size());
    const bool one_term = std::all_of(stage.mtp_start.begin() + 1, stage.mtp_start.end(), [](double w) { return w == 0; }) &&
                          std::all_of(stage.mtp_end.begin() + 1, stage.mtp_end.end(), [](double w) { return w == 0; });
    check.that(!one_term || stage.prefix_start != 0 || stage.prefix_end != 0 || (stage.mtp_start[0] == 1 && stage.mtp_end[0] == 1),
               "{}mtp_start: the weight of the only term of the loss must be 1 from start to end", at);
    window_short = or_else(stage.window_short, config.model.window_short);
    window_long = or_else(stage.window_long, config.model.window_long);
    check_windows(check, window_short, window_long, at);
    check.that(!config.model.yarn || window_long > 0, "model.yarn follows the long window: set {}window_long", at);
  }
  if (schedule.stages.empty()) return {schedule.steps, fmt::format("schedule.steps = {}", schedule.steps)};
  check.that(steps > 0, "the stages of the schedule have no steps: set schedule.stages.0.steps");
  check.that(schedule.steps == 0 || schedule.steps == steps,
             "schedule.steps = {} is not the sum of the stages' steps, {}: set it to 0, and change the stages or schedule.scale",
             schedule.steps, steps);
  check_windows(check, or_else(config.eval.final_window_short, window_short), or_else(config.eval.final_window_long, window_long),
                "eval.final_");
  return {steps, fmt::format("the sum of the stages' steps = {}", steps)};
}

void check_schedule(const Check& check, const Config::Schedule& schedule, const Steps& run_steps) {
  const auto& [steps, run] = run_steps;
  const int64_t lr_steps = int64_t{schedule.lr.warmup_steps} + schedule.lr.cooldown_steps + schedule.lr.hold_steps;
  check.that(lr_steps <= steps, "schedule.lr.warmup_steps + schedule.lr.cooldown_steps{} = {} must not exceed {}",
             schedule.lr.hold_steps > 0 ? " + schedule.lr.hold_steps" : "", lr_steps, run);
  for (const auto& [count, name] :
       {std::pair(schedule.lr.cooldown_steps, "cooldown_steps"), std::pair(schedule.lr.hold_steps, "hold_steps")}) {
    check.that(schedule.lr.shape != DecayShape::constant || count == 0,
               "schedule.lr.{} = {} has no effect with schedule.lr.shape = constant: name a shape, or set it to 0", name, count);
  }
  const int64_t momentum_steps = int64_t{schedule.momentum.warmup_steps} + schedule.momentum.cooldown_steps;
  check.that(momentum_steps <= steps, "schedule.momentum.warmup_steps + schedule.momentum.cooldown_steps = {} must not exceed {}",
             momentum_steps, run);
  constexpr double kMaxSteps = 1e9;
  check.that(static_cast<double>(steps) * schedule.scale <= kMaxSteps, "{} times schedule.scale = {} is more than {} steps", run,
             schedule.scale, kMaxSteps);
  if (schedule.split_step == 0) return;
  check.that(schedule.split_step < steps, "schedule.split_step = {} must be below {}", schedule.split_step, run);
  check.that(schedule.split_step % 2 == 1, "schedule.split_step = {} must be odd: head and embedding are updated in odd steps",
             schedule.split_step);
}

void check_extrapolation(const Check& check, const Config& config, const Steps& steps) {
  const Config::Extrapolation& keys = config.extrapolation;
  if (keys.method == ExtrapolationKind::none) return;
  for (const auto& [updates, name] : {std::pair(keys.start, "start"), std::pair(keys.stop, "stop")})
    check.that(updates <= steps.count, "extrapolation.{} = {} must not exceed {}", name, updates, steps.name);
  const int64_t last = keys.stop == 0 ? steps.count : keys.stop;
  const std::string span = fmt::format("extrapolation.start = {} and {}", keys.start,
                                       keys.stop == 0 ? steps.name : fmt::format("extrapolation.stop = {}", keys.stop));
  check.that(!keys.reset_momentum || keys.apply == ExtrapolationApply::weights,
             "extrapolation.reset_momentum = true needs extrapolation.apply = weights: a read-out leaves training alone");
  const Config::Schedule& schedule = config.schedule;
  const bool split_within = config.model.tied_until_split && schedule.split_step >= keys.start && schedule.split_step < last;
  check.that(
      keys.parameters != ExtrapolatedParameters::all || schedule.split_step == 0 || !split_within,
      "extrapolation.parameters = all: at schedule.split_step = {}, between {}, the embedding becomes the head's copy, which "
      "no history goes through: choose all_but_tables, or start after the split",
      schedule.split_step, span);
  if (keys.averages()) {
    check.that(keys.start < last, "{} leave nothing to average: start must be smaller", span);
    return;
  }
  const int least = keys.method == ExtrapolationKind::linear ? 2 : 3;
  check.that(keys.history >= least, "extrapolation.history = {} is too short for this extrapolation.method: at least {} snapshots",
             keys.history, least);
  check.that(keys.every % keys.snapshot_every == 0,
             "extrapolation.every = {} must be a multiple of extrapolation.snapshot_every = {}: a jump starts from a snapshot",
             keys.every, keys.snapshot_every);
  const int64_t first_jump = keys.first_jump(keys.start);
  check.that(first_jump <= last,
             "{} leave no room for a jump: extrapolation.history = {} snapshots are there after update {} at the earliest", span,
             keys.history, first_jump);
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
  check_architecture_keys(check, config);
  if (config.model.architecture == Architecture::main_track) check_main_track(check, config);
  check_batch(check, config);
  check_optim(check, config);
  const Steps steps = check_stages(check, config);
  check_schedule(check, config.schedule, steps);
  check_extrapolation(check, config, steps);
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
  constexpr int kMaxGateHidden = 128;
  check.that(model.gate_hidden % kVectorChannels == 0 && model.gate_hidden <= kMaxGateHidden,
             "the CUDA device needs model.gate_hidden = {} to be a multiple of {} up to {}", model.gate_hidden, kVectorChannels,
             kMaxGateHidden);
  constexpr int kMaxDcHeads = 16;
  const bool dc = std::any_of(model.layers.begin(), model.layers.end(), [](const auto& layer) { return layer.second.dc; });
  check.that(!dc || model.num_heads <= kMaxDcHeads, "the CUDA device has DC attention for up to {} heads; model.num_heads is {}",
             kMaxDcHeads, model.num_heads);
  const Config::Fp8& fp8 = config.fp8;
  if (!fp8.any()) return;
  constexpr int kFp8Channels = 16;  // 16 bytes
  for (const auto& [channels, name] : {std::pair<int64_t, const char*>{model.width, "model.width"},
                                       {model.mlp_hidden, "model.mlp_hidden"},
                                       {model.padded_vocab_size(), "the padded vocabulary"}}) {
    check.that(channels % kFp8Channels == 0, "FP8 on the CUDA device needs multiples of {}; {} is {}", kFp8Channels, name,
               channels);
  }
  if (!fp8.weight_grads()) return;
  for (const Row& row : stage_rows(check, config)) {
    check.that(row.tokens % kFp8Channels == 0,
               "weight gradients in FP8 (fp8.*_grad_weight) on the CUDA device need rows of a multiple of {} tokens; {} is not",
               kFp8Channels, row.name);
  }
}

}  // namespace speedrun
