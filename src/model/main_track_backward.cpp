// Backward pass of the Main Track's model: the forward pass's calls in reverse. dstream_ is the gradient of the residual stream,
// updated in place from the last layer to the first; where the stream was read again later, that reader's share waits in the slot
// of the layer and joins when the walk arrives there.
#include "kernels/attention/attention.h"
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
void MainTrack<T>::norm_backward(GradSlot& dinp, const T* dout, const T* inp, const Acc<T>* rstd) {
  kernels::norm_backward(kernels::NormBackward<T>{.dinp = dinp.data,
                                                  .dinp_add = dinp.live ? dinp.data : nullptr,
                                                  .dgain = nullptr,
                                                  .dshift = nullptr,
                                                  .dout = dout,
                                                  .inp = inp,
                                                  .mean = nullptr,
                                                  .rstd = rstd,
                                                  .gain = nullptr,
                                                  .scratch = scratch_,
                                                  .N = N(),
                                                  .C = config_.width,
                                                  .kind = kernels::Norm::rms},
                         exec());
  dinp.live = true;
}

template <class T>
void MainTrack<T>::net_backward(GateNet& net, const T* inp, GradSlot& dinp) {
  kernels::gate_net_backward(kernels::GateNetBackward<T>{.dinp = dinp.data,
                                                         .accumulate = dinp.live,
                                                         .dw1 = net.dw1,
                                                         .dw2 = net.dw2,
                                                         .dbias = net.dbias,
                                                         .dscale = net.dscale,
                                                         .dhidden = dnet_hidden_,
                                                         .dout = net.dout,
                                                         .hidden = net.hidden,
                                                         .inp = inp,
                                                         .w1 = net.w1,
                                                         .w2 = net.w2,
                                                         .bias = net.bias,
                                                         .scale = net.scale,
                                                         .constant_scale = kGateScale,
                                                         .scratch = scratch_,
                                                         .N = N(),
                                                         .C = config_.width,
                                                         .G = config_.gate_hidden,
                                                         .O = net.layout.columns()},
                             exec());
  if (net.w1 != nullptr) dinp.live = true;
}

// Gradients of a weighted sum. The stream's own term is updated in place: its slot is dout's.
template <class T>
void MainTrack<T>::mix_backward(const Mix& mix, GradSlot& dout) {
  kernels::StreamMixBackward<T> args{.terms = {},
                                     .grads = {},
                                     .num_terms = static_cast<int>(mix.size()),
                                     .dout = dout.data,
                                     .scratch = scratch_,
                                     .N = N(),
                                     .C = config_.width};
  for (size_t i = 0; i < mix.size(); ++i) {
    const MixPart& part = mix[i];
    const bool in_place = part.grad->data == dout.data;
    args.terms[i] = part.term;
    args.grads[i] = {
        .dsrc = part.grad->data, .accumulate = part.grad->live && !in_place, .dscalar = part.dscalar, .dgate = part.dgate};
    part.grad->live = true;
  }
  kernels::stream_mix_backward(args, exec());
}

template <class T>
void MainTrack<T>::add_slot(GradSlot& to, GradSlot& from) {
  if (!from.live) return;
  mix_forward({plain(to.data, to), plain(from.data, from)}, to.data);
  from.live = false;
}

template <class T>
void MainTrack<T>::table_backward(Acc<T>* dtable, const T* dout, int64_t rows) {
  kernels::embedding_backward(kernels::EmbeddingBackward<T>{.dwte = dtable,
                                                            .dwpe = nullptr,
                                                            .dout = dout,
                                                            .tokens = tokens_,
                                                            .scratch = sort_scratch_,
                                                            .N = N(),
                                                            .row_tokens = pass_.row_tokens,
                                                            .C = config_.width,
                                                            .V = static_cast<int>(rows)},
                              exec());
  this->announce(dtable);
}

template <class T>
void MainTrack<T>::backward() {
  for (GradSlot* slot : {&dstream_, &dx0_, &dbigram_, &dc0_, &dlast_, &dvalue0_}) slot->live = false;
  for (GradSlot& slot : other_slots_) slot.live = false;
  // Columns that no feature reads have no gradient.
  for (GateNet* net : {&pre_, &post_, &mix_net_, &out_net_}) {
    if (net->layout.exists()) device_.zero(net->dout, static_cast<size_t>(N() * net->layout.columns()) * sizeof(T));
  }
  if (!pass_.tied) this->announce(dhead_weight_);  // the loss made it; tied, the embedding's is still to come
  const int last = config_.num_layers - 1;
  norm_backward(dstream_, dbranch_.data, config_.mudd ? final_ : stream_after(last), norm_out_rstd_);
  if (config_.mudd) {
    mix_backward(mudd_out(), dstream_);
    net_backward(out_net_, stream_after(last), dstream_);
  }
  for (int l = last; l >= 0; --l) backward_layer(layers_[static_cast<size_t>(l)]);
  backward_embedding();
}

template <class T>
void MainTrack<T>::backward_layer(Layer& layer) {
  if (layer.index < config_.num_layers - 1) add_slot(dstream_, slot_after(layer.index));
  // The shared input's readers are all later layers: its norm's share came with them.
  backward_mlp(layer);
  if (layer.on.attention) {
    backward_attention(layer);
  } else if (layer.on.skip_from >= 0) {
    mix_backward(skip_mix(layer), dstream_);
  }
  if (layer.index == config_.mudd_gate_split && post_.layout.exists()) net_backward(post_, stream_into(layer), dstream_);
}

template <class T>
void MainTrack<T>::backward_mlp(Layer& layer) {
  Activations& act = layer.act;
  dbranch_.live = false;
  mix_backward(mlp_mix(layer), dstream_);
  kernels::relu2_mlp_backward(kernels::Relu2MlpBackward<T>{.dinp = dnorm_.data,
                                                           .dup_weight = layer.dup_weight,
                                                           .ddown_weight = layer.ddown_weight,
                                                           .dhidden = dhidden_,
                                                           .dout = dbranch_.data,
                                                           .inp = act.norm2,
                                                           .post = act.post,
                                                           .up_weight = layer.up_weight,
                                                           .down_weight = layer.down_weight,
                                                           .N = N(),
                                                           .C = config_.width,
                                                           .F = config_.mlp_hidden,
                                                           .fp8 = mlp_backward_fp8(layer)},
                              exec());
  norm_backward(dstream_, dnorm_.data, act.mid, act.norm2_rstd);
}

template <class T>
void MainTrack<T>::backward_attention(Layer& layer) {
  const int C = config_.width, H = config_.num_heads, D = C / H;
  Activations& act = layer.act;
  GateNet& net = net_of(layer.gates);
  dbranch_.live = false;
  mix_backward(attention_mix(layer), dstream_);

  const T* const y_before_gate = layer.on.dc ? act.y_dc : act.y;
  const bool gated = layer.on.xsa || layer.on.gate;
  kernels::linear_backward(kernels::LinearBackward<T>{.dinp = dy_,
                                                      .dweight = layer.dout_weight,
                                                      .dbias = nullptr,
                                                      .dout = dbranch_.data,
                                                      .inp = gated ? act.y_gated : y_before_gate,
                                                      .weight = layer.out_weight,
                                                      .scratch = scratch_,
                                                      .N = N(),
                                                      .K = C,
                                                      .O = C,
                                                      .fp8 = out_fp8(layer)},
                           exec());
  if (gated) {
    kernels::head_gate_backward(kernels::HeadGateBackward<T>{.dy = dy_,
                                                             .dv = layer.on.xsa ? dv_xsa_ : nullptr,
                                                             .dalpha = dcolumn(net, layer.gates.alpha),
                                                             .dgate = dcolumn(net, layer.gates.gate),
                                                             .dout = dy_,
                                                             .y = y_before_gate,
                                                             .v = layer.on.xsa ? act.v : nullptr,
                                                             .alpha = column(net, layer.gates.alpha),
                                                             .gate = column(net, layer.gates.gate),
                                                             .stride = net.layout.columns(),
                                                             .N = N(),
                                                             .H = H,
                                                             .D = D},
                                exec());
  }
  const HeadView view = head_view(layer);
  kernels::attention_backward(kernels::AttentionBackward<T>{.dq = dq_,
                                                            .dk = dk_,
                                                            .dv = dv_,
                                                            .dout = dy_,
                                                            .out = act.y,
                                                            .lse = act.lse,
                                                            .q = act.q,
                                                            .k = act.k,
                                                            .v = act.v,
                                                            .doc_start = view.doc_start,
                                                            .delta = delta_,
                                                            .N = view.N,
                                                            .stride = view.stride,
                                                            .H = view.H,
                                                            .D = D,
                                                            .window = window(layer),
                                                            .scale = stage().attention_scale},
                              exec());
  if (layer.on.dc) {
    kernels::dc_attention_backward(kernels::DcAttentionBackward<T>{.dq = dq_,
                                                                   .dk = dk_,
                                                                   .dv = dv_,
                                                                   .dw1 = dcolumn(net, layer.gates.w1),
                                                                   .dw2 = dcolumn(net, layer.gates.w2),
                                                                   .dout = dy_,
                                                                   .q = act.q,
                                                                   .k = act.k,
                                                                   .v = act.v,
                                                                   .w1 = column(net, layer.gates.w1),
                                                                   .w2 = column(net, layer.gates.w2),
                                                                   .stride = net.layout.columns(),
                                                                   .lse = act.dc_lse,
                                                                   .doc_start = doc_start_,
                                                                   .scratch = dc_scratch_,
                                                                   .N = N(),
                                                                   .H = H,
                                                                   .D = D,
                                                                   .window = config_.dc_window - 1,
                                                                   .scale = stage().attention_scale},
                                   exec());
  }
  if (layer.on.xsa) {
    GradSlot dv{.data = dv_, .live = true}, xsa{.data = dv_xsa_, .live = true};
    add_slot(dv, xsa);
  }
  backward_value(layer);
  if (layer.mudd) {
    // What the layer's own factors were made of: values first, then the stream; then the net that made the factors.
    GradSlot dvalues{.data = dv_, .live = true};
    mix_backward(mudd_values(layer), dvalues);
    mix_backward(mudd_stream(layer), dstream_);
    net_backward(mix_net_, stream_into(layer), dstream_);
  }
  if (layer.on.input_from < 0) {
    norm_backward(dstream_, dnorm_.data, stream_into(layer), act.norm1_rstd);
  } else {
    norm_backward(slot_after(shared_from_), dnorm_.data, stream_after(shared_from_), shared_norm_rstd_);
  }
}

// Through the projection: leaves the gradient of the attention input in dnorm_.
template <class T>
void MainTrack<T>::backward_value(Layer& layer) {
  const int C = config_.width, H = config_.num_heads;
  Activations& act = layer.act;
  const bool value = layer.on.value_embedding;
  // The first layer's value embedding is also a source of the last mix.
  GradSlot& dvalue = config_.mudd && layer.index == first_value_layer_ ? dvalue0_ : dvalue_;
  if (&dvalue == &dvalue_) dvalue_.live = false;
  const ValueGate gate = value_gate(layer);
  kernels::split_qkv_backward(kernels::SplitQkvBackward<T>{.dinp = dnorm_.data,
                                                           .dweight = layer.dqkv_weight,
                                                           .dvalue_embed = value ? dvalue.data : nullptr,
                                                           .accumulate_dvalue_embed = dvalue.live,
                                                           .dvalue_gate = gate.grad,
                                                           .raw = raw_,
                                                           .dq = dq_,
                                                           .dk = dk_,
                                                           .dv = dv_,
                                                           .q = act.q,
                                                           .k = act.k,
                                                           .qk_rstd = act.qk_rstd,
                                                           .key_tail = act.key_tail,
                                                           .inp = attention_input(layer),
                                                           .weight = layer.qkv_weight,
                                                           .frequencies = frequencies(),
                                                           .value_embed = value ? act.value : nullptr,
                                                           .value_gate = gate.value,
                                                           .value_gate_stride = gate.stride,
                                                           .gate_heads = gate.heads,
                                                           .paired = layer.on.paired_heads,
                                                           .key_shift = layer.on.key_offset,
                                                           .N = N(),
                                                           .row_tokens = pass_.row_tokens,
                                                           .C = C,
                                                           .H = H,
                                                           .fp8 = qkv_fp8(layer)},
                              exec());
  if (!value) return;
  if (!layer.mudd) {
    kernels::value_gate_backward(kernels::ValueGateBackward<T>{.dinp = dnorm_.data,
                                                               .dembed = dvalue.data,
                                                               .dweight = layer.dvalue_gate_weight,
                                                               .dgate = dvalue_gate_,
                                                               .gate = act.value_gate,
                                                               .inp = attention_input(layer),
                                                               .embed = act.value,
                                                               .weight = layer.value_gate_weight,
                                                               .scratch = scratch_,
                                                               .N = N(),
                                                               .C = C,
                                                               .H = H,
                                                               .P = config_.value_gate_channels},
                                 exec());
  }
  table_backward(layer.dvalue_table, dvalue.data, vocabulary_);
}

template <class T>
void MainTrack<T>::backward_embedding() {
  const int C = config_.width;
  add_slot(dstream_, dc0_);
  if (bigram_ != nullptr) {
    mix_backward(stream_start(), dstream_);
    kernels::bigram_backward(kernels::BigramBackward<T>{.dtable = dbigram_table_,
                                                        .signed_dout = dbigram_.data,
                                                        .dout = dbigram_.data,
                                                        .index = bigram_index_,
                                                        .sign_row = sign_row_,
                                                        .sign = sign_,
                                                        .scratch = sort_scratch_,
                                                        .N = N(),
                                                        .row_tokens = pass_.row_tokens,
                                                        .C = C,
                                                        .rows = static_cast<int>(config_.bigram_rows)},
                             exec());
    this->announce(dbigram_table_);
  } else {
    add_slot(dstream_, dx0_);
  }
  // Without bigrams the stream before layer 0 is x0 itself.
  GradSlot& dx0 = bigram_ != nullptr ? dx0_ : dstream_;
  if (pre_.layout.exists()) net_backward(pre_, x0_, dx0);
  dbranch_.live = false;
  norm_backward(dbranch_, dx0.data, config_.smear ? smeared_ : embedded_, x0_rstd_);
  T* dembedded = dbranch_.data;
  if (config_.smear) {
    kernels::smear_backward(kernels::SmearBackward<T>{.dinp = dnorm_.data,
                                                      .dgate_weight = dsmear_gate_,
                                                      .dlambda = dsmear_lambda_,
                                                      .dout = dbranch_.data,
                                                      .inp = embedded_,
                                                      .gate_weight = smear_gate_,
                                                      .lambda = smear_lambda_,
                                                      .scratch = scratch_,
                                                      .N = N(),
                                                      .row_tokens = pass_.row_tokens,
                                                      .C = C,
                                                      .G = config_.smear_channels},
                            exec());
    dembedded = dnorm_.data;
  }
  table_backward(pass_.tied ? dhead_weight_ : dwte_, dembedded, vocabulary_);
}

// The member that main_track.cpp calls.
template void MainTrack<float>::backward();
template void MainTrack<double>::backward();
#if SPEEDRUN_HAS_CUDA
template void MainTrack<bf16>::backward();
#endif

}  // namespace speedrun
