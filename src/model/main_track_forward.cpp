// Forward pass of the Main Track's model.
#include "kernels/attention/attention.h"
#include "kernels/attention/paired_doc_start.h"
#include "kernels/dc_attention/dc_attention.h"
#include "kernels/embedding/bigram.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gate_net/gate_net.h"
#include "kernels/head_gate/head_gate.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/norm.h"
#include "kernels/qkv/split_qkv.h"
#include "kernels/relu2_mlp/relu2_mlp.h"
#include "kernels/smear/smear.h"
#include "kernels/value_gate/value_gate.h"
#include "src/model/main_track.h"

namespace speedrun {

template <class T>
void MainTrack<T>::norm_forward(T* out, Acc<T>* rstd, const T* inp) {
  kernels::norm_forward(kernels::NormForward<T>{.out = out,
                                                .mean = nullptr,
                                                .rstd = rstd,
                                                .inp = inp,
                                                .gain = nullptr,
                                                .shift = nullptr,
                                                .N = N(),
                                                .C = config_.width,
                                                .eps = config_.norm_eps,
                                                .kind = kernels::Norm::rms},
                        exec());
}

template <class T>
void MainTrack<T>::net_forward(GateNet& net, const T* inp) {
  kernels::gate_net_forward(kernels::GateNetForward<T>{.out = net.out,
                                                       .hidden = net.hidden,
                                                       .inp = inp,
                                                       .w1 = net.w1,
                                                       .w2 = net.w2,
                                                       .bias = net.bias,
                                                       .scale = net.scale,
                                                       .constant_scale = kGateScale,
                                                       .N = N(),
                                                       .C = config_.width,
                                                       .G = config_.gate_hidden,
                                                       .O = net.layout.columns()},
                            exec());
}

template <class T>
void MainTrack<T>::mix_forward(const Mix& mix, T* out) {
  kernels::StreamMixForward<T> args{
      .out = out, .terms = {}, .num_terms = static_cast<int>(mix.size()), .N = N(), .C = config_.width};
  require(mix.size() <= kernels::kMaxMixTerms, "internal: a mix of ", mix.size(), " terms");
  for (size_t i = 0; i < mix.size(); ++i) args.terms[i] = mix[i].term;
  kernels::stream_mix_forward(args, exec());
}

template <class T>
void MainTrack<T>::forward(bool with_fp8) {
  forward_embedding();
  for (Layer& layer : layers_) forward_layer(layer, with_fp8);
  T* stream = stream_after(config_.num_layers - 1);
  if (config_.mudd) {
    net_forward(out_net_, stream);
    mix_forward(mudd_out(), final_);
    stream = final_;
  }
  norm_forward(norm_out_, norm_out_rstd_, stream);
}

template <class T>
void MainTrack<T>::forward_embedding() {
  const int C = config_.width;
  if (paired_doc_start_ != nullptr)
    kernels::paired_doc_start({.out = paired_doc_start_, .doc_start = doc_start_, .N = N()}, exec());
  kernels::embedding_forward(kernels::EmbeddingForward<T>{.out = embedded_,
                                                          .wte = pass_.tied ? head_weight_ : wte_,
                                                          .wpe = nullptr,
                                                          .tokens = tokens_,
                                                          .N = N(),
                                                          .row_tokens = pass_.row_tokens,
                                                          .C = C},
                             exec());
  if (config_.smear) {
    kernels::smear_forward(kernels::SmearForward<T>{.out = smeared_,
                                                    .inp = embedded_,
                                                    .gate_weight = smear_gate_,
                                                    .lambda = smear_lambda_,
                                                    .N = N(),
                                                    .row_tokens = pass_.row_tokens,
                                                    .C = C,
                                                    .G = config_.smear_channels},
                           exec());
  }
  norm_forward(x0_, x0_rstd_, config_.smear ? smeared_ : embedded_);
  if (pre_.layout.exists()) net_forward(pre_, x0_);
  if (bigram_ == nullptr) return;
  kernels::bigram_forward(kernels::BigramForward<T>{.out = bigram_,
                                                    .index = bigram_index_,
                                                    .sign_row = sign_row_,
                                                    .table = bigram_table_,
                                                    .sign = sign_,
                                                    .tokens = tokens_,
                                                    .N = N(),
                                                    .row_tokens = pass_.row_tokens,
                                                    .C = C,
                                                    .rows = static_cast<int>(config_.bigram_rows),
                                                    .sign_rows = config_.bigram_sign_rows},
                          exec());
  mix_forward(stream_start(), c0_);
}

template <class T>
void MainTrack<T>::forward_layer(Layer& layer, bool with_fp8) {
  T* const stream = stream_into(layer);
  if (layer.index == config_.mudd_gate_split && post_.layout.exists()) net_forward(post_, stream);
  if (layer.on.attention) {
    forward_attention(layer, with_fp8);
  } else if (layer.on.skip_from >= 0) {
    mix_forward(skip_mix(layer), layer.act.mid);
  } else {
    layer.act.mid = stream;
  }
  forward_mlp(layer, with_fp8);
}

template <class T>
void MainTrack<T>::forward_attention(Layer& layer, bool with_fp8) {
  const int C = config_.width, H = config_.num_heads, D = C / H;
  Activations& act = layer.act;
  const T* const stream = stream_into(layer);
  if (layer.on.input_from < 0) {
    norm_forward(act.norm1, act.norm1_rstd, stream);
  } else if (layer.index == first_shared_reader()) {
    norm_forward(shared_norm_, shared_norm_rstd_, stream_after(shared_from_));
  }
  if (layer.mudd) {
    net_forward(mix_net_, stream);
    mix_forward(mudd_values(layer), mudd_values_);
    mix_forward(mudd_stream(layer), mudd_stream_);
  }
  if (layer.on.value_embedding) {
    kernels::embedding_forward(kernels::EmbeddingForward<T>{.out = act.value,
                                                            .wte = layer.value_table,
                                                            .wpe = nullptr,
                                                            .tokens = tokens_,
                                                            .N = N(),
                                                            .row_tokens = pass_.row_tokens,
                                                            .C = C},
                               exec());
    if (!layer.mudd) {
      kernels::value_gate_forward(kernels::ValueGateForward<T>{.gate = act.value_gate,
                                                               .inp = attention_input(layer),
                                                               .embed = act.value,
                                                               .weight = layer.value_gate_weight,
                                                               .N = N(),
                                                               .C = C,
                                                               .H = H,
                                                               .P = config_.value_gate_channels},
                                  exec());
    }
  }
  const ValueGate gate = value_gate(layer);
  kernels::split_qkv_forward(kernels::SplitQkvForward<T>{.q = act.q,
                                                         .k = act.k,
                                                         .v = act.v,
                                                         .qk_rstd = act.qk_rstd,
                                                         .key_tail = act.key_tail,
                                                         .raw = raw_,
                                                         .inp = attention_input(layer),
                                                         .weight = layer.qkv_weight,
                                                         .frequencies = frequencies(),
                                                         .value_embed = layer.on.value_embedding ? act.value : nullptr,
                                                         .value_gate = gate.value,
                                                         .value_add = layer.mudd ? mudd_values_ : nullptr,
                                                         .value_gate_stride = gate.stride,
                                                         .gate_heads = gate.heads,
                                                         .paired = layer.on.paired_heads,
                                                         .key_shift = layer.on.key_offset,
                                                         .N = N(),
                                                         .row_tokens = pass_.row_tokens,
                                                         .C = C,
                                                         .H = H,
                                                         .eps = config_.norm_eps,
                                                         .fp8 = with_fp8 ? qkv_fp8(layer) : kernels::ProjectionFp8{}},
                             exec());
  const HeadView view = head_view(layer);
  kernels::attention_forward(kernels::AttentionForward<T>{.out = act.y,
                                                          .lse = act.lse,
                                                          .q = act.q,
                                                          .k = act.k,
                                                          .v = act.v,
                                                          .doc_start = view.doc_start,
                                                          .N = view.N,
                                                          .stride = view.stride,
                                                          .H = view.H,
                                                          .D = D,
                                                          .window = window(layer),
                                                          .scale = stage().attention_scale},
                             exec());
  T* y = act.y;
  GateNet& net = net_of(layer.gates);
  if (layer.on.dc) {
    kernels::dc_attention_forward(kernels::DcAttentionForward<T>{.out = act.y_dc,
                                                                 .lse = act.dc_lse,
                                                                 .y = y,
                                                                 .q = act.q,
                                                                 .k = act.k,
                                                                 .v = act.v,
                                                                 .w1 = column(net, layer.gates.w1),
                                                                 .w2 = column(net, layer.gates.w2),
                                                                 .stride = net.layout.columns(),
                                                                 .doc_start = doc_start_,
                                                                 .N = N(),
                                                                 .H = H,
                                                                 .D = D,
                                                                 .window = config_.dc_window - 1,
                                                                 .scale = stage().attention_scale},
                                  exec());
    y = act.y_dc;
  }
  if (layer.on.xsa || layer.on.gate) {
    kernels::head_gate_forward(kernels::HeadGateForward<T>{.out = act.y_gated,
                                                           .y = y,
                                                           .v = layer.on.xsa ? act.v : nullptr,
                                                           .alpha = column(net, layer.gates.alpha),
                                                           .gate = column(net, layer.gates.gate),
                                                           .stride = net.layout.columns(),
                                                           .N = N(),
                                                           .H = H,
                                                           .D = D},
                               exec());
    y = act.y_gated;
  }
  kernels::linear_forward(kernels::LinearForward<T>{.out = act.attn_out,
                                                    .inp = y,
                                                    .weight = layer.out_weight,
                                                    .bias = nullptr,
                                                    .residual = nullptr,
                                                    .N = N(),
                                                    .K = C,
                                                    .O = C,
                                                    .fp8 = with_fp8 ? out_fp8(layer) : kernels::ProjectionFp8{}},
                          exec());
  mix_forward(attention_mix(layer), act.mid);
}

template <class T>
void MainTrack<T>::forward_mlp(Layer& layer, bool with_fp8) {
  Activations& act = layer.act;
  norm_forward(act.norm2, act.norm2_rstd, act.mid);
  kernels::relu2_mlp_forward(kernels::Relu2MlpForward<T>{.out = act.mlp_out,
                                                         .post = act.post,
                                                         .inp = act.norm2,
                                                         .up_weight = layer.up_weight,
                                                         .down_weight = layer.down_weight,
                                                         .fp8 = mlp_fp8(layer, with_fp8),
                                                         .N = N(),
                                                         .C = config_.width,
                                                         .F = config_.mlp_hidden},
                             exec());
  mix_forward(mlp_mix(layer), act.out);
}

template <class T>
void MainTrack<T>::head(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) {
  const bool training = grad_scale != nullptr;
  kernels::head_loss(kernels::HeadLoss<T>{.loss = losses_,
                                          .dinp = training ? dbranch_.data : nullptr,
                                          .dweight = training ? dhead_weight_ : nullptr,
                                          .dbias = nullptr,
                                          .inp = norm_out_,
                                          .weight = head_weight_,
                                          .bias = nullptr,
                                          .targets = targets_,
                                          .loss_weights = weights,
                                          .loss_terms = stage().loss_terms,
                                          .prefix = weights != nullptr && stage().prefix_loss ? prefix_ : nullptr,
                                          .row_tokens = pass_.row_tokens,
                                          .grad_scale = grad_scale,
                                          .logits = logits_,
                                          .scratch = scratch_,
                                          .N = N(),
                                          .chunk = shape_.logits_chunk,
                                          .C = config_.width,
                                          .V = static_cast<int>(vocabulary_),
                                          .softcap = softcap_of(config_.softcap),
                                          .softcap_value = config_.softcap_value,
                                          .fp8 = training ? head_fp8() : kernels::HeadFp8{}},
                     exec());
}

// The members that main_track.cpp calls.
template void MainTrack<float>::forward(bool);
template void MainTrack<float>::head(const float*, const kernels::LossWeights<float>*);
template void MainTrack<double>::forward(bool);
template void MainTrack<double>::head(const double*, const kernels::LossWeights<double>*);
#if SPEEDRUN_HAS_CUDA
template void MainTrack<bf16>::forward(bool);
template void MainTrack<bf16>::head(const float*, const kernels::LossWeights<bf16>*);
#endif

}  // namespace speedrun
