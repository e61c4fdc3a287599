// Parameters of the Main Track's model (modded-nanogpt record #89) and their initial values.
#include <cmath>

#include "fmt/format.h"
#include "src/model/gate_layout.h"
#include "src/model/parameter_table.h"

namespace speedrun {
namespace {

constexpr double kHeadStd = 0.005, kValueStd = 0.01;
constexpr float kSkipLambda = -1.5f;

class Table {
 public:
  ParameterSpec& add(const std::string& name, std::vector<int64_t> shape, ParameterGroup group, const Config::Group& settings) {
    rows_.push_back({.name = name, .shape = std::move(shape), .group = group, .split = master_split(settings)});
    return rows_.back();
  }

  // A small net: w1 and w2 only if it looks at the token; the biases divided by the scale that the output is multiplied by.
  void add_net(const GateNetLayout& net, int64_t hidden, int64_t width, bool dynamic, ParameterGroup group,
               const Config::Group& settings) {
    if (!net.exists()) return;
    const int64_t columns = net.columns();
    if (dynamic) {
      add(net.name + ".w1", {hidden, width}, group, settings).init_bound = 1 / std::sqrt(static_cast<double>(width));
      add(net.name + ".w2", {columns, hidden}, group, settings);
    }
    ParameterSpec& bias = add(net.name + ".bias", {columns}, group, settings);
    bias.decay = false;
    for (const float value : net.initial) bias.init_values.push_back(static_cast<float>(static_cast<double>(value) / kGateScale));
  }

  std::vector<ParameterSpec> take() { return std::move(rows_); }

 private:
  std::vector<ParameterSpec> rows_;
};

}  // namespace

std::vector<ParameterSpec> main_track_parameters(const Config::Model& model, const Config::Optim& optim) {
  const int64_t V = model.padded_vocab_size(), C = model.width, F = model.mlp_hidden, L = model.num_layers;
  const double bound = std::sqrt(3.0) * 0.5 / std::sqrt(static_cast<double>(C));
  const GateLayout gates = gate_layout(model);
  Table table;

  table.add("wte", {V, C}, ParameterGroup::embedding, optim.embedding).init_std = kHeadStd;
  if (model.smear) table.add("smear.gate", {model.smear_channels}, ParameterGroup::smear, optim.smear);
  if (model.bigram_rows > 0) {
    table.add("bigram.table", {model.bigram_rows, C}, ParameterGroup::bigram, optim.bigram);
    if (model.bigram_sign_rows > 0) {
      ParameterSpec& sign = table.add("bigram.sign", {model.bigram_sign_rows, C}, ParameterGroup::bigram, optim.bigram);
      sign.init_sign = true;
      sign.frozen = true;
    }
  }
  const bool nets = model.mudd_gates;
  table.add_net(gates.pre, model.gate_hidden, C, nets, ParameterGroup::mudd_gate, optim.mudd_gate);
  table.add_net(gates.post, model.gate_hidden, C, nets, ParameterGroup::mudd_gate, optim.mudd_gate);
  if (gates.pre.exists() || gates.post.exists()) {
    ParameterSpec& scale = table.add("gate.scale", {1}, ParameterGroup::mudd_gate, optim.mudd_gate);
    scale.init_values = {static_cast<float>(kGateScale)};
    scale.decay = false;
    scale.split = kernels::MasterSplit::nearest;  // FP32 in the record, as the λ's
  }
  table.add_net(gates.mix, model.gate_hidden, C, true, ParameterGroup::mudd, optim.mudd);
  table.add_net(gates.out, model.gate_hidden, C, true, ParameterGroup::mudd, optim.mudd);

  if (model.residual_lambdas) {
    table.add("lambda.resid", {L, 2}, ParameterGroup::resid_lambda, optim.resid_lambda).init_mean = std::sqrt(1.1);
    table.add("lambda.post", {L, 2}, ParameterGroup::post_lambda, optim.post_lambda).init_mean = 1;
  }
  if (model.weight_lambdas) {  // (λ_sa0, λ_sa1) of each layer
    ParameterSpec& lambda = table.add("lambda.weight", {L, 2}, ParameterGroup::scalar, optim.scalar);
    for (int64_t l = 0; l < L; ++l) lambda.init_values.insert(lambda.init_values.end(), {0.5f, 1.0f});
  }
  if (model.smear) table.add("lambda.smear", {1}, ParameterGroup::scalar, optim.scalar);
  bool skips = false;
  for (const auto& [layer, settings] : model.layers) skips = skips || settings.skip_from >= 0;
  if (skips) table.add("lambda.skip", {1}, ParameterGroup::scalar, optim.scalar).init_values = {kSkipLambda};

  for (int l = 0; l < model.num_layers; ++l) {
    const std::string name = fmt::format("h.{}.", l);
    const Config::Model::Layer layer = model.layer(l);
    if (layer.attention) {
      // Neighbours in memory: the products see one (3C, C) matrix. Muon works on Q and K in pairs of heads.
      ParameterSpec& qk = table.add(name + "attn.qk.weight", {2 * C, C}, ParameterGroup::matrix, optim.matrix);
      qk.init_bound = bound;
      qk.with_next = true;
      qk.matrices = model.num_heads % 2 == 0 ? model.num_heads : 2 * model.num_heads;
      table.add(name + "attn.v.weight", {C, C}, ParameterGroup::matrix, optim.matrix).init_bound = bound;
      table.add(name + "attn.out.weight", {C, C}, ParameterGroup::matrix, optim.matrix).init_bound = bound;
      if (layer.value_embedding) {
        table.add(name + "value.table", {V, C}, ParameterGroup::value_embedding, optim.value_embedding).init_std = kValueStd;
        if (!(model.mudd && l == model.num_layers - 1))
          table.add(name + "value.gate", {model.num_heads, 2 * model.value_gate_channels}, ParameterGroup::value_gate,
                    optim.value_gate);
      }
    }
    table.add(name + "mlp.up.weight", {F, C}, ParameterGroup::matrix, optim.matrix).init_bound = bound;
    table.add(name + "mlp.down.weight", {F, C}, ParameterGroup::down, optim.down);  // stored (F, C), starts at zero
  }
  table.add("head.weight", {V, C}, ParameterGroup::head, optim.head).init_std = kHeadStd;
  return table.take();
}

}  // namespace speedrun
