#include "src/model/main_track.h"

#include <algorithm>
#include <cmath>

#include "fmt/format.h"
#include "kernels/dc_attention/dc_attention.h"
#include "kernels/embedding/bigram.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gate_net/gate_net.h"
#include "kernels/norm/norm.h"
#include "kernels/smear/smear.h"
#include "kernels/value_gate/value_gate.h"
#include "src/model/parameter_table.h"

namespace speedrun {

namespace {

const double kResidFactor = std::sqrt(1.1);  // λ_resid's start: 1.1 a layer

}  // namespace

template <class T>
MainTrack<T>::MainTrack(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device,
                        Parameters<T>& parameters)
    : Model<T>(config, shape, std::move(stages), device, parameters),
      gates_(gate_layout(config.model)),
      vocabulary_(config.model.padded_vocab_size()) {
  pre_.layout = gates_.pre;
  post_.layout = gates_.post;
  mix_net_.layout = gates_.mix;
  out_net_.layout = gates_.out;
  layers_.resize(static_cast<size_t>(config_.num_layers));
  for (Layer& layer : layers_) {
    layer.index = static_cast<int>(&layer - layers_.data());
    layer.on = config_.layer(layer.index);
    layer.gates = gates_.layers[static_cast<size_t>(layer.index)];
    layer.mudd = config_.mudd && layer.index == config_.num_layers - 1;
    if (layer.on.value_embedding && first_value_layer_ < 0) first_value_layer_ = layer.index;
    if (layer.on.input_from >= 0) {
      require(shared_from_ < 0 || shared_from_ == layer.on.input_from, "model.layers.", layer.index,
              ".input_from: ", layer.on.input_from, ", but another layer reads from layer ", shared_from_,
              ": all shared inputs come from one layer");
      shared_from_ = layer.on.input_from;
    }
  }
}

// Is the stream after this layer read by more than the next layer?
template <class T>
bool MainTrack<T>::is_snapshot(int layer) const {
  if (layer == shared_from_) return true;
  if (config_.mudd && (layer == config_.mudd_early || layer == config_.mudd_late || layer == config_.num_layers - 2)) return true;
  return std::any_of(layers_.begin(), layers_.end(), [&](const Layer& other) { return other.on.skip_from == layer; });
}

template <class T>
void MainTrack<T>::plan_layer(MemoryPlan& memory, Activations& act, const Config::Model::Layer& on, bool mudd) {
  const int64_t n = shape_.max_tokens, C = config_.width, F = config_.mlp_hidden, H = config_.num_heads;
  if (on.attention) {
    if (on.input_from < 0) {
      memory.add("activations: norms", &act.norm1, n * C);
      memory.add("norm statistics", &act.norm1_rstd, n);
    }
    memory.add("activations: q, k, v", &act.q, n * C);
    memory.add("activations: q, k, v", &act.k, n * C);
    memory.add("activations: q, k, v", &act.v, n * C);
    memory.add("norm statistics", &act.qk_rstd, n * 2 * H);
    // A row is at least one token long.
    if (on.key_offset) memory.add("activations: q, k, v", &act.key_tail, n * C / 2);
    if (on.value_embedding) {
      memory.add("activations: value embeddings", &act.value, n * C);
      if (!mudd) memory.add("activations: value embeddings", &act.value_gate, n * H);
    }
    memory.add("activations: attention", &act.y, n * C);
    memory.add("activations: attention", &act.lse, H * n);
    if (on.dc) {
      memory.add("activations: attention", &act.y_dc, n * C);
      memory.add("activations: attention", &act.dc_lse, H * n);
    }
    if (on.xsa || on.gate) memory.add("activations: attention", &act.y_gated, n * C);
    memory.add("activations: attention", &act.attn_out, n * C);
  }
  if (on.attention || on.skip_from >= 0) memory.add("activations: residual stream", &act.mid, n * C);
  memory.add("activations: norms", &act.norm2, n * C);
  memory.add("norm statistics", &act.norm2_rstd, n);
  memory.add("activations: MLP", &act.post, n * F);
  memory.add("activations: MLP", &act.mlp_out, n * C);
}

template <class T>
void MainTrack<T>::plan_net(MemoryPlan& memory, GateNet& net) {
  if (!net.layout.exists()) return;
  memory.add("activations: gates", &net.out, shape_.max_tokens * net.layout.columns());
  memory.add("activations: gates", &net.hidden, shape_.max_tokens * config_.gate_hidden);
  if (shape_.training) memory.add("activation gradients", &net.dout, shape_.max_tokens * net.layout.columns());
}

template <class T>
void MainTrack<T>::plan(MemoryPlan& memory) {
  const int64_t n = shape_.max_tokens, C = config_.width;
  memory.add("batch", &tokens_, n);
  memory.add("batch", &targets_, n);
  memory.add("batch", &doc_start_, n);
  memory.add("losses", &losses_, n);
  memory.add("rotary frequencies", &frequencies_, static_cast<int64_t>(stages_.size()) * (C / config_.num_heads / 4));
  if (std::any_of(stages_.begin(), stages_.end(), [](const ModelStage& each) { return each.prefix_loss; }))
    memory.add("batch", &prefix_, vocabulary_);
  if (std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.on.paired_heads; }))
    memory.add("batch", &paired_doc_start_, 2 * n);

  memory.add("activations: residual stream", &embedded_, n * C);
  if (config_.smear) memory.add("activations: residual stream", &smeared_, n * C);
  memory.add("activations: residual stream", &x0_, n * C);
  memory.add("norm statistics", &x0_rstd_, n);
  if (config_.bigram_rows > 0) {
    memory.add("activations: residual stream", &bigram_, n * C);
    memory.add("activations: residual stream", &bigram_index_, n);
    if (config_.bigram_sign_rows > 0) memory.add("activations: residual stream", &sign_row_, n);
    memory.add("activations: residual stream", &c0_, n * C);
  }
  for (GateNet* net : {&pre_, &post_, &mix_net_, &out_net_}) plan_net(memory, *net);
  if (shape_.training) {
    for (Layer& layer : layers_) {
      plan_layer(memory, layer.act, layer.on, layer.mudd);
      memory.add("activations: residual stream", &layer.act.out, n * C);
    }
  } else {
    // Without gradients every layer works in the first one's buffers, which are those of a layer with every feature in use;
    // snapshots alone have their own (bind_parameters).
    Config::Model::Layer all{.attention = false};
    for (const Layer& layer : layers_) {
      all.attention = all.attention || layer.on.attention;
      all.key_offset = all.key_offset || layer.on.key_offset;
      all.value_embedding = all.value_embedding || layer.on.value_embedding;
      all.xsa = all.xsa || layer.on.xsa;
      all.gate = all.gate || layer.on.gate;
      all.dc = all.dc || layer.on.dc;
      all.skip_from = std::max(all.skip_from, layer.on.skip_from);
    }
    plan_layer(memory, layers_[0].act, all, false);
    memory.add("activations: residual stream", &rolling_out_, n * C);
    for (Layer& layer : layers_) {
      if (is_snapshot(layer.index)) memory.add("activations: residual stream", &layer.act.out, n * C);
    }
    if (config_.mudd && first_value_layer_ > 0)
      memory.add("activations: value embeddings", &layers_[static_cast<size_t>(first_value_layer_)].act.value, n * C);
  }
  if (shared_from_ >= 0) {
    memory.add("activations: norms", &shared_norm_, n * C);
    memory.add("norm statistics", &shared_norm_rstd_, n);
  }
  if (config_.mudd) {
    memory.add("activations: residual stream", &mudd_values_, n * C);
    memory.add("activations: residual stream", &mudd_stream_, n * C);
    memory.add("activations: residual stream", &final_, n * C);
  }
  memory.add("activations: norms", &norm_out_, n * C);
  memory.add("norm statistics", &norm_out_rstd_, n);
  memory.add("scratch", &raw_, n * 3 * C);
  memory.add("logits", &logits_, shape_.logits_chunk * vocabulary_);
  if (config_.weight_lambdas) {
    int64_t items = 0;
    for (Layer& layer : layers_) {
      if (!layer.on.attention) continue;
      memory.add("weights times their factors", &layer.qkv_scaled, 3 * C * C);
      memory.add("weights times their factors", &layer.out_scaled, C * C);
      items += 2;
    }
    memory.add("weights times their factors", &scaled_items_, items);
    memory.add("scratch", &scaled_scratch_, kernels::scaled_weights_scratch(static_cast<int>(items)));
  }
  if (!shape_.training) return;
  plan_backward(memory);
  plan_fp8(memory);
}

template <class T>
void MainTrack<T>::plan_backward(MemoryPlan& memory) {
  const int64_t n = shape_.max_tokens, C = config_.width, F = config_.mlp_hidden, H = config_.num_heads, G = config_.gate_hidden;
  const int width = config_.width;
  const auto add = [&](GradSlot& slot) { memory.add("activation gradients", &slot.data, n * C); };
  for (GradSlot* slot : {&dstream_, &dx0_, &dbranch_, &dnorm_}) add(*slot);
  if (config_.bigram_rows > 0) add(dbigram_);
  if (config_.mudd) {
    add(dc0_);
    add(dlast_);
    add(dvalue0_);
  }
  // The stream after a layer that later layers read again.
  other_slots_.resize(layers_.size());
  for (const Layer& layer : layers_) {
    if (!is_snapshot(layer.index)) continue;
    const bool last_input = config_.mudd && layer.index == config_.num_layers - 2;
    GradSlot& slot = last_input ? dlast_ : other_slots_[static_cast<size_t>(layer.index)];
    if (!last_input) add(slot);
    snapshot_slots_.emplace_back(layer.index, &slot);
  }
  if (first_value_layer_ >= 0) {
    add(dvalue_);
    memory.add("activation gradients", &dvalue_gate_, n * H);
  }
  for (T** plane : {&dq_, &dk_, &dv_, &dy_}) memory.add("activation gradients", plane, n * C);
  if (std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.on.xsa; }))
    memory.add("activation gradients", &dv_xsa_, n * C);
  memory.add("activation gradients", &dhidden_, n * F);
  memory.add("activation gradients", &dnet_hidden_, n * G);
  memory.add("activation gradients", &delta_, H * n);
  int64_t scratch = std::max({kernels::norm_backward_scratch(n, width), kernels::stream_mix_scratch(n), kernels::smear_scratch(n),
                              kernels::value_gate_scratch(n, config_.num_heads, config_.value_gate_channels)});
  for (const GateNet* net : {&pre_, &post_, &mix_net_, &out_net_})
    if (net->layout.exists()) scratch = std::max(scratch, kernels::gate_net_scratch(n, config_.gate_hidden, net->layout.columns()));
  memory.add("scratch", &scratch_, scratch);
  const auto rows = static_cast<int>(std::max(vocabulary_, config_.bigram_rows));
  memory.add_bytes("scratch", &sort_scratch_, kernels::embedding_backward_scratch(n, width, rows));
  if (std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.on.dc; }))
    memory.add_bytes("scratch", &dc_scratch_, kernels::dc_attention_scratch(n, config_.num_heads, config_.dc_window - 1));
}

template <class T>
void MainTrack<T>::bind_net(GateNet& net, bool learned_scale) {
  if (!net.layout.exists()) return;
  const auto bind = [&](const char* part, T*& value, Acc<T>*& grad) {
    value = parameters_.value(net.layout.name + part);
    grad = parameters_.grad(net.layout.name + part);
  };
  bind(".w1", net.w1, net.dw1);
  bind(".w2", net.w2, net.dw2);
  bind(".bias", net.bias, net.dbias);
  net.scale = learned_scale ? parameters_.value("gate.scale") : nullptr;
  net.dscale = learned_scale ? parameters_.grad("gate.scale") : nullptr;
}

template <class T>
void MainTrack<T>::bind_parameters() {
  const auto bind = [&](const std::string& name, T*& value, Acc<T>*& grad) {
    value = parameters_.value(name);
    grad = parameters_.grad(name);
  };
  bind("wte", wte_, dwte_);
  bind("head.weight", head_weight_, dhead_weight_);
  bind("bigram.table", bigram_table_, dbigram_table_);
  sign_ = parameters_.value("bigram.sign");
  bind("smear.gate", smear_gate_, dsmear_gate_);
  bind("lambda.smear", smear_lambda_, dsmear_lambda_);
  bind("lambda.skip", skip_lambda_, dskip_lambda_);
  bind("lambda.resid", resid_lambda_, dresid_lambda_);
  bind("lambda.post", post_lambda_, dpost_lambda_);
  bind("lambda.weight", weight_lambda_, dweight_lambda_);
  bind_net(pre_, true);
  bind_net(post_, true);
  bind_net(mix_net_, false);
  bind_net(out_net_, false);
  for (Layer& layer : layers_) {
    if (!shape_.training) {
      T *const own_out = layer.act.out, *const own_value = layer.act.value;
      layer.act = layers_[0].act;
      layer.act.out = own_out != nullptr ? own_out : rolling_out_;
      if (own_value != nullptr) layer.act.value = own_value;
    }
    const std::string name = fmt::format("h.{}.", layer.index);
    if (layer.on.attention) {
      T* v = nullptr;
      Acc<T>* dv = nullptr;
      bind(name + "attn.qk.weight", layer.qkv_weight, layer.dqkv_weight);
      bind(name + "attn.v.weight", v, dv);
      const int64_t qk_count = int64_t{2} * config_.width * config_.width;
      require(v == layer.qkv_weight + qk_count, "internal: q, k and v weights of layer ", layer.index, " are not neighbours");
      bind(name + "attn.out.weight", layer.out_weight, layer.dout_weight);
      bind(name + "value.table", layer.value_table, layer.dvalue_table);
      bind(name + "value.gate", layer.value_gate_weight, layer.dvalue_gate_weight);
    }
    bind(name + "mlp.up.weight", layer.up_weight, layer.dup_weight);
    bind(name + "mlp.down.weight", layer.down_weight, layer.ddown_weight);
  }
  if (c0_ == nullptr) c0_ = x0_;
}

template <class T>
void MainTrack<T>::prepare_weights() {
  if (!config_.weight_lambdas) return;
  const int64_t square = int64_t{config_.width} * config_.width;
  scaled_host_.clear();
  for (Layer& layer : layers_) {
    if (!layer.on.attention) continue;
    const int64_t at = 2 * layer.index;
    Acc<T>* const dlambda = dweight_lambda_;
    scaled_host_.push_back({layer.qkv_scaled, layer.qkv_weight, weight_lambda_ + at, layer.dqkv_weight,
                            dlambda == nullptr ? nullptr : dlambda + at, 3 * square});
    scaled_host_.push_back({layer.out_scaled, layer.out_weight, weight_lambda_ + at + 1, layer.dout_weight,
                            dlambda == nullptr ? nullptr : dlambda + at + 1, square});
    layer.qkv_weight = layer.qkv_scaled;
    layer.out_weight = layer.out_scaled;
  }
  device_.copy_in(scaled_items_, scaled_host_.data(), scaled_host_.size() * sizeof(scaled_host_[0]));
}

template <class T>
void MainTrack<T>::prepare() {
  bind_parameters();
  prepare_weights();
  if (shape_.training) prepare_fp8();
  std::vector<Acc<T>> frequencies;
  for (const ModelStage& each : stages_)
    for (const double f : each.rotary_frequencies) frequencies.push_back(static_cast<Acc<T>>(f));
  const size_t expected = stages_.size() * static_cast<size_t>(config_.width / config_.num_heads / 4);
  require(frequencies.size() == expected, "internal: ", frequencies.size(), " rotary frequencies, expected ", expected);
  device_.copy_in(frequencies_, frequencies.data(), frequencies.size() * sizeof(Acc<T>));
  const std::vector<int32_t> none(static_cast<size_t>(vocabulary_), -1);
  if (prefix_ != nullptr) device_.copy_in(prefix_, none.data(), none.size() * sizeof(int32_t));
  device_.synchronize();
}

template <class T>
int64_t MainTrack<T>::window(const Layer& layer) const {
  if (layer.on.window == WindowKind::short_window) return stage().window_short;
  if (layer.on.window == WindowKind::long_window) return stage().window_long;
  return 0;
}

template <class T>
typename MainTrack<T>::HeadView MainTrack<T>::head_view(const Layer& layer) const {
  const int C = config_.width, H = config_.num_heads;
  if (layer.on.paired_heads) return {paired_doc_start_, 2 * N(), C / 2, H / 2};
  return {doc_start_, N(), C, H};
}

template <class T>
typename MainTrack<T>::ValueGate MainTrack<T>::value_gate(const Layer& layer) const {
  if (!layer.on.value_embedding) return {nullptr, nullptr, 0, 1};
  if (!layer.mudd) return {layer.act.value_gate, dvalue_gate_, config_.num_heads, 1};
  const auto grad = mix_net_.dout == nullptr ? nullptr : mix_net_.dout + 6;
  return {mix_net_.out + 6, grad, mix_net_.layout.columns(), (config_.num_heads + 1) / 2};
}

template <class T>
int MainTrack<T>::first_shared_reader() const {
  for (const Layer& layer : layers_) {
    if (layer.on.input_from >= 0) return layer.index;
  }
  return -1;
}

template <class T>
const Acc<T>* MainTrack<T>::frequencies() const {
  return frequencies_ + static_cast<int64_t>(pass_.stage) * (config_.width / config_.num_heads / 4);
}

template <class T>
kernels::ScaledWeights<T> MainTrack<T>::scaled_weights() const {
  return {.items = scaled_items_, .scratch = scaled_scratch_, .num_items = static_cast<int>(scaled_host_.size())};
}

template <class T>
void MainTrack<T>::derive_weights() {
  if (scaled_host_.empty()) return;
  kernels::scaled_weights_forward(scaled_weights(), exec());
}

template <class T>
typename MainTrack<T>::MixPart MainTrack<T>::plain(const T* src, GradSlot& grad, double factor) const {
  return {.term = {.src = src, .gate_add = factor}, .grad = &grad};
}

template <class T>
typename MainTrack<T>::MixPart MainTrack<T>::gated(const T* src, GradSlot& grad, GateNet& net, int column, double add) const {
  return {.term = {.src = src, .gate = net.out + column, .gate_stride = net.layout.columns(), .gate_add = add},
          .grad = &grad,
          .dgate = net.dout == nullptr ? nullptr : net.dout + column};
}

// A learned factor, or a constant where the model has none.
template <class T>
typename MainTrack<T>::MixPart MainTrack<T>::learned(const T* src, GradSlot& grad, T* lambdas, Acc<T>* dlambdas, int index,
                                                     double otherwise) const {
  if (lambdas == nullptr) return plain(src, grad, otherwise);
  return {.term = {.src = src, .scalar = lambdas + index, .gate_add = 1},
          .grad = &grad,
          .dscalar = dlambdas == nullptr ? nullptr : dlambdas + index};
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::stream_start() {
  Mix mix{plain(x0_, dx0_)};
  const LayerGates& gates = layers_[0].gates;
  if (gates.bigram >= 0) mix.push_back(gated(bigram_, dbigram_, net_of(gates), gates.bigram));
  return mix;
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::attention_mix(Layer& layer) {
  const T* stream = layer.mudd ? mudd_stream_ : stream_into(layer);
  if (layer.mudd) {
    Mix mix{gated(stream, dstream_, mix_net_, 8), gated(layer.act.attn_out, dbranch_, mix_net_, 9)};
    if (config_.x0_injection) mix.push_back(gated(c0_, dc0_, mix_net_, 10));
    if (config_.bigram_rows > 0) mix.push_back(gated(bigram_, dbigram_, mix_net_, 11));
    return mix;
  }
  const int at = 2 * layer.index;
  Mix mix{learned(stream, dstream_, resid_lambda_, dresid_lambda_, at, kResidFactor),
          learned(layer.act.attn_out, dbranch_, post_lambda_, dpost_lambda_, at, 1)};
  if (layer.gates.x0 >= 0) mix.push_back(gated(x0_, dx0_, net_of(layer.gates), layer.gates.x0));
  // Layer 0's bigram share went in before it.
  if (layer.gates.bigram >= 0 && layer.index > 0) mix.push_back(gated(bigram_, dbigram_, net_of(layer.gates), layer.gates.bigram));
  return mix;
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::skip_mix(Layer& layer) {
  MixPart skip = gated(stream_after(layer.on.skip_from), slot_after(layer.on.skip_from), net_of(layer.gates), layer.gates.skip);
  skip.term.scalar = skip_lambda_;
  skip.term.sigmoid = true;
  skip.dscalar = dskip_lambda_;
  return {plain(stream_into(layer), dstream_), skip};
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::mlp_mix(Layer& layer) {
  if (layer.mudd) return {gated(layer.act.mid, dstream_, mix_net_, 12), gated(layer.act.mlp_out, dbranch_, mix_net_, 13)};
  const int at = 2 * layer.index + 1;
  return {learned(layer.act.mid, dstream_, resid_lambda_, dresid_lambda_, at, kResidFactor),
          learned(layer.act.mlp_out, dbranch_, post_lambda_, dpost_lambda_, at, 1)};
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::mudd_values(Layer& layer) {
  return {gated(c0_, dc0_, mix_net_, 0), gated(stream_after(config_.mudd_late), slot_after(config_.mudd_late), mix_net_, 1),
          gated(stream_into(layer), dlast_, mix_net_, 2)};
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::mudd_stream(Layer& layer) {
  return {gated(stream_into(layer), dstream_, mix_net_, 5, 1), gated(c0_, dc0_, mix_net_, 3),
          gated(stream_after(config_.mudd_late), slot_after(config_.mudd_late), mix_net_, 4)};
}

template <class T>
typename MainTrack<T>::Mix MainTrack<T>::mudd_out() {
  const int last = config_.num_layers - 1;
  Mix mix{plain(stream_after(last), dstream_), gated(c0_, dc0_, out_net_, 0),
          gated(stream_after(config_.mudd_late), slot_after(config_.mudd_late), out_net_, 1),
          gated(stream_after(last - 1), dlast_, out_net_, 2)};
  if (first_value_layer_ >= 0)
    mix.push_back(gated(layers_[static_cast<size_t>(first_value_layer_)].act.value, dvalue0_, out_net_, 3));
  mix.push_back(gated(stream_after(config_.mudd_early), slot_after(config_.mudd_early), out_net_, 4));
  return mix;
}

template <class T>
typename MainTrack<T>::GradSlot& MainTrack<T>::slot_after(int layer) {
  for (auto& [index, slot] : snapshot_slots_) {
    if (index == layer) return *slot;
  }
  return no_slot_;
}

template <class T>
void MainTrack<T>::evaluate() {
  forward(false);
  head(nullptr, nullptr);
}

template <class T>
void MainTrack<T>::forward_backward(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) {
  forward(true);
  head(grad_scale, weights);
  backward();
}

template <class T>
std::vector<float> MainTrack<T>::logits_at(int64_t position) {
  forward(false);
  return this->read_logits(logits_, norm_out_ + position * config_.width, head_weight_, nullptr);
}

template class MainTrack<float>;
template class MainTrack<double>;
#if SPEEDRUN_HAS_CUDA
template class MainTrack<bf16>;
#endif

}  // namespace speedrun
