#include "src/model/gpt.h"

#include <algorithm>
#include <cmath>

#include "fmt/format.h"
#include "kernels/attention/attention.h"
#include "kernels/embedding/embedding.h"
#include "kernels/head/head_loss.h"
#include "kernels/linear/linear.h"
#include "kernels/mlp/mlp.h"
#include "kernels/norm/norm.h"
#include "kernels/qkv/qkv.h"
#include "src/model/parameter_table.h"

namespace speedrun {
namespace {

kernels::Norm norm_kind(NormKind kind) { return kind == NormKind::rmsnorm ? kernels::Norm::rms : kernels::Norm::layer; }

kernels::Activation activation(ActivationKind kind) {
  return kind == ActivationKind::gelu ? kernels::Activation::gelu : kernels::Activation::relu2;
}

double attention_scale(const Config::Model& model) {
  const int head_size = model.width / model.num_heads;
  return model.attention_scale > 0 ? model.attention_scale : 1 / std::sqrt(static_cast<double>(head_size));
}

}  // namespace

template <class T>
Gpt<T>::Gpt(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device,
            Parameters<T>& parameters)
    : Model<T>(config, shape, std::move(stages), device, parameters), vocabulary_(config.model.padded_vocab_size()) {
  blocks_.resize(static_cast<size_t>(config_.num_layers));
  for (size_t l = 0; l < blocks_.size(); ++l) {
    blocks_[l] = Block{};
    blocks_[l].window = config_.layer(static_cast<int>(l)).window;
  }
}

template <class T>
int64_t Gpt<T>::window(const Block& block) const {
  if (block.window == WindowKind::short_window) return stage().window_short;
  if (block.window == WindowKind::long_window) return stage().window_long;
  return 0;
}

template <class T>
void Gpt<T>::plan(MemoryPlan& memory) {
  const int64_t N = shape_.max_tokens, C = config_.width, F = config_.mlp_hidden, H = config_.num_heads, V = vocabulary_;
  const bool layer_norm = config_.norm == NormKind::layernorm;
  const auto stats = [&](Acc<T>** mean, Acc<T>** rstd) {
    if (layer_norm) memory.add("norm statistics", mean, N);
    memory.add("norm statistics", rstd, N);
  };
  memory.add("batch", &tokens_, N);
  memory.add("batch", &targets_, N);
  memory.add("batch", &doc_start_, N);
  memory.add("losses", &losses_, N);
  if (config_.positions == PositionKind::rotary) {
    memory.add("rotary tables", &rotary_cos_, shape_.max_row_tokens * (C / H / 2));
    memory.add("rotary tables", &rotary_sin_, shape_.max_row_tokens * (C / H / 2));
  }
  if (config_.embedding_norm) {
    memory.add("activations: residual stream", &embedded_, N * C);
    stats(&norm_in_mean_, &norm_in_rstd_);
  }
  for (Block& block : blocks_) {
    // Without gradients nothing is kept: every layer works in the first layer's buffers, see bind_parameters().
    if (!shape_.training && &block != &blocks_[0]) break;
    memory.add("activations: residual stream", &block.stream_in, N * C);
    memory.add("activations: residual stream", &block.stream_mid, N * C);
    memory.add("activations: norms", &block.norm1, N * C);
    memory.add("activations: norms", &block.norm2, N * C);
    memory.add("activations: q, k, v", &block.qkv, N * 3 * C);
    memory.add("activations: attention", &block.attended, N * C);
    memory.add("activations: attention", &block.lse, H * N);
    if (config_.qk_norm) memory.add("norm statistics", &block.qk_rstd, N * 2 * H);
    if (config_.activation == ActivationKind::gelu) memory.add("activations: MLP", &block.pre, N * F);
    memory.add("activations: MLP", &block.post, N * F);
    stats(&block.norm1_mean, &block.norm1_rstd);
    stats(&block.norm2_mean, &block.norm2_rstd);
  }
  memory.add("activations: residual stream", &stream_out_, N * C);
  memory.add("activations: norms", &norm_out_, N * C);
  stats(&norm_out_mean_, &norm_out_rstd_);
  memory.add("logits", &logits_, shape_.logits_chunk * V);
  if (!shape_.training) return;
  memory.add("activation gradients", &dstream_, N * C);
  memory.add("activation gradients", &dbranch_, N * C);
  memory.add("activation gradients", &dqkv_, N * 3 * C);
  memory.add("activation gradients", &dhidden_, N * F);
  memory.add("activation gradients", &delta_, H * N);
  const int64_t column_sums = std::max({kernels::norm_backward_scratch(N, config_.width),
                                        kernels::bias_grad_scratch(N, static_cast<int>(std::max(3 * C, F))),
                                        kernels::bias_grad_scratch(shape_.logits_chunk, static_cast<int>(V))});
  memory.add("scratch", &scratch_, column_sums);
  memory.add_bytes("scratch", &sort_scratch_, kernels::embedding_backward_scratch(N, config_.width, static_cast<int>(V)));
}

template <class T>
void Gpt<T>::bind_parameters() {
  const auto bind = [&](const std::string& name, T*& value, Acc<T>*& grad) {
    value = parameters_.value(name);
    grad = parameters_.grad(name);
  };
  bind("wte", wte_, dwte_);
  bind("wpe", wpe_, dwpe_);
  bind("norm_in.gain", norm_in_gain_, dnorm_in_gain_);
  bind("norm_in.shift", norm_in_shift_, dnorm_in_shift_);
  bind("norm_out.gain", norm_out_gain_, dnorm_out_gain_);
  bind("norm_out.shift", norm_out_shift_, dnorm_out_shift_);
  bind(config_.tied_head ? "wte" : "head.weight", head_weight_, dhead_weight_);
  bind("head.bias", head_bias_, dhead_bias_);
  for (size_t l = 0; l < blocks_.size(); ++l) {
    Block& block = blocks_[l];
    if (!shape_.training && l > 0) {
      const WindowKind window = block.window;
      block = blocks_[0];
      block.window = window;
    }
    const std::string layer = fmt::format("h.{}.", l);
    bind(layer + "norm1.gain", block.norm1_gain, block.dnorm1_gain);
    bind(layer + "norm1.shift", block.norm1_shift, block.dnorm1_shift);
    bind(layer + "attn.qkv.weight", block.qkv_weight, block.dqkv_weight);
    bind(layer + "attn.qkv.bias", block.qkv_bias, block.dqkv_bias);
    bind(layer + "attn.out.weight", block.out_weight, block.dout_weight);
    bind(layer + "attn.out.bias", block.out_bias, block.dout_bias);
    bind(layer + "norm2.gain", block.norm2_gain, block.dnorm2_gain);
    bind(layer + "norm2.shift", block.norm2_shift, block.dnorm2_shift);
    bind(layer + "mlp.up.weight", block.up_weight, block.dup_weight);
    bind(layer + "mlp.up.bias", block.up_bias, block.dup_bias);
    bind(layer + "mlp.down.weight", block.down_weight, block.ddown_weight);
    bind(layer + "mlp.down.bias", block.down_bias, block.ddown_bias);
  }
}

template <class T>
void Gpt<T>::prepare() {
  bind_parameters();
  if (config_.positions != PositionKind::rotary) return;
  const int half = config_.width / config_.num_heads / 2;
  const int rotating = static_cast<int>(std::lround(config_.rotary_fraction * half));
  std::vector<Acc<T>> cosines(static_cast<size_t>(shape_.max_row_tokens * half), 1), sines(cosines.size(), 0);
  for (int64_t t = 0; t < shape_.max_row_tokens; ++t) {
    for (int i = 0; i < rotating; ++i) {
      const double frequency = rotating > 1 ? std::pow(config_.rotary_base, -static_cast<double>(i) / (rotating - 1)) : 1;
      const auto at = static_cast<size_t>(t * half + i);
      cosines[at] = static_cast<Acc<T>>(std::cos(static_cast<double>(t) * frequency));
      sines[at] = static_cast<Acc<T>>(std::sin(static_cast<double>(t) * frequency));
    }
  }
  device_.copy_in(rotary_cos_, cosines.data(), cosines.size() * sizeof(Acc<T>));
  device_.copy_in(rotary_sin_, sines.data(), sines.size() * sizeof(Acc<T>));
  device_.synchronize();
}

template <class T>
void Gpt<T>::norm_forward(T* out, Acc<T>* mean, Acc<T>* rstd, const T* inp, const T* gain, const T* shift) {
  kernels::norm_forward(kernels::NormForward<T>{.out = out,
                                                .mean = mean,
                                                .rstd = rstd,
                                                .inp = inp,
                                                .gain = gain,
                                                .shift = shift,
                                                .N = pass_.tokens,
                                                .C = config_.width,
                                                .eps = config_.norm_eps,
                                                .kind = norm_kind(config_.norm)},
                        exec());
}

template <class T>
void Gpt<T>::norm_backward(const T* dout, const T* inp, const Acc<T>* mean, const Acc<T>* rstd, const T* gain, Acc<T>* dgain,
                           Acc<T>* dshift, bool add) {
  kernels::norm_backward(kernels::NormBackward<T>{.dinp = dstream_,
                                                  .dinp_add = add ? dstream_ : nullptr,
                                                  .dgain = dgain,
                                                  .dshift = dshift,
                                                  .dout = dout,
                                                  .inp = inp,
                                                  .mean = mean,
                                                  .rstd = rstd,
                                                  .gain = gain,
                                                  .scratch = scratch_,
                                                  .N = pass_.tokens,
                                                  .C = config_.width,
                                                  .kind = norm_kind(config_.norm)},
                         exec());
}

template <class T>
T* Gpt<T>::stream_after(int layer) {
  const auto next = static_cast<size_t>(layer + 1);
  if (next == blocks_.size()) return stream_out_;
  return shape_.training ? blocks_[next].stream_in : blocks_[0].stream_in;
}

template <class T>
void Gpt<T>::forward() {
  const int64_t N = pass_.tokens;
  T* first = blocks_[0].stream_in;
  kernels::embedding_forward(kernels::EmbeddingForward<T>{.out = config_.embedding_norm ? embedded_ : first,
                                                          .wte = wte_,
                                                          .wpe = wpe_,
                                                          .tokens = tokens_,
                                                          .N = N,
                                                          .row_tokens = pass_.row_tokens,
                                                          .C = config_.width},
                             exec());
  if (config_.embedding_norm) norm_forward(first, norm_in_mean_, norm_in_rstd_, embedded_, norm_in_gain_, norm_in_shift_);
  for (int l = 0; l < config_.num_layers; ++l) forward_block(blocks_[static_cast<size_t>(l)], stream_after(l));
  norm_forward(norm_out_, norm_out_mean_, norm_out_rstd_, stream_out_, norm_out_gain_, norm_out_shift_);
}

template <class T>
void Gpt<T>::forward_block(Block& block, T* stream_out) {
  const int64_t N = pass_.tokens;
  const int C = config_.width, H = config_.num_heads;
  norm_forward(block.norm1, block.norm1_mean, block.norm1_rstd, block.stream_in, block.norm1_gain, block.norm1_shift);
  kernels::qkv_forward(kernels::QkvForward<T>{.qkv = block.qkv,
                                              .qk_rstd = block.qk_rstd,
                                              .inp = block.norm1,
                                              .weight = block.qkv_weight,
                                              .bias = block.qkv_bias,
                                              .rotary_cos = rotary_cos_,
                                              .rotary_sin = rotary_sin_,
                                              .N = N,
                                              .row_tokens = pass_.row_tokens,
                                              .C = C,
                                              .H = H,
                                              .eps = config_.norm_eps},
                       exec());
  kernels::attention_forward(kernels::AttentionForward<T>{.out = block.attended,
                                                          .lse = block.lse,
                                                          .q = block.qkv,
                                                          .k = block.qkv + C,
                                                          .v = block.qkv + 2 * C,
                                                          .doc_start = doc_start_,
                                                          .N = N,
                                                          .stride = 3 * C,
                                                          .H = H,
                                                          .D = C / H,
                                                          .window = window(block),
                                                          .scale = attention_scale(config_)},
                             exec());
  kernels::linear_forward(kernels::LinearForward<T>{.out = block.stream_mid,
                                                    .inp = block.attended,
                                                    .weight = block.out_weight,
                                                    .bias = block.out_bias,
                                                    .residual = block.stream_in,
                                                    .N = N,
                                                    .K = C,
                                                    .O = C},
                          exec());
  norm_forward(block.norm2, block.norm2_mean, block.norm2_rstd, block.stream_mid, block.norm2_gain, block.norm2_shift);
  kernels::mlp_forward(kernels::MlpForward<T>{.out = stream_out,
                                              .post = block.post,
                                              .pre = block.pre,
                                              .inp = block.norm2,
                                              .residual = block.stream_mid,
                                              .up_weight = block.up_weight,
                                              .up_bias = block.up_bias,
                                              .down_weight = block.down_weight,
                                              .down_bias = block.down_bias,
                                              .N = N,
                                              .C = C,
                                              .F = config_.mlp_hidden,
                                              .activation = activation(config_.activation)},
                       exec());
}

template <class T>
void Gpt<T>::head(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) {
  const bool with_gradients = grad_scale != nullptr;
  kernels::head_loss(kernels::HeadLoss<T>{.loss = losses_,
                                          .dinp = with_gradients ? dbranch_ : nullptr,
                                          .dweight = with_gradients ? dhead_weight_ : nullptr,
                                          .dbias = with_gradients ? dhead_bias_ : nullptr,
                                          .inp = norm_out_,
                                          .weight = head_weight_,
                                          .bias = head_bias_,
                                          .targets = targets_,
                                          .loss_weights = stage().loss_terms > 1 ? weights : nullptr,
                                          .loss_terms = stage().loss_terms,
                                          .prefix = nullptr,
                                          .row_tokens = pass_.row_tokens,
                                          .grad_scale = grad_scale,
                                          .logits = logits_,
                                          .scratch = scratch_,
                                          .N = pass_.tokens,
                                          .chunk = shape_.logits_chunk,
                                          .C = config_.width,
                                          .V = static_cast<int>(vocabulary_),
                                          .softcap = softcap_of(config_.softcap),
                                          .softcap_value = config_.softcap_value},
                     exec());
}

template <class T>
void Gpt<T>::evaluate() {
  forward();
  head(nullptr, nullptr);
}

template <class T>
void Gpt<T>::forward_backward(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) {
  forward();
  head(grad_scale, weights);
  norm_backward(dbranch_, stream_out_, norm_out_mean_, norm_out_rstd_, norm_out_gain_, dnorm_out_gain_, dnorm_out_shift_, false);
  for (size_t l = blocks_.size(); l-- > 0;) backward_block(blocks_[l]);
  if (config_.embedding_norm) {
    norm_backward(dstream_, embedded_, norm_in_mean_, norm_in_rstd_, norm_in_gain_, dnorm_in_gain_, dnorm_in_shift_, false);
  }
  kernels::embedding_backward(kernels::EmbeddingBackward<T>{.dwte = dwte_,
                                                            .dwpe = dwpe_,
                                                            .dout = dstream_,
                                                            .tokens = tokens_,
                                                            .scratch = sort_scratch_,
                                                            .N = pass_.tokens,
                                                            .row_tokens = pass_.row_tokens,
                                                            .C = config_.width,
                                                            .V = static_cast<int>(vocabulary_)},
                              exec());
}

template <class T>
void Gpt<T>::backward_block(Block& block) {
  const int64_t N = pass_.tokens;
  const int C = config_.width, H = config_.num_heads;
  kernels::mlp_backward(kernels::MlpBackward<T>{.dinp = dbranch_,
                                                .dup_weight = block.dup_weight,
                                                .dup_bias = block.dup_bias,
                                                .ddown_weight = block.ddown_weight,
                                                .ddown_bias = block.ddown_bias,
                                                .dhidden = dhidden_,
                                                .dout = dstream_,
                                                .inp = block.norm2,
                                                .pre = block.pre,
                                                .post = block.post,
                                                .up_weight = block.up_weight,
                                                .down_weight = block.down_weight,
                                                .scratch = scratch_,
                                                .N = N,
                                                .C = C,
                                                .F = config_.mlp_hidden,
                                                .activation = activation(config_.activation)},
                        exec());
  norm_backward(dbranch_, block.stream_mid, block.norm2_mean, block.norm2_rstd, block.norm2_gain, block.dnorm2_gain,
                block.dnorm2_shift, true);
  kernels::linear_backward(kernels::LinearBackward<T>{.dinp = dbranch_,
                                                      .dweight = block.dout_weight,
                                                      .dbias = block.dout_bias,
                                                      .dout = dstream_,
                                                      .inp = block.attended,
                                                      .weight = block.out_weight,
                                                      .scratch = scratch_,
                                                      .N = N,
                                                      .K = C,
                                                      .O = C},
                           exec());
  kernels::attention_backward(kernels::AttentionBackward<T>{.dq = dqkv_,
                                                            .dk = dqkv_ + C,
                                                            .dv = dqkv_ + 2 * C,
                                                            .dout = dbranch_,
                                                            .out = block.attended,
                                                            .lse = block.lse,
                                                            .q = block.qkv,
                                                            .k = block.qkv + C,
                                                            .v = block.qkv + 2 * C,
                                                            .doc_start = doc_start_,
                                                            .delta = delta_,
                                                            .N = N,
                                                            .stride = 3 * C,
                                                            .H = H,
                                                            .D = C / H,
                                                            .window = window(block),
                                                            .scale = attention_scale(config_)},
                              exec());
  kernels::qkv_backward(kernels::QkvBackward<T>{.dinp = dbranch_,
                                                .dweight = block.dqkv_weight,
                                                .dbias = block.dqkv_bias,
                                                .dqkv = dqkv_,
                                                .qkv = block.qkv,
                                                .qk_rstd = block.qk_rstd,
                                                .inp = block.norm1,
                                                .weight = block.qkv_weight,
                                                .rotary_cos = rotary_cos_,
                                                .rotary_sin = rotary_sin_,
                                                .scratch = scratch_,
                                                .N = N,
                                                .row_tokens = pass_.row_tokens,
                                                .C = C,
                                                .H = H},
                        exec());
  norm_backward(dbranch_, block.stream_in, block.norm1_mean, block.norm1_rstd, block.norm1_gain, block.dnorm1_gain,
                block.dnorm1_shift, true);
}

template <class T>
std::vector<float> Gpt<T>::logits_at(int64_t position) {
  forward();
  return this->read_logits(logits_, norm_out_ + position * config_.width, head_weight_, head_bias_);
}

template class Gpt<float>;
template class Gpt<double>;
#if SPEEDRUN_HAS_CUDA
template class Gpt<bf16>;
#endif

}  // namespace speedrun
