#include "src/config/config_fields.h"

#include <fmt/format.h>

#include <charconv>
#include <set>

namespace speedrun {
namespace {

// Texts of the enumerators, in the order of their declarations in config.h.
using Names = std::vector<std::string_view>;
template <class Enum>
const Names enum_names;
template <>
const Names enum_names<NormKind> = {"layernorm", "rmsnorm"};
template <>
const Names enum_names<PositionKind> = {"learned", "rotary"};
template <>
const Names enum_names<ActivationKind> = {"gelu", "relu2"};
template <>
const Names enum_names<SoftcapKind> = {"none", "rational", "sigmoid"};
template <>
const Names enum_names<InitKind> = {"gpt2", "zero_projections"};
template <>
const Names enum_names<ReaderKind> = {"rows", "documents"};
template <>
const Names enum_names<ReductionKind> = {"mean", "sum"};
template <>
const Names enum_names<OptimizerKind> = {"adamw", "muon"};
template <>
const Names enum_names<DecayShape> = {"constant", "linear", "cosine", "power"};
template <>
const Names enum_names<MasterKind> = {"nearest", "truncated", "none"};
template <>
const Names enum_names<StateDType> = {"f32", "bf16"};
template <>
const Names enum_names<DeviceChoice> = {"auto", "cpu", "cuda"};
template <>
const Names enum_names<WindowKind> = {"full", "short", "long"};

constexpr double kMaxCount = 1e9;
constexpr double kMaxTokens = 1e15;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Range kPositive{0, kInfinity, true};
constexpr Range kNotNegative{0, kInfinity};
constexpr Range kFraction{0, 1};
constexpr Range kSteps{0, kMaxCount};

class Table {
 public:
  template <class T>
  void add(const std::string& key, T& member, const Range& range, std::string_view help) {
    fields_.push_back({key, &member, range, help});
  }
  void add(const std::string& key, bool& member, std::string_view help) { fields_.push_back({key, &member, {}, help}); }
  void add(const std::string& key, NumberRows& member, std::string_view help) { fields_.push_back({key, &member, {}, help}); }
  void add(const std::string& key, std::string& member, TextKind kind, std::string_view help) {
    fields_.push_back({key, TextMember{&member, kind}, {}, help});
  }
  template <class Enum>
  void add(const std::string& key, Enum& member, std::string_view help) {
    EnumMember erased{&member, &enum_names<Enum>,
                      [](const void* from) { return static_cast<int>(*static_cast<const Enum*>(from)); },
                      [](void* to, int value) { *static_cast<Enum*>(to) = static_cast<Enum>(value); }};
    fields_.push_back({key, erased, {}, help});
  }
  void append(std::vector<Field> more) { fields_.insert(fields_.end(), more.begin(), more.end()); }
  std::vector<Field> take() { return std::move(fields_); }

 private:
  std::vector<Field> fields_;
};

void add_model(Table& f, Config::Model& c) {
  f.add("model.vocab_size", c.vocab_size, Range{258, 65536},
        "token ids: 256 bytes, the first merges of GPT-2, end of text (the last)");
  f.add("model.vocab_padding", c.vocab_padding, Range{1, 65536}, "rows of embedding and head are rounded up to a multiple of this");
  f.add("model.num_layers", c.num_layers, Range{1, 1024}, "transformer layers");
  f.add("model.width", c.width, Range{2, 65536}, "channels of the residual stream");
  f.add("model.num_heads", c.num_heads, Range{1, 1024}, "attention heads; the head size is width / num_heads");
  f.add("model.mlp_hidden", c.mlp_hidden, Range{1, 262144}, "hidden channels of the MLP");
  f.add("model.max_positions", c.max_positions, Range{1, 1 << 24}, "rows of the learned position table");
  f.add("model.norm", c.norm, "norm of the residual stream");
  f.add("model.norm_gain", c.norm_gain, "norms have learned gains (layernorm with model.bias: and shifts)");
  f.add("model.norm_eps", c.norm_eps, kPositive, "added to the variance or mean square under the root");
  f.add("model.embedding_norm", c.embedding_norm, "norm between embedding and first layer");
  f.add("model.positions", c.positions, "how the model knows positions");
  f.add("model.rotary_base", c.rotary_base, Range{1, kInfinity, true}, "rotary frequencies run from 1 to 1/rotary_base");
  f.add("model.rotary_fraction", c.rotary_fraction, Range{0, 1, true}, "fraction of the head's channels that rotates");
  f.add("model.qk_norm", c.qk_norm, "RMS norm of queries and keys per head");
  f.add("model.attention_scale", c.attention_scale, kNotNegative, "factor of the scores; 0: 1/sqrt(head size)");
  f.add("model.activation", c.activation, "activation of the MLP");
  f.add("model.bias", c.bias, "biases in all linear layers but the head");
  f.add("model.tied_head", c.tied_head, "the head uses the embedding's matrix");
  f.add("model.head_bias", c.head_bias, "bias of the head");
  f.add("model.softcap", c.softcap, "soft-cap of the logits; rational: c·z/√(z²+c²), sigmoid: 23·σ((z+5)/7.5)");
  f.add("model.softcap_value", c.softcap_value, kPositive, "c of the rational soft-cap");
  f.add("model.window_short", c.window_short, Range{0, kMaxCount},
        "tokens a query sees behind itself in a short-window layer; 0: all");
  f.add("model.window_long", c.window_long, Range{0, kMaxCount}, "the same in a long-window layer; 0: all");
  f.add("model.init", c.init, "initial weights; zero_projections: output projections and head start at 0");
  for (auto& [index, layer] : c.layers) f.append(layer_fields(layer, std::to_string(index)));
}

void add_data(Table& f, Config::Data& c) {
  f.add("data.train", c.train, TextKind::file, "training shards: a file or a pattern with *");
  f.add("data.val", c.val, TextKind::file, "validation shards");
  f.add("data.reader", c.reader, "rows: the stream cut into rows; documents: rows of whole documents");
  f.add("data.repeat", c.repeat, Range{1, kMaxCount}, "passes over the training shards, one after the other");
  f.add("data.max_seq_len", c.max_seq_len, Range{1, 1 << 24}, "documents reader: longer documents are cut");
  f.add("data.document_rows", c.document_rows, Range{1, 65536}, "documents reader: rows of a step, on any number of ranks");
  f.add("data.vocabulary", c.vocabulary, TextKind::file, "folder with GPT-2's vocab.bpe and encoder.json");
}

void add_train(Table& f, Config::Train& c) {
  f.add("train.batch_tokens", c.batch_tokens, Range{1, kMaxTokens}, "tokens of one step, all ranks together");
  f.add("train.micro_batch_tokens", c.micro_batch_tokens, Range{0, kMaxTokens},
        "tokens of one forward and backward on one rank; 0: as many as memory allows");
  f.add("train.seq_len", c.seq_len, Range{1, 1 << 24}, "tokens of a row");
  f.add("train.reduction", c.reduction, "loss of a step: mean or sum over its tokens");
  f.add("train.grad_clip", c.grad_clip, kNotNegative, "largest L2 norm of the whole gradient; 0: off");
  f.add("train.seed", c.seed, kNotNegative, "seed of everything random");
  f.add("train.target_loss", c.target_loss, kPositive, "validation loss to reach, nats per token");
  f.add("train.stop_at_target", c.stop_at_target, "stop at the first validation at or below the target");
  f.add("train.device", c.device, "auto: CUDA if there is a GPU");
  f.add("train.device_ordinal", c.device_ordinal, Range{0, 1023}, "which GPU");
  f.add("train.threads", c.threads, Range{0, 1024}, "CPU threads; 0: all");
  f.add("train.init_weights", c.init_weights, TextKind::file,
        "safetensors file with the initial weights; empty: drawn from the seed");
  f.add("train.logits_chunk_tokens", c.logits_chunk_tokens, Range{0, kMaxTokens},
        "tokens whose logits are in memory at once; 0: chosen by the memory plan");
  f.add("train.log_every", c.log_every, Range{1, kMaxCount}, "steps between two lines of the log");
}

void add_eval(Table& f, Config::Eval& c) {
  f.add("eval.every", c.every, kSteps, "steps between two validations; 0: only at the end");
  f.add("eval.dense_every", c.dense_every, kSteps, "the same from eval.dense_from on; 0: no difference");
  f.add("eval.dense_from", c.dense_from, kFraction, "fraction of the steps after which eval.dense_every counts too");
  f.add("eval.tokens", c.tokens, Range{1, kMaxTokens}, "predictions of one validation, from the start of the validation stream");
  f.add("eval.at_start", c.at_start, "validate before the first step");
}

void add_checkpoint(Table& f, Config::Checkpoint& c) {
  f.add("checkpoint.every", c.every, kSteps, "steps between two checkpoints; 0: none on the way");
  f.add("checkpoint.keep", c.keep, Range{1, kMaxCount}, "how many of the newest are kept");
  f.add("checkpoint.at_end", c.at_end, "checkpoint after the last step");
}

void add_run(Table& f, Config::Run& c) {
  f.add("run.dir", c.dir, TextKind::plain, "folder of the runs, relative to the working directory");
  f.add("run.name", c.name, TextKind::plain, "folder of this run in it; empty: date, time and name of the config");
}

void add_group(Table& f, const std::string& name, Config::Group& c) {
  const std::string at = "optim." + name + ".";
  f.add(at + "optimizer", c.optimizer, "muon: hidden matrices only");
  f.add(at + "lr", c.lr, kNotNegative, "peak learning rate");
  f.add(at + "lr_multiplier", c.lr_multiplier, kNotNegative, "factor of lr");
  f.add(at + "beta1", c.beta1, Range{0, 0.999999999}, "AdamW: decay of the mean gradient");
  f.add(at + "beta2", c.beta2, Range{0, 0.999999999}, "AdamW: decay of the mean square");
  f.add(at + "eps", c.eps, kPositive, "AdamW: added to the root");
  f.add(at + "weight_decay", c.weight_decay, kNotNegative, "decoupled weight decay, per unit of learning rate");
  f.add(at + "weight_decay_multiplier", c.weight_decay_multiplier, kNotNegative, "factor of weight_decay");
  f.add(at + "every", c.every, Range{1, kMaxCount}, "update in every n-th step, with the gradients summed in between");
  f.add(at + "master", c.master, "how the BF16 weight and its FP32 master share 32 bits; none: BF16 alone");
  f.add(at + "state", c.state, "number type of the optimizer's state");
}

void add_optim(Table& f, Config::Optim& c) {
  add_group(f, "embedding", c.embedding);
  add_group(f, "position", c.position);
  add_group(f, "head", c.head);
  add_group(f, "matrix", c.matrix);
  add_group(f, "vector", c.vector);
  f.add("optim.muon.momentum", c.muon.momentum, Range{0, 0.999999999}, "decay of the gradient average");
  f.add("optim.muon.nesterov", c.muon.nesterov, "Nesterov momentum");
  f.add("optim.muon.iterations", c.muon.iterations, Range{1, 100}, "Newton-Schulz iterations");
  f.add("optim.muon.coefficients", c.muon.coefficients,
        "rows [a, b, c] of X <- aX + (bA + cA²)X with A = XXᵀ, one for each iteration; the last one repeats");
  f.add("optim.muon.eps", c.muon.eps, kPositive, "added to the norm that X is divided by");
  f.add("optim.muon.norm_margin", c.muon.norm_margin, kPositive, "factor of the norm that X is divided by");
}

void add_schedule(Table& f, Config::Schedule& c) {
  f.add("schedule.steps", c.steps, kSteps, "training steps");
  f.add("schedule.scale", c.scale, Range{0, 1e6, true}, "multiplies every step count of the schedule");
  f.add("schedule.lr.warmup_steps", c.lr.warmup_steps, kSteps, "learning-rate factor (s + 1) / warmup_steps in these first steps");
  f.add("schedule.lr.shape", c.lr.shape, "how the factor falls in the cool-down");
  f.add("schedule.lr.cooldown_steps", c.lr.cooldown_steps, kSteps,
        "last steps, in which the factor falls; 0: all after the warm-up");
  f.add("schedule.lr.final_fraction", c.lr.final_fraction, kFraction, "factor that the fall ends at, one step after the last");
  f.add("schedule.lr.power", c.lr.power, Range{0, 100, true}, "exponent of shape power");
  f.add("schedule.momentum.start", c.momentum.start, Range{0, 0.999999999}, "Muon's momentum in step 0 if there is a warm-up");
  f.add("schedule.momentum.warmup_steps", c.momentum.warmup_steps, kSteps, "steps from start to optim.muon.momentum; 0: none");
  f.add("schedule.momentum.final", c.momentum.final, Range{0, 0.999999999}, "Muon's momentum that a cool-down ends at");
  f.add("schedule.momentum.cooldown_steps", c.momentum.cooldown_steps, kSteps,
        "last steps, from optim.muon.momentum to final; 0: none");
}

constexpr std::string_view kLayers = "model.layers.";

// 7 of "model.layers.7" and of "model.layers.7.window". Not of "model.layers.07": a layer has one name.
std::optional<int> layer_index(std::string_view key) {
  if (!key.starts_with(kLayers)) return std::nullopt;
  const std::string digits(key.substr(kLayers.size(), key.find('.', kLayers.size()) - kLayers.size()));
  int index = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (index < 0 || digits != std::to_string(index)) return std::nullopt;
  return index;
}

std::string number_text(double value) {
  if (value == static_cast<double>(static_cast<int64_t>(value))) return std::to_string(static_cast<int64_t>(value));
  return fmt::format("{}", value);
}

}  // namespace

std::vector<Field> layer_fields(Config::Model::Layer& layer, const std::string& index) {
  Table table;
  table.add(std::string(kLayers) + index + ".window", layer.window, "which keys the layer's queries see");
  return table.take();
}

std::vector<Field> config_fields(Config& config) {
  Table table;
  add_model(table, config.model);
  add_data(table, config.data);
  add_train(table, config.train);
  add_eval(table, config.eval);
  add_checkpoint(table, config.checkpoint);
  add_run(table, config.run);
  add_optim(table, config.optim);
  add_schedule(table, config.schedule);
  return table.take();
}

FieldIndex::FieldIndex(Config& config) : config_(config) {
  for (Field& field : config_fields(config)) fields_.emplace(field.key, field);
}

std::optional<Field> FieldIndex::find(const std::string& key) {
  if (const auto found = fields_.find(key); found != fields_.end()) return found->second;
  const std::optional<int> layer = layer_index(key);
  if (!layer) return std::nullopt;
  Config::Model::Layer probe;
  for (const Field& known : layer_fields(probe, std::to_string(*layer))) {
    if (known.key != key) continue;
    for (Field& field : layer_fields(config_.model.layers[*layer], std::to_string(*layer))) fields_.emplace(field.key, field);
    return fields_.at(key);
  }
  return std::nullopt;
}

bool FieldIndex::is_group(const std::string& key) const {
  const auto after = fields_.upper_bound(key + ".");
  if (after != fields_.end() && after->first.starts_with(key + ".")) return true;
  return key + "." == kLayers || key == std::string(kLayers) + std::to_string(layer_index(key).value_or(-1));
}

std::vector<std::string> FieldIndex::keys(const std::string& like, bool with_groups) const {
  int layer = 0;
  if (const size_t digit = like.find_first_of("0123456789"); digit != std::string::npos) {
    std::from_chars(like.data() + digit, like.data() + like.size(), layer);
  }
  std::set<std::string> keys;
  for (const auto& [key, field] : fields_) keys.insert(key);
  Config::Model::Layer probe;
  for (const Field& field : layer_fields(probe, std::to_string(layer))) keys.insert(field.key);
  if (!with_groups) return {keys.begin(), keys.end()};
  std::set<std::string> groups;
  for (const std::string& key : keys) {
    for (size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', dot + 1)) groups.insert(key.substr(0, dot));
  }
  keys.merge(groups);
  return {keys.begin(), keys.end()};
}

std::string type_name(const Field& field) {
  struct Namer {
    std::string operator()(const bool*) const { return "bool"; }
    std::string operator()(const int*) const { return "int"; }
    std::string operator()(const int64_t*) const { return "int"; }
    std::string operator()(const uint64_t*) const { return "int"; }
    std::string operator()(const double*) const { return "number"; }
    std::string operator()(const TextMember& text) const { return text.kind == TextKind::file ? "path" : "string"; }
    std::string operator()(const EnumMember&) const { return "name"; }
    std::string operator()(const NumberRows*) const { return "list"; }
  };
  return std::visit(Namer{}, field.member);
}

std::string range_text(const Field& field) {
  if (const EnumMember* names = std::get_if<EnumMember>(&field.member)) return fmt::format("{}", fmt::join(*names->names, ", "));
  if (std::holds_alternative<NumberRows*>(field.member)) return "lists of 3 numbers";
  const Range& range = field.range;
  const bool has_min = range.min > -kInfinity, has_max = range.max < kInfinity;
  if (range.above_min) {
    const std::string above = "> " + number_text(range.min);
    return has_max ? above + ", <= " + number_text(range.max) : above;
  }
  if (has_min && has_max) return number_text(range.min) + ".." + number_text(range.max);
  if (has_min) return ">= " + number_text(range.min);
  if (has_max) return "<= " + number_text(range.max);
  return "";
}

}  // namespace speedrun
