#include "src/config/config_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
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
const Names enum_names<ReductionKind> = {"mean", "sum", "row_mean"};
template <>
const Names enum_names<OptimizerKind> = {"adamw", "muon", "adam", "normuon"};
template <>
const Names enum_names<Architecture> = {"gpt", "main_track"};
template <>
const Names enum_names<Precision> = {"bf16", "fp8"};
template <>
const Names enum_names<ScalingKind> = {"fixed", "current", "delayed"};
template <>
const Names enum_names<MlpUpKernel> = {"auto", "cublaslt", "fused"};
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
template <>
const Names enum_names<ExtrapolationKind> = {kExtrapolationNames.begin(), kExtrapolationNames.end()};
template <>
const Names enum_names<ExtrapolationApply> = {"weights", "readout"};
template <>
const Names enum_names<ExtrapolatedParameters> = {"matrices", "all", "all_but_tables"};

constexpr double kMaxCount = 1e9;
constexpr double kMaxTokens = 1e15;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Range kPositive{0, kInfinity, true};
constexpr Range kNotNegative{0, kInfinity};
constexpr Range kFraction{0, 1};
constexpr Range kSteps{0, kMaxCount};
constexpr Range kTokensOrNone{0, kMaxCount};

class Table {
 public:
  template <class T>
  void add(const std::string& key, T& member, const Range& range, std::string_view help) {
    fields_.push_back({key, &member, range, help});
  }
  void add(const std::string& key, bool& member, std::string_view help) { fields_.push_back({key, &member, {}, help}); }
  void add(const std::string& key, NumberList& member, const Range& range, std::string_view help) {
    fields_.push_back({key, &member, range, help});
  }
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

constexpr std::string_view kLayers = "model.layers.";
constexpr std::string_view kStages = "schedule.stages.";

std::vector<Field> layer_fields(Config::Model::Layer& c, int index) {
  Table f;
  const std::string at = std::string(kLayers) + std::to_string(index) + ".";
  constexpr Range kLayer{-1, 1023};
  f.add(at + "window", c.window, "which keys the layer's queries see");
  f.add(at + "attention", c.attention, "the layer has an attention sublayer");
  f.add(at + "paired_heads", c.paired_heads, "heads h and h + num_heads / 2 interleaved along time; windows count half tokens");
  f.add(at + "key_offset", c.key_offset, "the half of the keys that does not rotate moves one position forward");
  f.add(at + "value_embedding", c.value_embedding, "values get a gated embedding of their token");
  f.add(at + "xsa", c.xsa, "attention output loses a part of what lies along the token's own value");
  f.add(at + "gate", c.gate, "attention output of each head is gated");
  f.add(at + "dc", c.dc, "adds an attention over few keys whose weights are mixed over heads");
  f.add(at + "input_from", c.input_from, kLayer, "attention reads the stream that left this layer; -1: the one that enters");
  f.add(at + "skip_from", c.skip_from, kLayer, "without attention: the stream that left this layer joins, gated; -1: none");
  return f.take();
}

std::vector<Field> stage_fields(Config::Schedule::Stage& c, int index) {
  Table f;
  const std::string at = std::string(kStages) + std::to_string(index) + ".";
  f.add(at + "steps", c.steps, kSteps, "training steps of the stage; 0: it is left out");
  f.add(at + "batch_tokens", c.batch_tokens, Range{0, kMaxTokens}, "tokens of one step; 0: train.batch_tokens");
  f.add(at + "max_seq_len", c.max_seq_len, Range{0, 1 << 24}, "longer documents are cut; 0: data.max_seq_len");
  f.add(at + "window_short", c.window_short, kTokensOrNone, "short window; 0: model.window_short");
  f.add(at + "window_long", c.window_long, kTokensOrNone, "long window; 0: model.window_long");
  f.add(at + "lr_multiplier", c.lr_multiplier, kNotNegative, "factor of the learning rates before and while they fall");
  f.add(at + "mtp_start", c.mtp_start, kNotNegative,
        "loss weights of the next token, the one after it, …, in the stage's first step");
  f.add(at + "mtp_end", c.mtp_end, kNotNegative, "the same in the first step behind the stage; linear in between");
  f.add(at + "prefix_start", c.prefix_start, kNotNegative,
        "loss weight of the token spelled by the longest prefix of the next one, in the stage's first step");
  f.add(at + "prefix_end", c.prefix_end, kNotNegative, "the same in the first step behind the stage");
  return f.take();
}

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
  f.add("model.window_short", c.window_short, kTokensOrNone, "tokens a query sees behind itself in a short-window layer; 0: all");
  f.add("model.window_long", c.window_long, kTokensOrNone, "the same in a long-window layer; 0: all");
  f.add("model.init", c.init, "initial weights; zero_projections: output projections and head start at 0");
}

// The rest of the model's keys: for architecture main_track alone.
void add_main_track(Table& f, Config::Model& c) {
  f.add("model.architecture", c.architecture, "gpt: GPT-2 and its relatives; main_track: the model of the Main Track's record #89");
  f.add("model.smear", c.smear, "a gated part of the previous token's embedding joins a token's");
  f.add("model.smear_channels", c.smear_channels, Range{1, 65536}, "channels of the embedding that the smear gate looks at");
  f.add("model.bigram_rows", c.bigram_rows, Range{0, (1LL << 31) - 1}, "rows of the hashed bigram table; 0: none");
  f.add("model.bigram_sign_rows", c.bigram_sign_rows, Range{0, kMaxCount}, "rows of the bigrams' fixed table of signs; 0: none");
  f.add("model.value_gate_channels", c.value_gate_channels, Range{1, 65536},
        "channels of the attention input, and as many of the value embedding, that a value gate looks at");
  f.add("model.x0_injection", c.x0_injection, "the embedding, gated, joins the stream in every attention sublayer");
  f.add("model.residual_lambdas", c.residual_lambdas, "learned factors of stream and sublayer; else √1.1 and 1");
  f.add("model.weight_lambdas", c.weight_lambdas, "learned factors of the QKV and the output weights; else 1");
  f.add("model.mudd_gates", c.mudd_gates, "gates are computed for each token; else they are learned constants");
  f.add("model.mudd_gate_split", c.mudd_gate_split, Range{1, 1023},
        "layers before this one take their gates from the embedding, the others from the stream that enters this layer");
  f.add("model.mudd", c.mudd, "per-token mixing of earlier streams into the last layer and behind it");
  f.add("model.mudd_early", c.mudd_early, Range{0, 1023}, "mudd: layer whose output joins behind the last one");
  f.add("model.mudd_late", c.mudd_late, Range{0, 1023}, "mudd: layer whose output joins the last layer's values and stream");
  f.add("model.gate_hidden", c.gate_hidden, Range{1, 65536}, "hidden channels of the nets behind mudd_gates and mudd");
  f.add("model.dc_window", c.dc_window, Range{1, 256}, "keys that a query of DC attention sees, its own included");
  f.add("model.tied_until_split", c.tied_until_split, "head and embedding are one matrix up to step schedule.split_step");
  f.add("model.yarn", c.yarn, "rotary frequencies and attention scale follow the long window from stage to stage");
  for (auto& [index, layer] : c.layers) f.append(layer_fields(layer, index));
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
  f.add("train.reduction", c.reduction, "loss of a step: mean or sum over its tokens; row_mean: the mean of its rows' sums");
  f.add("train.grad_clip", c.grad_clip, kNotNegative, "largest L2 norm of the whole gradient; 0: off");
  f.add("train.seed", c.seed, kNotNegative, "seed of everything random");
  f.add("train.target_loss", c.target_loss, kPositive, "validation loss to reach, nats per token");
  f.add("train.stop_at_target", c.stop_at_target, "stop at the first validation at or below the target");
  f.add("train.stop_step", c.stop_step, Range{0, kMaxCount},
        "end after so many steps, with validation and checkpoint, and nothing else of the schedule changed; 0: with the schedule");
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
  f.add("eval.row_tokens", c.row_tokens, Range{0, 1 << 24},
        "length of a validation row; 0: that of the first step's rows. Documents are cut at row ends");
  f.add("eval.final_window_short", c.final_window_short, kTokensOrNone, "short window of the last validation; 0: no change");
  f.add("eval.final_window_long", c.final_window_long, kTokensOrNone, "long window of the last validation; 0: no change");
}

void add_checkpoint(Table& f, Config::Checkpoint& c) {
  f.add("checkpoint.every", c.every, kSteps, "steps between two checkpoints; 0: none on the way");
  f.add("checkpoint.keep", c.keep, Range{1, kMaxCount}, "how many of the newest are kept");
  f.add("checkpoint.at_end", c.at_end, "checkpoint after the last step");
}

void add_dist(Table& f, Config::Dist& c) {
  f.add("dist.connect_s", c.connect_s, Range{1, 86400}, "seconds that the ranks wait for each other at the start");
  f.add("dist.heartbeat_s", c.heartbeat_s, Range{0.5, 3600}, "a rank that has been silent for so many seconds counts as dead");
  f.add("dist.progress_s", c.progress_s, Range{0, 86400},
        "a rank whose loop has stood still for so many seconds counts as dead; 0: never");
  f.add("dist.ranks_per_gpu", c.ranks_per_gpu, Range{1, 64},
        "for tests: ranks that share a GPU and talk over the loopback interface; their times mean nothing");
  f.add("dist.sparse_tables", c.sparse_tables,
        "send only the touched rows of the bigram table's gradient where that is fewer bytes; the sums are the same");
}

void add_run(Table& f, Config::Run& c) {
  f.add("run.dir", c.dir, TextKind::plain, "folder of the runs, relative to the working directory");
  f.add("run.name", c.name, TextKind::plain, "folder of this run in it; empty: date, time and name of the config");
}

void add_group(Table& f, const std::string& name, Config::Group& c) {
  const std::string at = "optim." + name + ".";
  f.add(at + "optimizer", c.optimizer, "muon and normuon: hidden matrices only; adam: the Main Track's form");
  f.add(at + "lr", c.lr, kNotNegative, "peak learning rate");
  f.add(at + "lr_multiplier", c.lr_multiplier, kNotNegative, "factor of lr");
  f.add(at + "beta1", c.beta1, Range{0, 0.999999999}, "Adam and AdamW: decay of the mean gradient");
  f.add(at + "beta2", c.beta2, Range{0, 0.999999999}, "Adam and AdamW: decay of the mean square");
  f.add(at + "eps", c.eps, kPositive, "Adam and AdamW: added to the root");
  f.add(at + "weight_decay", c.weight_decay, kNotNegative,
        "decoupled weight decay, per unit of learning rate; adam and normuon: of its square, and cautious");
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
  add_group(f, "down", c.down);
  add_group(f, "bigram", c.bigram);
  add_group(f, "value_embedding", c.value_embedding);
  add_group(f, "scalar", c.scalar);
  add_group(f, "smear", c.smear);
  add_group(f, "value_gate", c.value_gate);
  add_group(f, "resid_lambda", c.resid_lambda);
  add_group(f, "post_lambda", c.post_lambda);
  add_group(f, "mudd", c.mudd);
  add_group(f, "mudd_gate", c.mudd_gate);
  f.add("optim.muon.momentum", c.muon.momentum, Range{0, 0.999999999}, "decay of the gradient average");
  f.add("optim.muon.nesterov", c.muon.nesterov, "Nesterov momentum");
  f.add("optim.muon.iterations", c.muon.iterations, Range{1, 100}, "Newton-Schulz iterations");
  f.add("optim.muon.coefficients", c.muon.coefficients,
        "rows [a, b, c] of X <- aX + (bA + cA²)X with A = XXᵀ, one for each iteration; the last one repeats");
  f.add("optim.muon.eps", c.muon.eps, kPositive, "added to the norm that X is divided by");
  f.add("optim.muon.norm_margin", c.muon.norm_margin, kPositive, "factor of the norm that X is divided by");
  f.add("optim.muon.beta2", c.muon.beta2, Range{0, 0.999999999}, "normuon: decay of the rows' (columns') mean squares");
}

void add_schedule(Table& f, Config::Schedule& c) {
  f.add("schedule.steps", c.steps, kSteps, "training steps; with stages: 0 or the sum of their steps");
  f.add("schedule.scale", c.scale, Range{0, 1e6, true}, "multiplies every step count of the schedule");
  f.add("schedule.lr.warmup_steps", c.lr.warmup_steps, kSteps, "learning-rate factor (s + 1) / warmup_steps in these first steps");
  f.add("schedule.lr.shape", c.lr.shape, "how the factor falls in the cool-down");
  f.add("schedule.lr.cooldown_steps", c.lr.cooldown_steps, kSteps,
        "last steps, in which the factor falls; 0: all after the warm-up");
  f.add("schedule.lr.final_fraction", c.lr.final_fraction, kFraction, "factor that the fall ends at, one step after the last");
  f.add("schedule.lr.hold_steps", c.lr.hold_steps, kSteps, "last steps, which keep final_fraction: the fall ends before them");
  f.add("schedule.lr.power", c.lr.power, Range{0, 100, true}, "exponent of shape power");
  f.add("schedule.momentum.start", c.momentum.start, Range{0, 0.999999999}, "Muon's momentum in step 0 if there is a warm-up");
  f.add("schedule.momentum.warmup_steps", c.momentum.warmup_steps, kSteps, "steps from start to optim.muon.momentum; 0: none");
  f.add("schedule.momentum.final", c.momentum.final, Range{0, 0.999999999}, "Muon's momentum that a cool-down ends at");
  f.add("schedule.momentum.cooldown_steps", c.momentum.cooldown_steps, kSteps,
        "last steps, from optim.muon.momentum to final; 0: none");
  for (auto& [index, stage] : c.stages) f.append(stage_fields(stage, index));
  f.add("schedule.split_step", c.split_step, kSteps, "model.tied_until_split: last step of the tied matrix; 0: tied to the end");
}

void add_extrapolation(Table& f, Config::Extrapolation& c) {
  f.add("extrapolation.method", c.method,
        "jump of the weights from their last snapshots (rre: reduced rank; rre_suffix: as the Optimization Track's #34 has it), or "
        "an average");
  f.add("extrapolation.apply", c.apply, "weights: training goes on from the result; readout: validations alone see it");
  f.add("extrapolation.parameters", c.parameters,
        "which take part, as one vector; matrices: the hidden ones; all_but_tables: all but embeddings, bigram table and head");
  f.add("extrapolation.start", c.start, kSteps, "completed updates from which on weights are remembered; times schedule.scale");
  f.add("extrapolation.stop", c.stop, kSteps, "the last update after which they are, times schedule.scale; 0: to the end");
  f.add("extrapolation.every", c.every, Range{1, kMaxCount},
        "a jump after every n-th update, where the history is long enough; a multiple of snapshot_every");
  f.add("extrapolation.history", c.history, Range{2, 8}, "snapshots that a jump is made from; linear: 2 or more, others: 3");
  f.add("extrapolation.snapshot_every", c.snapshot_every, Range{1, kMaxCount}, "updates between two snapshots");
  f.add("extrapolation.regularization", c.regularization, kNotNegative,
        "added to the diagonal of the system behind the coefficients, in units of its mean");
  f.add("extrapolation.damping", c.damping, kNotNegative, "factor of the jump");
  f.add("extrapolation.max_jump", c.max_jump, kNotNegative, "largest norm of a jump, in units of the weights' norm; 0: no limit");
  f.add("extrapolation.horizon", c.horizon, kNotNegative, "linear: how many updates the jump goes ahead");
  f.add("extrapolation.mixing", c.mixing, kNotNegative, "anderson: share of the differences that the mixed point moves on by");
  f.add("extrapolation.ema_updates", c.ema_updates, Range{1, kMaxCount},
        "ema: after every update the average moves by 1 / ema_updates of its distance to the weights");
  f.add("extrapolation.blend", c.blend, kFraction, "ema, average: share of the average in the result");
  f.add("extrapolation.reset_momentum", c.reset_momentum, "a jump zeroes the first moments of the parameters that it moved");
  f.add("extrapolation.host_memory", c.host_memory, "snapshots and averages in pinned host memory instead of the GPU's");
}

void add_fp8(Table& f, Config::Fp8& c) {
  f.add("fp8.mlp_up", c.mlp_up, "the MLP's first product, forward");
  f.add("fp8.mlp_down", c.mlp_down, "the MLP's second product, forward");
  f.add("fp8.head", c.head, "the head's products, forward and backward");
  f.add("fp8.mlp_up_scaling", c.mlp_up_scaling,
        "scale of norm(x); fixed: from a bound, current: from its own maximum, delayed: from that of the step before");
  f.add("fp8.mlp_down_scaling", c.mlp_down_scaling, "the same of relu(x)²");
  f.add("fp8.mlp_up_bound", c.mlp_up_bound, kPositive, "fixed: largest |norm(x)|");
  f.add("fp8.mlp_down_bound", c.mlp_down_bound, kPositive, "fixed: largest relu(x)²");
  f.add("fp8.mlp_down_margin", c.mlp_down_margin, kPositive, "delayed: largest value expected, in units of the last maximum");
  f.add("fp8.down_weight_margin", c.down_weight_margin, kPositive, "the same for the down weights");
  f.add("fp8.down_weight_exact_steps", c.down_weight_exact_steps, Range{1, kMaxCount},
        "first steps, in which the down weights' scale comes from their current maximum");
  f.add("fp8.head_inp_bound", c.head_inp_bound, kPositive, "largest |x| that enters the head");
  f.add("fp8.head_weight_bound", c.head_weight_bound, kPositive, "largest |weight| of the head");
  f.add("fp8.head_grad_bound", c.head_grad_bound, kPositive, "448 / 57344 of the largest |gradient of a logit|");
  f.add("fp8.mlp_grad_inp", c.mlp_grad_inp, "gradients of the inputs of the MLP's two products");
  f.add("fp8.mlp_grad_weight", c.mlp_grad_weight, "gradients of the MLP's weights");
  f.add("fp8.qkv", c.qkv, "the projection to q, k and v, forward");
  f.add("fp8.qkv_grad_inp", c.qkv_grad_inp, "gradient of its input");
  f.add("fp8.qkv_grad_weight", c.qkv_grad_weight, "gradient of its weights");
  f.add("fp8.out", c.out, "attention's output projection, forward");
  f.add("fp8.out_grad_inp", c.out_grad_inp, "gradient of its input");
  f.add("fp8.out_grad_weight", c.out_grad_weight, "gradient of its weights");
  f.add("fp8.backward_scaling", c.backward_scaling,
        "current or delayed: scales of these gradients, and of activations that no other key gives one");
  f.add("fp8.grad_margin", c.grad_margin, kPositive,
        "delayed: largest gradient expected, in units of the last maximum (activations: fp8.mlp_down_margin)");
  f.add("fp8.force_unit_scales", c.force_unit_scales, "every scale is 1: shows that scales matter");
  f.add("fp8.warn_saturated", c.warn_saturated, kFraction,
        "warn above this fraction of saturated or flushed values; 0: they are not counted");
  f.add("fp8.mlp_up_kernel", c.mlp_up_kernel, "CUDA: the kernel of the MLP's first product");
}

constexpr IndexedKeys kIndexed[] = {
    {kLayers, [](Config& config, int index) { return layer_fields(config.model.layers[index], index); }},
    {kStages, [](Config& config, int index) { return stage_fields(config.schedule.stages[index], index); }}};

// 7 of "model.layers.7" and of "model.layers.7.window". Not of "model.layers.07": a layer has one name.
std::optional<int> index_of(const IndexedKeys& indexed, std::string_view key) {
  if (!key.starts_with(indexed.prefix)) return std::nullopt;
  const std::string digits(key.substr(indexed.prefix.size(), key.find('.', indexed.prefix.size()) - indexed.prefix.size()));
  int index = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (index < 0 || digits != std::to_string(index)) return std::nullopt;
  return index;
}

std::string number_text(double value) {
  if (value == static_cast<double>(static_cast<int64_t>(value))) return std::to_string(static_cast<int64_t>(value));
  return fmt::format("{}", value);
}

std::string text_of(const Range& range) {
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

}  // namespace

std::span<const IndexedKeys> indexed_keys() { return kIndexed; }

std::vector<Field> config_fields(Config& config) {
  Table table;
  add_model(table, config.model);
  add_main_track(table, config.model);
  add_data(table, config.data);
  add_train(table, config.train);
  add_eval(table, config.eval);
  add_checkpoint(table, config.checkpoint);
  add_dist(table, config.dist);
  add_run(table, config.run);
  add_optim(table, config.optim);
  add_schedule(table, config.schedule);
  add_extrapolation(table, config.extrapolation);
  add_fp8(table, config.fp8);
  return table.take();
}

FieldIndex::FieldIndex(Config& config) : config_(config) {
  for (Field& field : config_fields(config)) fields_.emplace(field.key, field);
}

std::optional<Field> FieldIndex::find(const std::string& key) {
  if (const auto found = fields_.find(key); found != fields_.end()) return found->second;
  for (const IndexedKeys& indexed : kIndexed) {
    const std::optional<int> index = index_of(indexed, key);
    if (!index) continue;
    Config probe;  // a wrong key adds nothing to the config
    const std::vector<Field> known = indexed.fields(probe, *index);
    if (std::none_of(known.begin(), known.end(), [&](const Field& field) { return field.key == key; })) return std::nullopt;
    for (Field& field : indexed.fields(config_, *index)) fields_.emplace(field.key, field);
    return fields_.at(key);
  }
  return std::nullopt;
}

bool FieldIndex::is_group(const std::string& key) const {
  const auto after = fields_.upper_bound(key + ".");
  if (after != fields_.end() && after->first.starts_with(key + ".")) return true;
  return std::any_of(std::begin(kIndexed), std::end(kIndexed), [&](const IndexedKeys& indexed) {
    return key + "." == indexed.prefix || key == std::string(indexed.prefix) + std::to_string(index_of(indexed, key).value_or(-1));
  });
}

std::vector<std::string> FieldIndex::keys(const std::string& like, bool with_groups) const {
  int index = 0;
  if (const size_t digit = like.find_first_of("0123456789"); digit != std::string::npos) {
    std::from_chars(like.data() + digit, like.data() + like.size(), index);
  }
  std::set<std::string> keys;
  for (const auto& [key, field] : fields_) keys.insert(key);
  Config probe;
  for (const IndexedKeys& indexed : kIndexed) {
    for (const Field& field : indexed.fields(probe, index)) keys.insert(field.key);
  }
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
    std::string operator()(const NumberList*) const { return "list"; }
    std::string operator()(const NumberRows*) const { return "list"; }
  };
  return std::visit(Namer{}, field.member);
}

std::string range_text(const Field& field) {
  if (const EnumMember* names = std::get_if<EnumMember>(&field.member)) return fmt::format("{}", fmt::join(*names->names, ", "));
  if (std::holds_alternative<NumberRows*>(field.member)) return "lists of 3 numbers";
  if (std::holds_alternative<NumberList*>(field.member)) return "numbers " + text_of(field.range);
  return text_of(field.range);
}

}  // namespace speedrun
