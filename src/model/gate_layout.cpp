#include "src/model/gate_layout.h"

#include <cmath>

namespace speedrun {
namespace {

// Starting values of modded-nanogpt record #89.
constexpr float kAttentionGate = 0.25f, kBigramGate = 0.05f, kSkipGate = 0.5f, kValueGate = 2.0f, kBackout = -0.5f;

int append(GateNetLayout& net, int columns, float value) {
  const int first = net.columns();
  net.initial.insert(net.initial.end(), static_cast<size_t>(columns), value);
  return first;
}

}  // namespace

GateLayout gate_layout(const Config::Model& model) {
  GateLayout layout;
  layout.layers.resize(static_cast<size_t>(model.num_layers));
  const int heads = model.num_heads, last = model.num_layers - 1;
  const bool bigram = model.bigram_rows > 0;
  const auto net_of = [&](int layer) -> GateNetLayout& { return layer < model.mudd_gate_split ? layout.pre : layout.post; };
  const auto gates_of = [&](int layer) -> LayerGates& { return layout.layers[static_cast<size_t>(layer)]; };
  for (int l = 0; l <= last; ++l) {
    gates_of(l).post = l >= model.mudd_gate_split;
    if (model.layer(l).xsa) gates_of(l).alpha = append(net_of(l), heads, 0);
  }
  for (int l = 0; l <= last; ++l) {
    if (model.layer(l).gate) gates_of(l).gate = append(net_of(l), heads, kAttentionGate);
  }
  for (int l = 0; l <= last; ++l) {
    if (!model.layer(l).attention || (l == last && model.mudd)) continue;
    if (model.x0_injection) gates_of(l).x0 = append(net_of(l), 1, 0);
    if (bigram) gates_of(l).bigram = append(net_of(l), 1, kBigramGate);
  }
  for (int l = 0; l <= last; ++l) {
    if (model.layer(l).skip_from >= 0) gates_of(l).skip = append(net_of(l), 1, kSkipGate);
  }
  for (int l = 0; l <= last; ++l) {
    if (!model.layer(l).dc) continue;
    gates_of(l).w1 = append(net_of(l), heads, 1);
    gates_of(l).w2 = append(net_of(l), heads, 0);
  }
  layout.pre.name = "gate.pre";
  layout.post.name = "gate.post";
  if (model.mudd) {
    const float resid = static_cast<float>(std::sqrt(1.1));
    layout.mix = {"mudd.mix", {0, 0, 0, 0, 0, 0, kValueGate, kValueGate, resid, 1, 0, kBigramGate, resid, 1}};
    layout.out = {"mudd.out", {0, kBackout, 0, 0, 0}};
  }
  return layout;
}

}  // namespace speedrun
