#pragma once
// The Main Track's model, modded-nanogpt record #89: a GPT whose residual stream, attention and values are mixed by learned and
// per-token factors. Every feature has a key in model.*; one that is off has no parameter, no buffer and no op call.
//
// Forward, for tokens x of rows of T (all norms are gain-free RMS; gates are columns of the nets in gate_layout.h):
//   e = embedding rows, smeared;  x0 = norm(e);  b = signed bigram rows;  c0 = x0 + gate·b
//   layer l:  m = λ·s + λ·attn(norm(s or a snapshot)) + gate·x0 + gate·b;   s' = λ·m + λ·mlp(norm(m))
//   without attention:  m = s + σ(λ_skip)·gate·snapshot
//   last layer (mudd): factors of the two sums above, of s itself and of further value sources come from a net on s
//   z = s + mudd sources;  loss = head(norm(z))
#include <string>
#include <vector>

#include "kernels/fp8/fp8.h"
#include "kernels/relu2_mlp/relu2_mlp.h"
#include "kernels/scaled_weight/scaled_weight.h"
#include "kernels/stream_mix/stream_mix.h"
#include "src/model/gate_layout.h"
#include "src/model/model.h"

namespace speedrun {

kernels::Fp8Scaling fp8_scaling(const Config::Fp8& fp8, ScalingKind kind);

template <class T>
class MainTrack : public Model<T> {
 public:
  MainTrack(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device,
            Parameters<T>& parameters);

  void plan(MemoryPlan& memory) override;
  void prepare() override;
  void derive_weights() override;
  void begin_step(bool exact) override;
  void forward_backward(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights) override;
  void end_step(kernels::StepVerdict* verdict) override;
  void evaluate() override;
  std::vector<float> logits_at(int64_t position) override;
  bool announces() const override { return true; }
  std::pair<void*, int64_t> maxima() override;
  std::vector<StateTensor> state() override;
  void reset_state() override;
  std::vector<Fp8Losses> take_fp8_losses(int64_t tokens, int64_t steps) override;

 private:
  using Model<T>::config_;
  using Model<T>::fp8_;
  using Model<T>::shape_;
  using Model<T>::stages_;
  using Model<T>::device_;
  using Model<T>::parameters_;
  using Model<T>::pass_;
  using Model<T>::tokens_;
  using Model<T>::targets_;
  using Model<T>::doc_start_;
  using Model<T>::prefix_;
  using Model<T>::losses_;
  using Model<T>::exec;
  using Model<T>::stage;

  // A gradient that several ops contribute to: the first one overwrites it, the others add.
  struct GradSlot {
    T* data = nullptr;
    bool live = false;
  };
  struct MixPart {
    kernels::MixTerm<T> term;
    GradSlot* grad = nullptr;  // of src
    Acc<T>* dscalar = nullptr;
    T* dgate = nullptr;
  };
  using Mix = std::vector<MixPart>;

  struct GateNet {
    GateNetLayout layout;
    T *w1 = nullptr, *w2 = nullptr, *bias = nullptr;
    Acc<T>*dw1 = nullptr, *dw2 = nullptr, *dbias = nullptr;
    const T* scale = nullptr;  // null: kGateScale
    Acc<T>* dscale = nullptr;
    T *out = nullptr, *hidden = nullptr, *dout = nullptr;  // (N, columns), (N, G), (N, columns)
  };

  struct Activations {                           // of one layer, kept for backward
    T* norm1 = nullptr;                          // (N, C) attention input, if the layer has its own
    Acc<T>* norm1_rstd = nullptr;                // (N)
    T *q = nullptr, *k = nullptr, *v = nullptr;  // (N, C)
    Acc<T>* qk_rstd = nullptr;                   // (N, 2H)
    T* key_tail = nullptr;                       // (rows, H, D/2)
    T *value = nullptr, *value_gate = nullptr;   // (N, C), (N, H)
    T* y = nullptr;                              // (N, C) attention's output
    Acc<T>* lse = nullptr;                       // (H, N)
    T* y_dc = nullptr;                           // (N, C) with DC added
    Acc<T>* dc_lse = nullptr;                    // (H, N)
    T* y_gated = nullptr;                        // (N, C) after XSA and gate
    T* attn_out = nullptr;                       // (N, C)
    T* mid = nullptr;                            // (N, C) stream between the sublayers
    T* norm2 = nullptr;                          // (N, C)
    Acc<T>* norm2_rstd = nullptr;                // (N)
    T *post = nullptr, *mlp_out = nullptr;       // (N, F), (N, C)
    T* out = nullptr;                            // (N, C) stream after the layer
  };

  struct Layer {
    Config::Model::Layer on;
    LayerGates gates;
    int index = 0;
    bool mudd = false;                               // the last layer of a model with mudd
    T *qkv_weight = nullptr, *out_weight = nullptr;  // what the products see: with λ in it if there is one
    Acc<T>*dqkv_weight = nullptr, *dout_weight = nullptr;
    T *up_weight = nullptr, *down_weight = nullptr;
    Acc<T>*dup_weight = nullptr, *ddown_weight = nullptr;
    T *value_table = nullptr, *value_gate_weight = nullptr;
    Acc<T>*dvalue_table = nullptr, *dvalue_gate_weight = nullptr;
    T *qkv_scaled = nullptr, *out_scaled = nullptr;                               // λ·W
    e4m3 *up8 = nullptr, *up8_t = nullptr, *down8 = nullptr, *down8_t = nullptr;  // as stored, (F, C); turned
    e4m3 *qkv8 = nullptr, *qkv8_t = nullptr, *out8 = nullptr, *out8_t = nullptr;  // of what the products see
    Activations act;
  };

  // main_track.cpp: memory and parameters
  void plan_layer(MemoryPlan& memory, Activations& act, const Config::Model::Layer& on, bool mudd);
  void plan_net(MemoryPlan& memory, GateNet& net);
  void plan_backward(MemoryPlan& memory);
  void plan_fp8(MemoryPlan& memory);
  void bind_parameters();
  void bind_net(GateNet& net, bool learned_scale);
  void prepare_weights();
  kernels::ScaledWeights<T> scaled_weights() const;
  void prepare_fp8();
  void write_initial_scales();
  bool is_snapshot(int layer) const;

  // main_track_forward.cpp
  void forward(bool with_fp8);
  void forward_embedding();
  void forward_layer(Layer& layer, bool with_fp8);
  void forward_attention(Layer& layer, bool with_fp8);
  void forward_mlp(Layer& layer, bool with_fp8);
  void head(const Acc<T>* grad_scale, const kernels::LossWeights<T>* weights);
  void net_forward(GateNet& net, const T* inp);
  void norm_forward(T* out, Acc<T>* rstd, const T* inp);
  void mix_forward(const Mix& mix, T* out);

  // main_track_backward.cpp
  void backward();
  void backward_layer(Layer& layer);
  void backward_attention(Layer& layer);
  void backward_value(Layer& layer);
  void backward_mlp(Layer& layer);
  void backward_embedding();
  void net_backward(GateNet& net, const T* inp, GradSlot& dinp);
  void norm_backward(GradSlot& dinp, const T* dout, const T* inp, const Acc<T>* rstd);
  void mix_backward(const Mix& mix, GradSlot& dout);
  void add_slot(GradSlot& to, GradSlot& from);  // to += from, from is used up
  void table_backward(Acc<T>* dtable, const T* dout, int64_t rows);

  // The weighted sums, described once for both directions.
  Mix stream_start();
  Mix attention_mix(Layer& layer);
  Mix skip_mix(Layer& layer);
  Mix mlp_mix(Layer& layer);
  Mix mudd_values(Layer& layer);
  Mix mudd_stream(Layer& layer);
  Mix mudd_out();
  MixPart plain(const T* src, GradSlot& grad, double factor = 1) const;
  MixPart gated(const T* src, GradSlot& grad, GateNet& net, int column, double add = 0) const;
  MixPart learned(const T* src, GradSlot& grad, T* lambdas, Acc<T>* dlambdas, int index, double otherwise) const;

  struct HeadView {  // how attention sees the planes
    const int32_t* doc_start;
    int64_t N, stride;
    int H;
  };
  HeadView head_view(const Layer& layer) const;
  struct ValueGate {
    const T* value;
    T* grad;
    int64_t stride;
    int heads;  // neighbouring heads that share a gate
  };
  ValueGate value_gate(const Layer& layer) const;
  bool fused_up(bool fp8_operands) const;
  kernels::Relu2MlpFp8 mlp_fp8(const Layer& layer, bool with_fp8) const;
  kernels::Relu2MlpBackwardFp8 mlp_backward_fp8(const Layer& layer) const;
  kernels::ProjectionFp8 qkv_fp8(const Layer& layer) const;
  kernels::ProjectionFp8 out_fp8(const Layer& layer) const;
  // Of a projection whose input and output gradient are quantised for those of its three products that are in FP8.
  kernels::ProjectionFp8 projection_fp8(Precision forward, Precision grad_inp, Precision grad_weight, const e4m3* weight8,
                                        const e4m3* weight8_t, const kernels::Fp8Scale* weight_scale, kernels::Fp8Scale* inp_scale,
                                        kernels::Fp8Scale* dout_scale) const;
  template <class Fp8>
  kernels::Fp8Copies<Fp8> copies(Fp8* codes, Fp8* codes_t, kernels::Fp8Scale* scale) const;
  bool backward_delayed() const;
  kernels::HeadFp8 head_fp8() const;
  int first_shared_reader() const;
  const Acc<T>* frequencies() const;

  GateNet& net_of(const LayerGates& gates) { return gates.post ? post_ : pre_; }
  const T* column(const GateNet& net, int column) const { return column < 0 ? nullptr : net.out + column; }
  T* dcolumn(GateNet& net, int column) const { return column < 0 ? nullptr : net.dout + column; }
  T* stream_into(const Layer& layer) { return layer.index == 0 ? c0_ : layers_[static_cast<size_t>(layer.index) - 1].act.out; }
  T* stream_after(int layer) { return layers_[static_cast<size_t>(layer)].act.out; }
  GradSlot& slot_after(int layer);  // gradient of the stream after `layer` from later uses than the next layer
  const T* attention_input(const Layer& layer) { return layer.on.input_from < 0 ? layer.act.norm1 : shared_norm_; }
  int64_t window(const Layer& layer) const;
  int64_t N() const { return pass_.tokens; }

  GateLayout gates_;
  int64_t vocabulary_;
  int shared_from_ = -1;  // layer whose output is the shared attention input
  int first_value_layer_ = -1;
  std::vector<Layer> layers_;
  GateNet pre_, post_, mix_net_, out_net_;

  T *wte_ = nullptr, *head_weight_ = nullptr, *bigram_table_ = nullptr, *sign_ = nullptr, *smear_gate_ = nullptr;
  T *smear_lambda_ = nullptr, *skip_lambda_ = nullptr, *resid_lambda_ = nullptr, *post_lambda_ = nullptr, *weight_lambda_ = nullptr;
  Acc<T>*dwte_ = nullptr, *dhead_weight_ = nullptr, *dbigram_table_ = nullptr, *dsmear_gate_ = nullptr;
  Acc<T>*dsmear_lambda_ = nullptr, *dskip_lambda_ = nullptr, *dresid_lambda_ = nullptr, *dpost_lambda_ = nullptr;
  Acc<T>* dweight_lambda_ = nullptr;

  T *embedded_ = nullptr, *smeared_ = nullptr, *x0_ = nullptr, *bigram_ = nullptr, *c0_ = nullptr;  // (N, C)
  Acc<T>* x0_rstd_ = nullptr;
  int32_t *bigram_index_ = nullptr, *sign_row_ = nullptr, *paired_doc_start_ = nullptr;
  T* shared_norm_ = nullptr;
  Acc<T>* shared_norm_rstd_ = nullptr;
  T *mudd_values_ = nullptr, *mudd_stream_ = nullptr, *final_ = nullptr, *norm_out_ = nullptr;  // (N, C)
  Acc<T>* norm_out_rstd_ = nullptr;
  T* rolling_out_ = nullptr;       // (N, C) without gradients: the stream after a layer that is no snapshot
  T* raw_ = nullptr;               // (N, 3C)
  T* logits_ = nullptr;            // (chunk, V)
  Acc<T>* frequencies_ = nullptr;  // (stages, D/4)

  std::vector<kernels::ScaledWeightItem<T>> scaled_host_;
  kernels::ScaledWeightItem<T>* scaled_items_ = nullptr;
  double* scaled_scratch_ = nullptr;

  // FP8. Scales in one array: for every layer those of the MLP's input, of up, of relu², of down; then the head's three; then, if
  // one of the products beyond the record's is in FP8, for every layer those of four gradients (of the MLP's output, of its
  // pre-activation, of q, k, v, of attention's output), of the two projections' inputs and of their weights.
  struct Fp8Scales {
    kernels::Fp8Scale *inp = nullptr, *up = nullptr, *post = nullptr, *down = nullptr;  // (L) each
    kernels::Fp8Scale *head_inp = nullptr, *head_weight = nullptr, *head_grad = nullptr;
    kernels::Fp8Scale *mlp_dout = nullptr, *dpre = nullptr, *qkv_dout = nullptr, *out_dout = nullptr;        // (L) each
    kernels::Fp8Scale *qkv_inp = nullptr, *out_inp = nullptr, *qkv_weight = nullptr, *out_weight = nullptr;  // (L) each
  };
  kernels::Fp8Scale* scale_buffer_ = nullptr;
  Fp8Scales scales_;
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int num_scales() const { return (fp8_.beyond_record() ? 12 : 4) * num_layers() + 3; }
  std::vector<kernels::Fp8WeightItem<T>> up_items_, down_items_, head_items_, attention_items_;
  kernels::Fp8WeightItem<T>* weight_items_ = nullptr;  // all of them on the device, in this order
  e4m3 *inp8_ = nullptr, *post8_ = nullptr, *head8_ = nullptr, *head8_t_ = nullptr, *head_inp8_ = nullptr, *head_inp8_t_ = nullptr;
  e5m2 *head_grad8_ = nullptr, *head_grad8_t_ = nullptr;
  float* head_row_shift_ = nullptr;
  // Backward, of one layer's one product: an input turned, relu² turned, the gradient of an output and of the pre-activation.
  e4m3 *inp8_t_ = nullptr, *post8_t_ = nullptr;
  e5m2 *dout8_ = nullptr, *dout8_t_ = nullptr, *dpre8_ = nullptr, *dpre8_t_ = nullptr;

  // Backward.
  GradSlot dstream_, dx0_, dbigram_, dc0_, dlast_, dvalue0_;  // dlast_: of the last layer's input
  std::vector<std::pair<int, GradSlot*>> snapshot_slots_;     // by layer
  std::vector<GradSlot> other_slots_;
  GradSlot no_slot_;                   // without gradients
  GradSlot dbranch_, dnorm_, dvalue_;  // (N, C) inside a branch
  T *dq_ = nullptr, *dk_ = nullptr, *dv_ = nullptr, *dv_xsa_ = nullptr, *dy_ = nullptr, *dhidden_ = nullptr,
    *dvalue_gate_ = nullptr;
  T* dnet_hidden_ = nullptr;
  Acc<T>*delta_ = nullptr, *scratch_ = nullptr;
  void *sort_scratch_ = nullptr, *dc_scratch_ = nullptr;
};

}  // namespace speedrun
