#include "src/model/parameter_table.h"

#include <cmath>

#include "fmt/format.h"

namespace speedrun {

kernels::MasterSplit master_split(const Config::Group& group) {
  switch (group.master) {
    case MasterKind::nearest:
      return kernels::MasterSplit::nearest;
    case MasterKind::truncated:
      return kernels::MasterSplit::truncated;
    case MasterKind::none:
      return kernels::MasterSplit::none;
  }
  throw Error("internal: unknown master kind");
}

namespace {

// Standard deviations of the weights' initial values.
struct InitScales {
  double embedding, position, input, output, head;  // input: qkv and mlp.up; output: the projections back into the residual stream
};

InitScales init_scales(const Config::Model& model) {
  switch (model.init) {
    case InitKind::gpt2:  // Radford et al. 2019: 0.02, projections into the stream scaled down by √(their number)
      return {0.02, 0.02, 0.02, 0.02 / std::sqrt(2.0 * model.num_layers), 0.02};
    case InitKind::zero_projections:
      return {1.0, 0.02, std::sqrt(0.33 / model.width), 0, 0};
  }
  throw Error("internal: unknown init kind");
}

}  // namespace

std::vector<ParameterSpec> parameter_table(const Config::Model& model, const Config::Optim& optim) {
  if (model.architecture == Architecture::main_track) return main_track_parameters(model, optim);
  const int64_t V = model.padded_vocab_size(), C = model.width, F = model.mlp_hidden;
  const InitScales scales = init_scales(model);
  std::vector<ParameterSpec> table;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, ParameterGroup group, const Config::Group& settings,
                       double std, double mean = 0, int matrices = 1) {
    ParameterSpec spec{.name = name, .shape = std::move(shape), .group = group, .split = master_split(settings)};
    spec.init_std = std;
    spec.init_mean = mean;
    spec.matrices = matrices;
    table.push_back(std::move(spec));
  };
  const auto add_matrix = [&](const std::string& name, int64_t rows, int64_t cols, double std, int matrices = 1) {
    add(name + ".weight", {rows, cols}, ParameterGroup::matrix, optim.matrix, std, 0, matrices);
    if (model.bias) add(name + ".bias", {rows}, ParameterGroup::vector, optim.vector, 0);
  };
  const auto add_norm = [&](const std::string& name) {
    if (!model.norm_gain) return;
    add(name + ".gain", {C}, ParameterGroup::vector, optim.vector, 0, 1);
    if (model.norm == NormKind::layernorm && model.bias) add(name + ".shift", {C}, ParameterGroup::vector, optim.vector, 0);
  };

  add("wte", {V, C}, ParameterGroup::embedding, optim.embedding, scales.embedding);
  if (model.positions == PositionKind::learned)
    add("wpe", {model.max_positions, C}, ParameterGroup::position, optim.position, scales.position);
  if (model.embedding_norm) add_norm("norm_in");
  for (int l = 0; l < model.num_layers; ++l) {
    const std::string layer = fmt::format("h.{}.", l);
    add_norm(layer + "norm1");
    add_matrix(layer + "attn.qkv", 3 * C, C, scales.input, 3);
    add_matrix(layer + "attn.out", C, C, scales.output);
    add_norm(layer + "norm2");
    add_matrix(layer + "mlp.up", F, C, scales.input);
    add_matrix(layer + "mlp.down", C, F, scales.output);
  }
  add_norm("norm_out");
  if (!model.tied_head) add("head.weight", {V, C}, ParameterGroup::head, optim.head, scales.head);
  if (model.head_bias) add("head.bias", {V}, ParameterGroup::vector, optim.vector, 0);
  return table;
}

}  // namespace speedrun
