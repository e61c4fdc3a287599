#pragma once
// The configuration of a run: plain structs whose defaults are the schema's defaults. Every key is declared once, in
// config_fields.cpp (path, member, range, help); JSON, --set, the resolved dump and the key list follow from there.
// Nothing below src/train sees these structs except src/model (Config::Model) and src/optim (Config::Optim, Config::Schedule).
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace speedrun {

enum class NormKind { layernorm, rmsnorm };
enum class PositionKind { learned, rotary };
enum class ActivationKind { gelu, relu2 };
enum class SoftcapKind { none, rational, sigmoid };  // rational: c·z/√(z²+c²); sigmoid: 23·σ((z+5)/7.5)
enum class InitKind { gpt2, zero_projections };      // zero_projections: the Optimization Track's
enum class ReaderKind { rows, documents };
enum class ReductionKind { mean, sum };
enum class OptimizerKind { adamw, muon };
enum class DecayShape { constant, linear, cosine, power };
// How a BF16 weight and its FP32 master share 32 bits; none: the BF16 value is all.
enum class MasterKind { nearest, truncated, none };
enum class StateDType { f32, bf16 };
enum class DeviceChoice { automatic, cpu, cuda };
enum class WindowKind { full, short_window, long_window };

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
    struct Layer {
      WindowKind window = WindowKind::full;
      bool operator==(const Layer&) const = default;
    };
    std::map<int, Layer> layers;  // exceptions to the defaults, by layer index ("model.layers.2.window": "long")

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
    bool operator==(const Eval&) const = default;
  } eval;

  struct Checkpoint {
    int every = 1000;  // steps; 0: never but at_end
    int keep = 2;
    bool at_end = true;
    bool operator==(const Checkpoint&) const = default;
  } checkpoint;

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
    struct Muon {
      double momentum = 0.95;
      bool nesterov = true;
      int iterations = 5;  // Newton-Schulz iterations
      // Rows (a, b, c) of X <- aX + (bA + cA²)X with A = XXᵀ; iteration i uses row min(i, last).
      std::vector<std::vector<double>> coefficients = {{3.4445, -4.7750, 2.0315}};
      double eps = 1e-7;  // X <- X / (‖X‖_F · norm_margin + eps)
      double norm_margin = 1.0;
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
    bool operator==(const Schedule&) const = default;
  } schedule;

  bool operator==(const Config&) const = default;
};

}  // namespace speedrun
