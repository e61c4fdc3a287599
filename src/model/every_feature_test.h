#pragma once
// The Main Track's model with every feature in six layers, for tests; sizes are the caller's to change.
#include "src/config/config.h"

namespace speedrun {

inline Config every_feature_config() {
  Config config;
  Config::Model& model = config.model;
  model.architecture = Architecture::main_track;
  model.vocab_size = 37;
  model.vocab_padding = 8;
  model.num_layers = 6;
  model.width = 16;
  model.num_heads = 2;
  model.mlp_hidden = 24;
  model.norm = NormKind::rmsnorm;
  model.norm_gain = false;
  model.norm_eps = 0x1p-23;
  model.positions = PositionKind::rotary;
  model.activation = ActivationKind::relu2;
  model.bias = false;
  model.tied_head = false;
  model.tied_until_split = true;
  model.softcap = SoftcapKind::sigmoid;
  model.init = InitKind::zero_projections;
  model.smear = true;
  model.smear_channels = 5;
  model.bigram_rows = 41;
  model.bigram_sign_rows = 7;
  model.value_gate_channels = 3;
  model.x0_injection = true;
  model.residual_lambdas = true;
  model.weight_lambdas = true;
  model.mudd_gates = true;
  model.mudd_gate_split = 3;
  model.mudd = true;
  model.mudd_early = 2;
  model.mudd_late = 3;
  model.gate_hidden = 8;
  model.dc_window = 4;
  using enum WindowKind;
  model.layers[0] = {.window = short_window, .paired_heads = true};
  model.layers[1] = {.window = short_window, .value_embedding = true, .xsa = true};
  model.layers[2] = {.window = long_window, .key_offset = true, .xsa = true, .gate = true};
  model.layers[3] = {.attention = false, .skip_from = 2};
  model.layers[4] = {.window = short_window, .paired_heads = true, .value_embedding = true, .input_from = 3};
  model.layers[5] = {.window = long_window, .key_offset = true, .value_embedding = true, .gate = true, .dc = true, .input_from = 3};
  return config;
}

}  // namespace speedrun
