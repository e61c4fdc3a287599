#pragma once
// The configuration of a run: plain structs whose defaults are the schema's defaults. Every key is declared once, in
// config_fields.cpp (path, member, range, help); JSON, --set, the resolved dump and the key list follow from there.
// Nothing below src/train sees these structs except src/model (Config::Model) and src/optim (Config::Optim, Config::Schedule).
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace speedrun {

enum class NormKind { layernorm, rmsnorm };
enum class PositionKind { learned, rotary };
enum class ActivationKind { gelu, relu2 };
enum class SoftcapKind { none, rational, sigmoid };  // rational: c·z/√(z²+c²); sigmoid: 23·σ((z+5)/7.5)
enum class InitKind { gpt2, zero_projections };      // zero_projections: the Optimization Track's
// gpt: GPT-2 and the Optimization Track (src/model/gpt.h); main_track: modded-nanogpt record #89 (src/model/main_track.h)
enum class Architecture { gpt, main_track };
enum class ReaderKind { rows, documents };
enum class ReductionKind { mean, sum, row_mean };  // row_mean: sum over a row's tokens, mean over the rows of the step
// adam: the record's form (ε added to the uncorrected root, cautious decay by the square of the rate); normuon: Muon with
// second-moment normalisation and cautious decay
enum class OptimizerKind { adamw, muon, adam, normuon };
enum class Precision { bf16, fp8 };
// Where an FP8 scale comes from: fixed: a bound known beforehand; current: this tensor's own maximum (another pass over it);
// delayed: the maximum of the step before, times a margin
enum class ScalingKind { fixed, current, delayed };
enum class MlpUpKernel { automatic, cublaslt, fused };
enum class DecayShape { constant, linear, cosine, power };
// How a BF16 weight and its FP32 master share 32 bits; none: the BF16 value is all.
enum class MasterKind { nearest, truncated, none };
enum class StateDType { f32, bf16 };
enum class DeviceChoice { automatic, cpu, cuda };
enum class WindowKind { full, short_window, long_window };
// Weight extrapolation (kernels/extrapolation/extrapolation.h). rre to linear jump from a history of snapshots; ema and average are
// averages of the weights.
enum class ExtrapolationKind { none, rre, rre_suffix, mpe, anderson, linear, ema, average };
inline constexpr std::array<std::string_view, 8> kExtrapolationNames = {"none",     "rre",    "rre_suffix", "mpe",
                                                                        "anderson", "linear", "ema",        "average"};
enum class ExtrapolationApply { weights, readout };  // readout: validations alone see the result
enum class ExtrapolatedParameters { matrices, all, all_but_tables };

struct Config {
  struct Model {
    int64_t vocab_size = 50257;   // ids in use: 256 bytes + the first merges of GPT-2 + one end-of-text id, which is the last
    int64_t vocab_padding = 128;  // rows of embedding and head are rounded up to a multiple of this (50257 -> 50304)
    int num_layers = 12;
    int width = 768;     // C
    int num_heads = 12;  // H; head size D = C / H must be 64 or 128 on CUDA
    int mlp_hidden = 3072;
    int max_positions = 1024;  // rows of the learned position table
    NormKind norm = NormKind::layernorm;
    bool norm_gain = true;  // learned gains (and, for layernorm with bias, shifts)
    double norm_eps = 1e-5;
    bool embedding_norm = false;  // norm between embedding and first layer
    PositionKind positions = PositionKind::learned;
    double rotary_base = 1024;  // frequencies base^(-j/(n-1)), j = 0..n-1, n = rotary_fraction·D/2; the other pairs do not rotate
    double rotary_fraction = 0.5;
    bool qk_norm = false;
    double attention_scale = 0;  // 0: 1/sqrt(D)
    ActivationKind activation = ActivationKind::gelu;
    bool bias = true;  // biases of every linear layer but the head
    bool tied_head = true;
    bool head_bias = false;
    SoftcapKind softcap = SoftcapKind::none;
    double softcap_value = 15;
    int window_short = 0;  // tokens a query sees behind itself (it sees window + 1 keys); 0: no limit
    int window_long = 0;
    InitKind init = InitKind::gpt2;

    // The Main Track's features (architecture main_track alone); each can be switched off by itself.
    Architecture architecture = Architecture::gpt;
    bool smear = false;             // a gated part of the previous token's embedding joins a token's
    int smear_channels = 12;        // channels that the gate looks at
    int64_t bigram_rows = 0;        // rows of the hashed bigram table; 0: none
    int bigram_sign_rows = 0;       // rows of the fixed table of signs; 0: none
    int value_gate_channels = 6;    // of the attention input and of the value embedding, each
    bool x0_injection = false;      // gated x0 joins the stream in every attention sublayer
    bool residual_lambdas = false;  // learned λ_resid, λ_post of every sublayer (else √1.1 and 1 stay)
    bool weight_lambdas = false;    // learned scalars on the QKV and output weights (else 1)
    bool mudd_gates = false;        // gates depend on the token; else they are learned constants
    int mudd_gate_split = 4;        // layers before this one have their gates from x0, the others from the stream entering it
    bool mudd = false;              // dynamic mixing in the last layer and after it
    int mudd_early = 3;             // layer whose output the last mix may take
    int mudd_late = 7;              // layer whose output value and residual mixes may take
    int gate_hidden = 64;           // hidden width of the gate nets
    int dc_window = 112;            // keys a query of DC attention sees, itself included
    bool tied_until_split = false;  // head and embedding are one matrix until schedule.split_step
    bool yarn = false;              // rotary frequencies and attention scale follow the long window
    struct Layer {
      WindowKind window = WindowKind::full;
      bool attention = true;      // false: no attention sublayer
      bool paired_heads = false;  // heads (h, h + H/2) interleaved along time
      bool key_offset = false;    // non-rotating half of the keys one position forward
      bool value_embedding = false;
      bool xsa = false;     // attention output minus a part of its projection on the token's own value
      bool gate = false;    // attention output times a gate per head
      bool dc = false;      // lightweight DC attention
      int input_from = -1;  // attention reads the stream after that layer; -1: its own
      int skip_from = -1;   // gated skip from the stream after that layer; only without attention
      bool operator==(const Layer&) const = default;
    };
    std::map<int, Layer> layers;  // exceptions to the defaults, by layer index ("model.layers.2.window": "long")

    // Settings of a layer: its exceptions, or the defaults.
    Layer layer(int index) const {
      const auto found = layers.find(index);
      return found == layers.end() ? Layer{} : found->second;
    }
    int head_size() const { return width / num_heads; }  // D
    int64_t padded_vocab_size() const { return (vocab_size + vocab_padding - 1) / vocab_padding * vocab_padding; }
    bool operator==(const Model&) const = default;
  } model;

  struct Data {
    std::string train;  // glob of .bin shards, relative to the config file
    std::string val;
    ReaderKind reader = ReaderKind::rows;
    int repeat = 1;          // epochs over the train shards, one after the other
    int max_seq_len = 2048;  // documents reader: longer documents are cut
    int document_rows = 8;   // documents reader: rows of a step, whatever the number of ranks
    std::string vocabulary;  // folder with GPT-2's vocab.bpe and encoder.json (used by sample and by data tokenize/decode)
    bool operator==(const Data&) const = default;
  } data;

  struct Train {
    int64_t batch_tokens = 524288;   // tokens of one step, all ranks together
    int64_t micro_batch_tokens = 0;  // tokens of one forward/backward on one rank; 0: as many as memory allows (CUDA), 4096 (CPU)
    int seq_len = 1024;              // row length T
    ReductionKind reduction = ReductionKind::mean;
    double grad_clip = 0;  // global L2 norm; 0: off
    uint64_t seed = 1337;
    double target_loss = 3.28;  // validation loss, nats per token
    bool stop_at_target = false;
    int stop_step = 0;  // updates after which a run ends, however long its schedule; 0: at the schedule's end
    DeviceChoice device = DeviceChoice::automatic;
    int device_ordinal = 0;
    int threads = 0;                  // CPU threads; 0: all
    std::string init_weights;         // safetensors file with initial weights, instead of drawing them
    int64_t logits_chunk_tokens = 0;  // head: tokens whose logits are held at once; 0: chosen by the memory plan
    int log_every = 1;
    bool operator==(const Train&) const = default;
  } train;

  struct Eval {
    int every = 250;            // steps; 0: only at the end
    int dense_every = 0;        // more often near the end; 0: off
    double dense_from = 0.9;    // fraction of the steps from which dense_every applies
    int64_t tokens = 10485760;  // predictions, from the start of the validation stream
    bool at_start = true;
    int64_t row_tokens = 0;      // length of a validation row; 0: as in the first step. Documents are cut at row ends
    int final_window_short = 0;  // windows of the last validation; 0: those of the last stage
    int final_window_long = 0;
    bool operator==(const Eval&) const = default;
  } eval;

  struct Checkpoint {
    int every = 1000;  // steps; 0: never but at_end
    int keep = 2;
    bool at_end = true;
    bool operator==(const Checkpoint&) const = default;
  } checkpoint;

  struct Dist {                 // several ranks
    double connect_s = 25;      // how long the ranks wait for each other at the start
    double heartbeat_s = 10;    // a rank that has been silent for so long counts as dead
    double progress_s = 0;      // a rank whose loop stands still for so long counts as dead; 0: never
    int ranks_per_gpu = 1;      // tests: more than one share a GPU, over the loopback interface
    bool sparse_tables = true;  // sum only the touched rows of the bigram table's gradient where that is fewer bytes
    bool operator==(const Dist&) const = default;
  } dist;

  struct Run {
    std::string dir = "runs";  // relative to the working directory
    std::string name;          // empty: date, time and config name
    bool operator==(const Run&) const = default;
  } run;

  struct Group {  // one parameter group
    OptimizerKind optimizer = OptimizerKind::adamw;
    double lr = 6e-4;
    double lr_multiplier = 1;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0;
    double weight_decay_multiplier = 1;
    int every = 1;  // update every n-th step, gradients summed in between
    MasterKind master = MasterKind::nearest;
    StateDType state = StateDType::f32;
    bool operator==(const Group&) const = default;
  };
  struct Optim {
    // In the order of ParameterGroup. embedding: token table; position: position table; head: output matrix; matrix: hidden
    // matrices; vector: gains and biases
    Group embedding, position, head, matrix, vector;
    // The Main Track's: down: MLP down matrices; scalar: λ_sa, λ_smear, λ_skip; mudd and mudd_gate: nets (their biases and scale
    // never decay)
    Group down, bigram, value_embedding, scalar, smear, value_gate, resid_lambda, post_lambda, mudd, mudd_gate;
    struct Muon {
      double momentum = 0.95;
      bool nesterov = true;
      int iterations = 5;  // Newton-Schulz iterations
      // Rows (a, b, c) of X <- aX + (bA + cA²)X with A = XXᵀ; iteration i uses row min(i, last).
      std::vector<std::vector<double>> coefficients = {{3.4445, -4.7750, 2.0315}};
      double eps = 1e-7;  // X <- X / (‖X‖_F · norm_margin + eps)
      double norm_margin = 1.0;
      double beta2 = 0.9;  // normuon: decay of the rows' (columns') mean squares
      bool operator==(const Muon&) const = default;
    } muon;
    bool operator==(const Optim&) const = default;
  } optim;

  struct Schedule {
    int steps = 1000;
    double scale = 1;  // multiplies every step count of the schedule
    struct LearningRate {
      int warmup_steps = 0;  // factor (s + 1) / warmup_steps in step s
      DecayShape shape = DecayShape::constant;
      int cooldown_steps = 0;     // the last steps, in which the factor falls; 0: all after the warm-up
      double final_fraction = 0;  // the factor that the fall ends at: step `steps`, the first one not taken, would have it
      int hold_steps = 0;         // the fall ends this many steps before the end; from there on the factor is final_fraction
      double power = 1;           // for shape power: the part above final_fraction falls as (remaining / cooldown)^power
      bool operator==(const LearningRate&) const = default;
    } lr;
    struct Momentum {  // Muon's; start -> optim.muon.momentum over warmup_steps, -> final over the last cooldown_steps
      double start = 0.85;
      int warmup_steps = 0;
      double final = 0.85;
      int cooldown_steps = 0;
      bool operator==(const Momentum&) const = default;
    } momentum;
    // Stages one after the other; without any, train.batch_tokens, data.max_seq_len and model.window_* hold throughout. With
    // stages their steps count: `steps` above is then 0, or their sum.
    struct Stage {
      int steps = 0;             // 0: the stage is left out
      int64_t batch_tokens = 0;  // 0 (here and below): as without stages
      int max_seq_len = 0;
      int window_short = 0;
      int window_long = 0;
      double lr_multiplier = 1;
      // Weights of the next, next but one, … token in the loss and of the prefix token: linear from start (the stage's first step)
      // to end (the first step after the stage).
      std::vector<double> mtp_start = {1}, mtp_end = {1};  // same length, at most 3
      double prefix_start = 0, prefix_end = 0;
      bool operator==(const Stage&) const = default;
    };
    std::map<int, Stage> stages;  // by index from 0, without gaps ("schedule.stages.1.steps")
    int split_step = 0;           // model.tied_until_split: the last step with a tied update; 0: never split
    bool operator==(const Schedule&) const = default;
  } schedule;

  struct Extrapolation {
    ExtrapolationKind method = ExtrapolationKind::none;
    ExtrapolationApply apply = ExtrapolationApply::weights;
    ExtrapolatedParameters parameters = ExtrapolatedParameters::matrices;
    int start = 0, stop = 0;  // completed updates, both included; times schedule.scale; stop 0: to the end
    int every = 5;            // updates between two jumps; a multiple of snapshot_every
    int history = 4;          // snapshots of a jump
    int snapshot_every = 1;   // updates between two snapshots
    double regularization = 1e-6;
    double damping = 1;       // factor of the jump
    double max_jump = 0.001;  // largest jump, relative to the norm of the weights; 0: no cap
    double horizon = 5;       // linear: updates ahead
    double mixing = 1;        // anderson
    int ema_updates = 150;    // ema: the average takes 1 / ema_updates of the weights after every update
    double blend = 1;         // ema, average: share of the average
    bool reset_momentum = false;
    bool host_memory = false;
    bool averages() const { return method == ExtrapolationKind::ema || method == ExtrapolationKind::average; }
    int interval() const { return method == ExtrapolationKind::ema ? 1 : snapshot_every; }  // updates between two snapshots
    // With no snapshots before update `begin`: the first one, and the first jump.
    int64_t first_snapshot(int64_t begin) const { return next_multiple(begin, interval()); }
    int64_t first_jump(int64_t begin) const {
      return next_multiple(first_snapshot(begin) + int64_t{history - 1} * interval(), every);
    }
    static int64_t next_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }
    bool operator==(const Extrapolation&) const = default;
  } extrapolation;

  // FP8 in training; validation runs in BF16.
  struct Fp8 {
    Precision mlp_up = Precision::bf16;                   // forward product
    Precision mlp_down = Precision::bf16;                 // forward product
    Precision head = Precision::bf16;                     // forward, dX and dW; scales fixed
    ScalingKind mlp_up_scaling = ScalingKind::current;    // of the activation norm(x)
    ScalingKind mlp_down_scaling = ScalingKind::delayed;  // of the activation relu(x)²
    double mlp_up_bound = 28;                             // fixed scaling: largest |norm(x)|
    double mlp_down_bound = 448;                          // fixed scaling: largest relu(x)²
    double mlp_down_margin = 1.8;                         // delayed: scale = margin · maximum / 448
    double down_weight_margin = 1.12;                     // delayed scale of the down weights
    int down_weight_exact_steps = 17;  // first steps in which the down weights' scale is their current maximum, without margin
    double head_inp_bound = 100, head_weight_bound = 1.6, head_grad_bound = 0.75;  // largest values; the last per grad_scale
    bool force_unit_scales = false;                                                // every scale 1: shows that scales matter
    // Beyond the record: the MLP's backward and the attention's projections; gradients in E5M2. grad_inp: the gradient of an
    // input, grad_weight: of a weight.
    Precision mlp_grad_inp = Precision::bf16, mlp_grad_weight = Precision::bf16;  // of both of the MLP's products
    Precision qkv = Precision::bf16, qkv_grad_inp = Precision::bf16, qkv_grad_weight = Precision::bf16;
    Precision out = Precision::bf16, out_grad_inp = Precision::bf16, out_grad_weight = Precision::bf16;
    // Scales of those gradients and activations, current or delayed; a forward product's activation keeps its scale in backward.
    ScalingKind backward_scaling = ScalingKind::current;
    double grad_margin = 4;     // delayed: scale = margin · maximum / 57344
    double warn_saturated = 0;  // count values that saturate or are flushed to 0, warn above this fraction; 0: not counted
    MlpUpKernel mlp_up_kernel = MlpUpKernel::automatic;

    bool weight_grads() const {  // besides the head's
      return mlp_grad_weight == Precision::fp8 || qkv_grad_weight == Precision::fp8 || out_grad_weight == Precision::fp8;
    }
    bool beyond_record() const {
      return weight_grads() || mlp_grad_inp == Precision::fp8 || qkv == Precision::fp8 || qkv_grad_inp == Precision::fp8 ||
             out == Precision::fp8 || out_grad_inp == Precision::fp8;
    }
    bool any() const { return beyond_record() || mlp_up == Precision::fp8 || mlp_down == Precision::fp8 || head == Precision::fp8; }
    bool operator==(const Fp8&) const = default;
  } fp8;

  bool operator==(const Config&) const = default;
};

}  // namespace speedrun
