// FP8 in the Main Track's model: memory, scales, and what happens once per step.
#include "fmt/format.h"
#include "kernels/relu2_mlp/relu2_up_sm90.h"
#include "src/model/main_track.h"

namespace speedrun {
namespace {

using kernels::Fp8Copies;
using kernels::Fp8Scale;
using kernels::Fp8Scaling;

bool on(Precision precision) { return precision == Precision::fp8; }

}  // namespace

kernels::Fp8Scaling fp8_scaling(const Config::Fp8& fp8, ScalingKind kind) {
  if (fp8.force_unit_scales) return Fp8Scaling::fixed;
  switch (kind) {
    case ScalingKind::fixed:
      return Fp8Scaling::fixed;
    case ScalingKind::current:
      return Fp8Scaling::current;
    case ScalingKind::delayed:
      return Fp8Scaling::delayed;
  }
  throw Error("internal: unknown FP8 scaling");
}

template <class T>
void MainTrack<T>::plan_fp8(MemoryPlan& memory) {
  if (!fp8_.any()) return;
  const int64_t n = shape_.max_tokens, C = config_.width, F = config_.mlp_hidden, V = vocabulary_, chunk = shape_.logits_chunk;
  const auto add = [&](bool used, const char* name, auto*& codes, int64_t count) {
    if (used) memory.add(name, &codes, count);
  };
  memory.add("FP8: scales and tables", &scale_buffer_, num_scales());
  memory.add("FP8: scales and tables", &weight_items_, 4 * int64_t{num_layers()} + 1);
  for (Layer& layer : layers_) {
    add(on(fp8_.mlp_up), "FP8: weights", layer.up8, F * C);
    add(on(fp8_.mlp_grad_inp), "FP8: weights", layer.up8_t, F * C);
    add(on(fp8_.mlp_grad_inp), "FP8: weights", layer.down8, F * C);
    add(on(fp8_.mlp_down), "FP8: weights", layer.down8_t, F * C);
    if (!layer.on.attention) continue;
    add(on(fp8_.qkv), "FP8: weights", layer.qkv8, 3 * C * C);
    add(on(fp8_.qkv_grad_inp), "FP8: weights", layer.qkv8_t, 3 * C * C);
    add(on(fp8_.out), "FP8: weights", layer.out8, C * C);
    add(on(fp8_.out_grad_inp), "FP8: weights", layer.out8_t, C * C);
  }
  add(on(fp8_.mlp_up) || on(fp8_.qkv) || on(fp8_.out), "FP8: activations", inp8_, n * C);
  add(on(fp8_.mlp_down), "FP8: activations", post8_, n * F);
  add(fp8_.weight_grads(), "FP8: activations", inp8_t_, n * C);
  add(on(fp8_.mlp_grad_weight), "FP8: activations", post8_t_, n * F);
  // The gradients of the three outputs take turns in the same memory.
  const auto columns = [&](Precision mlp, Precision qkv, Precision out) { return on(qkv) ? 3 * C : on(mlp) || on(out) ? C : 0; };
  const int64_t inp_columns = columns(fp8_.mlp_grad_inp, fp8_.qkv_grad_inp, fp8_.out_grad_inp),
                weight_columns = columns(fp8_.mlp_grad_weight, fp8_.qkv_grad_weight, fp8_.out_grad_weight);
  add(inp_columns > 0, "FP8: gradients", dout8_, n * inp_columns);
  add(weight_columns > 0, "FP8: gradients", dout8_t_, n * weight_columns);
  add(on(fp8_.mlp_grad_inp), "FP8: gradients", dpre8_, n * F);
  add(on(fp8_.mlp_grad_weight), "FP8: gradients", dpre8_t_, n * F);
  const bool head = on(fp8_.head);
  add(head, "FP8: weights", head8_, V * C);
  add(head, "FP8: weights", head8_t_, V * C);
  add(head, "FP8: activations", head_inp8_, chunk * C);
  add(head, "FP8: activations", head_inp8_t_, chunk * C);
  add(head, "FP8: logits' gradient", head_grad8_, chunk * V);
  add(head, "FP8: logits' gradient", head_grad8_t_, chunk * V);
  add(head, "FP8: logits' gradient", head_row_shift_, chunk);
}

template <class T>
void MainTrack<T>::prepare_fp8() {
  if (scale_buffer_ == nullptr) return;
  Fp8Scale* next = scale_buffer_;
  const auto place = [&](std::initializer_list<Fp8Scale**> kinds, int count) {
    for (Fp8Scale** kind : kinds) {
      *kind = next;
      next += count;
    }
  };
  Fp8Scales& s = scales_;
  place({&s.inp, &s.up, &s.post, &s.down}, num_layers());
  place({&s.head_inp, &s.head_weight, &s.head_grad}, 1);
  if (fp8_.beyond_record()) {
    place({&s.mlp_dout, &s.dpre, &s.qkv_dout, &s.out_dout, &s.qkv_inp, &s.out_inp, &s.qkv_weight, &s.out_weight}, num_layers());
  }
  const int C = config_.width, F = config_.mlp_hidden;
  for (auto* items : {&up_items_, &down_items_, &head_items_, &attention_items_}) items->clear();
  using Item = kernels::Fp8WeightItem<T>;
  const auto add = [](std::vector<Item>& items, const Item& item) {
    if (item.out != nullptr || item.out_t != nullptr) items.push_back(item);
  };
  for (Layer& layer : layers_) {
    const int l = layer.index;
    add(up_items_, {layer.up8, layer.up8_t, layer.up_weight, s.up + l, F, C});
    add(down_items_, {layer.down8, layer.down8_t, layer.down_weight, s.down + l, F, C});
    if (!fp8_.beyond_record()) continue;
    add(attention_items_, {layer.qkv8, layer.qkv8_t, layer.qkv_weight, s.qkv_weight + l, 3 * C, C});
    add(attention_items_, {layer.out8, layer.out8_t, layer.out_weight, s.out_weight + l, C, C});
  }
  add(head_items_, {head8_, head8_t_, head_weight_, s.head_weight, static_cast<int>(vocabulary_), C});
  std::vector<Item> all;
  for (const auto* items : {&up_items_, &down_items_, &head_items_, &attention_items_})
    all.insert(all.end(), items->begin(), items->end());
  device_.copy_in(weight_items_, all.data(), all.size() * sizeof(Item));
  device_.synchronize();
  write_initial_scales();
}

template <class T>
bool MainTrack<T>::backward_delayed() const {
  return fp8_.beyond_record() && fp8_scaling(fp8_, fp8_.backward_scaling) == Fp8Scaling::delayed;
}

template <class T>
void MainTrack<T>::write_initial_scales() {
  if (scale_buffer_ == nullptr) return;
  std::vector<Fp8Scale> scales(static_cast<size_t>(num_scales()));
  const auto host = [&](const Fp8Scale* scale) -> Fp8Scale& { return scales[static_cast<size_t>(scale - scale_buffer_)]; };
  const auto set = [&](Fp8Scale* scale, double bound) {
    if (!fp8_.force_unit_scales) host(scale).scale = static_cast<float>(bound / kE4m3Max);
  };
  for (const Layer& layer : layers_) {
    if (fp8_.mlp_up_scaling == ScalingKind::fixed) set(scales_.inp + layer.index, fp8_.mlp_up_bound);
    if (fp8_.mlp_down_scaling == ScalingKind::fixed) set(scales_.post + layer.index, fp8_.mlp_down_bound);
    if (!backward_delayed()) continue;
    for (Fp8Scale* kind : {scales_.mlp_dout, scales_.dpre, scales_.qkv_dout, scales_.out_dout, scales_.qkv_inp, scales_.out_inp})
      host(kind + layer.index).scale = 0;  // not known
    if (!on(fp8_.mlp_up)) host(scales_.inp + layer.index).scale = 0;
    if (!on(fp8_.mlp_down)) host(scales_.post + layer.index).scale = 0;
  }
  set(scales_.head_inp, fp8_.head_inp_bound);
  set(scales_.head_weight, fp8_.head_weight_bound);
  device_.copy_in(scale_buffer_, scales.data(), scales.size() * sizeof(Fp8Scale));
  device_.synchronize();
}

// Up-projection with its epilogue in one Hopper kernel: where the device and the shapes allow it, unless the config says which.
template <class T>
bool MainTrack<T>::fused_up(bool fp8_operands) const {
  if constexpr (std::is_same_v<T, bf16>) {
    if (fp8_.mlp_up_kernel == MlpUpKernel::cublaslt) return false;
    const int C = config_.width, F = config_.mlp_hidden;
    const bool takes =
        fp8_operands ? kernels::relu2_up_sm90_takes<e4m3>(C, F, exec()) : kernels::relu2_up_sm90_takes<bf16>(C, F, exec());
    if (!takes && fp8_.mlp_up_kernel == MlpUpKernel::fused) {
      throw InputError(
          fmt::format("fp8.mlp_up_kernel = fused: needs compute capability 9.0 and other shapes than model.width = {}, "
                      "model.mlp_hidden = {} (width a multiple of 128 up to 768, mlp_hidden of 256); use auto",
                      C, F));
    }
    return takes;
  }
  return false;  // the reference is one loop anyway
}

template <class T>
kernels::Relu2MlpFp8 MainTrack<T>::mlp_fp8(const Layer& layer, bool with_fp8) const {
  if (scale_buffer_ == nullptr || !with_fp8) return {.fused_up = fused_up(false)};
  return {.up8 = layer.up8,
          .up_scale = scales_.up + layer.index,
          .inp8 = inp8_,
          .inp_scale = scales_.inp + layer.index,
          .inp_scaling = fp8_scaling(fp8_, fp8_.mlp_up_scaling),
          .down8 = layer.down8_t,
          .down_scale = scales_.down + layer.index,
          .post8 = post8_,
          .post_scale = scales_.post + layer.index,
          .post_scaling = fp8_scaling(fp8_, fp8_.mlp_down_scaling),
          .fused_up = fused_up(layer.up8 != nullptr),
          .count = fp8_.warn_saturated > 0};
}

template <class T>
template <class Fp8>
Fp8Copies<Fp8> MainTrack<T>::copies(Fp8* codes, Fp8* codes_t, Fp8Scale* scale) const {
  constexpr bool gradient = std::is_same_v<Fp8, e5m2>;
  return {.codes = codes,
          .codes_t = codes_t,
          .scale = scale,
          .scaling = fp8_scaling(fp8_, fp8_.backward_scaling),
          .start_margin = gradient ? fp8_.grad_margin : fp8_.mlp_down_margin,
          .count = fp8_.warn_saturated > 0};
}

template <class T>
kernels::Relu2MlpBackwardFp8 MainTrack<T>::mlp_backward_fp8(const Layer& layer) const {
  const bool inp = on(fp8_.mlp_grad_inp), weight = on(fp8_.mlp_grad_weight);
  if (!inp && !weight) return {};
  const int l = layer.index;
  // Activations that forward had in FP8 keep its scale.
  const auto activation = [&](e4m3* codes_t, Fp8Scale* scale, Precision forward) {
    Fp8Copies<e4m3> turned = copies<e4m3>(nullptr, codes_t, scale);
    if (on(forward)) turned.scaling = Fp8Scaling::fixed, turned.count = false;
    return turned;
  };
  return {.up8_t = layer.up8_t,
          .up_scale = scales_.up + l,
          .down8 = layer.down8,
          .down_scale = scales_.down + l,
          .inp = activation(weight ? inp8_t_ : nullptr, scales_.inp + l, fp8_.mlp_up),
          .post = activation(weight ? post8_t_ : nullptr, scales_.post + l, fp8_.mlp_down),
          .dout = copies(inp ? dout8_ : nullptr, weight ? dout8_t_ : nullptr, scales_.mlp_dout + l),
          .dpre = copies(inp ? dpre8_ : nullptr, weight ? dpre8_t_ : nullptr, scales_.dpre + l)};
}

template <class T>
kernels::ProjectionFp8 MainTrack<T>::projection_fp8(Precision forward, Precision grad_inp, Precision grad_weight,
                                                    const e4m3* weight8, const e4m3* weight8_t, const Fp8Scale* weight_scale,
                                                    Fp8Scale* inp_scale, Fp8Scale* dout_scale) const {
  const bool inp = on(grad_inp), weight = on(grad_weight);
  if (!on(forward) && !inp && !weight) return {};
  return {.weight8 = weight8,
          .weight8_t = weight8_t,
          .weight_scale = weight_scale,
          .inp = copies(on(forward) ? inp8_ : nullptr, weight ? inp8_t_ : nullptr, inp_scale),
          .dout = copies(inp ? dout8_ : nullptr, weight ? dout8_t_ : nullptr, dout_scale)};
}

template <class T>
kernels::ProjectionFp8 MainTrack<T>::qkv_fp8(const Layer& layer) const {
  const int l = layer.index;
  return projection_fp8(fp8_.qkv, fp8_.qkv_grad_inp, fp8_.qkv_grad_weight, layer.qkv8, layer.qkv8_t, scales_.qkv_weight + l,
                        scales_.qkv_inp + l, scales_.qkv_dout + l);
}

template <class T>
kernels::ProjectionFp8 MainTrack<T>::out_fp8(const Layer& layer) const {
  const int l = layer.index;
  return projection_fp8(fp8_.out, fp8_.out_grad_inp, fp8_.out_grad_weight, layer.out8, layer.out8_t, scales_.out_weight + l,
                        scales_.out_inp + l, scales_.out_dout + l);
}

template <class T>
kernels::HeadFp8 MainTrack<T>::head_fp8() const {
  if (head8_ == nullptr) return {};
  return {.weight8 = head8_,
          .weight8_t = head8_t_,
          .weight_scale = scales_.head_weight,
          .inp8 = head_inp8_,
          .inp8_t = head_inp8_t_,
          .inp_scale = scales_.head_inp,
          .grad8 = head_grad8_,
          .grad8_t = head_grad8_t_,
          .row_shift = head_row_shift_,
          .grad_scale8 = scales_.head_grad,
          .grad_bound = fp8_.force_unit_scales ? static_cast<double>(kE4m3Max) : fp8_.head_grad_bound,
          .count = fp8_.warn_saturated > 0};
}

// Weights to E4M3. Down: by the maximum of the pass before with a margin, in the first steps by their own. The head's: fixed. All
// others: by their own.
template <class T>
void MainTrack<T>::begin_step(bool exact) {
  if (scale_buffer_ == nullptr) return;
  const kernels::Fp8WeightItem<T>* items = weight_items_;
  const auto quantize = [&](const std::vector<kernels::Fp8WeightItem<T>>& host, Fp8Scaling scaling) {
    if (host.empty()) return;
    kernels::fp8_weights(kernels::Fp8Weights<T>{.items = items,
                                                .host_items = host.data(),
                                                .num_items = static_cast<int>(host.size()),
                                                .scaling = fp8_.force_unit_scales ? Fp8Scaling::fixed : scaling,
                                                .count = fp8_.warn_saturated > 0,
                                                .verdict = nullptr},
                         exec());
    items += host.size();
  };
  quantize(up_items_, Fp8Scaling::current);
  // The maximum of the pass before becomes this pass's scale: not sooner, as the products multiply by the scale that the weights
  // were stored with.
  if (!down_items_.empty() && !exact && !fp8_.force_unit_scales) {
    kernels::fp8_next_scales({.scales = scales_.down,
                              .num_scales = static_cast<int>(layers_.size()),
                              .margin = fp8_.down_weight_margin,
                              .verdict = nullptr},
                             exec());
  }
  quantize(down_items_, exact ? Fp8Scaling::current : Fp8Scaling::delayed);
  quantize(head_items_, Fp8Scaling::fixed);
  quantize(attention_items_, Fp8Scaling::current);
}

template <class T>
void MainTrack<T>::end_step(kernels::StepVerdict* verdict) {
  if (!scaled_host_.empty()) kernels::scaled_weights_backward(scaled_weights(), exec());
  if (scale_buffer_ == nullptr || fp8_.force_unit_scales) return;
  const auto next = [&](Fp8Scale* scales, int count, bool forget_zeros) {
    kernels::fp8_next_scales(
        {.scales = scales, .num_scales = count, .margin = fp8_.mlp_down_margin, .verdict = verdict, .forget_zeros = forget_zeros},
        exec());
  };
  const bool in_backward = backward_delayed() && on(fp8_.mlp_grad_weight);
  const auto next_of_mlp = [&](Fp8Scale* scales, ScalingKind kind, Precision forward) {
    if (on(forward) ? kind == ScalingKind::delayed : in_backward) next(scales, num_layers(), !on(forward));
  };
  next_of_mlp(scales_.inp, fp8_.mlp_up_scaling, fp8_.mlp_up);
  next_of_mlp(scales_.post, fp8_.mlp_down_scaling, fp8_.mlp_down);
  if (!backward_delayed()) return;
  next(scales_.qkv_inp, 2 * num_layers(), true);  // out_inp comes next
  kernels::fp8_next_scales({.scales = scales_.mlp_dout,
                            .num_scales = 4 * num_layers(),  // of all gradients
                            .margin = fp8_.grad_margin,
                            .verdict = verdict,
                            .largest = kE5m2Max,
                            .forget_zeros = true},
                           exec());
}

// Scales are the same on every rank and positive, so their bits survive the maximum; counts of lost values become those of the rank
// that lost most.
template <class T>
std::pair<void*, int64_t> MainTrack<T>::maxima() {
  return {scale_buffer_, scale_buffer_ == nullptr ? 0 : static_cast<int64_t>(num_scales() * sizeof(Fp8Scale) / sizeof(uint32_t))};
}

template <class T>
std::vector<StateTensor> MainTrack<T>::state() {
  if (scale_buffer_ == nullptr) return {};
  return {{"fp8.scales", DType::u8, scale_buffer_, static_cast<int64_t>(num_scales() * sizeof(Fp8Scale))}};
}

template <class T>
void MainTrack<T>::reset_state() {
  write_initial_scales();
}

template <class T>
std::vector<Fp8Losses> MainTrack<T>::take_fp8_losses(int64_t tokens, int64_t steps) {
  if (scale_buffer_ == nullptr || fp8_.warn_saturated <= 0) return {};
  std::vector<Fp8Scale> scales(static_cast<size_t>(num_scales()));
  device_.copy_out(scales.data(), scale_buffer_, scales.size() * sizeof(Fp8Scale));
  device_.synchronize();
  std::vector<Fp8Losses> losses;
  const auto take = [&](const std::string& name, const Fp8Scale* scale, bool used, int64_t values) {
    Fp8Scale& host = scales[static_cast<size_t>(scale - scale_buffer_)];
    if (used) losses.push_back({name, host.saturated, host.flushed, values});
    host.saturated = host.flushed = 0;
  };
  const int64_t C = config_.width, F = config_.mlp_hidden, V = vocabulary_;
  const bool up = on(fp8_.mlp_up), down = on(fp8_.mlp_down), head = on(fp8_.head);
  const bool grad_inp = on(fp8_.mlp_grad_inp), grad_weight = on(fp8_.mlp_grad_weight), grads = grad_inp || grad_weight;
  const auto take_projection = [&](const std::string& name, Fp8Scale* inp, Fp8Scale* weight, Fp8Scale* dout, Precision forward,
                                   Precision inp_grad, Precision weight_grad, int64_t columns) {
    take(name + " input", inp, on(forward) || on(weight_grad), tokens * C);
    take(name + " weight", weight, on(forward) || on(inp_grad), steps * columns * C);
    take(name + " gradient", dout, on(inp_grad) || on(weight_grad), tokens * columns);
  };
  for (const Layer& layer : layers_) {
    const int l = layer.index;
    const std::string name = fmt::format("h.{}.mlp.", l);
    take(name + "up input", scales_.inp + l, up || grad_weight, tokens * C);
    take(name + "up weight", scales_.up + l, up || grad_inp, steps * F * C);
    take(name + "down input", scales_.post + l, down || grad_weight, tokens * F);
    take(name + "down weight", scales_.down + l, down || grad_inp, steps * F * C);
    if (!fp8_.beyond_record()) continue;
    take(name + "gradient", scales_.mlp_dout + l, grads, tokens * C);
    take(name + "hidden gradient", scales_.dpre + l, grads, tokens * F);
    if (!layer.on.attention) continue;
    take_projection(fmt::format("h.{}.attn.qkv", l), scales_.qkv_inp + l, scales_.qkv_weight + l, scales_.qkv_dout + l, fp8_.qkv,
                    fp8_.qkv_grad_inp, fp8_.qkv_grad_weight, 3 * C);
    take_projection(fmt::format("h.{}.attn.out", l), scales_.out_inp + l, scales_.out_weight + l, scales_.out_dout + l, fp8_.out,
                    fp8_.out_grad_inp, fp8_.out_grad_weight, C);
  }
  take("head input", scales_.head_inp, head, tokens * C);
  take("head weight", scales_.head_weight, head, steps * V * C);
  take("head gradient", scales_.head_grad, head, tokens * V);
  device_.copy_in(scale_buffer_, scales.data(), scales.size() * sizeof(Fp8Scale));
  device_.synchronize();
  return losses;
}

// The members that other files call.
template void MainTrack<float>::plan_fp8(MemoryPlan&);
template void MainTrack<float>::prepare_fp8();
template void MainTrack<float>::begin_step(bool);
template void MainTrack<float>::end_step(kernels::StepVerdict*);
template std::pair<void*, int64_t> MainTrack<float>::maxima();
template std::vector<StateTensor> MainTrack<float>::state();
template void MainTrack<float>::reset_state();
template std::vector<Fp8Losses> MainTrack<float>::take_fp8_losses(int64_t, int64_t);
template kernels::Relu2MlpFp8 MainTrack<float>::mlp_fp8(const Layer&, bool) const;
template kernels::HeadFp8 MainTrack<float>::head_fp8() const;
template kernels::Relu2MlpBackwardFp8 MainTrack<float>::mlp_backward_fp8(const Layer&) const;
template kernels::ProjectionFp8 MainTrack<float>::qkv_fp8(const Layer&) const;
template kernels::ProjectionFp8 MainTrack<float>::out_fp8(const Layer&) const;
template void MainTrack<double>::plan_fp8(MemoryPlan&);
template void MainTrack<double>::prepare_fp8();
template void MainTrack<double>::begin_step(bool);
template void MainTrack<double>::end_step(kernels::StepVerdict*);
template std::pair<void*, int64_t> MainTrack<double>::maxima();
template std::vector<StateTensor> MainTrack<double>::state();
template void MainTrack<double>::reset_state();
template std::vector<Fp8Losses> MainTrack<double>::take_fp8_losses(int64_t, int64_t);
template kernels::Relu2MlpFp8 MainTrack<double>::mlp_fp8(const Layer&, bool) const;
template kernels::HeadFp8 MainTrack<double>::head_fp8() const;
template kernels::Relu2MlpBackwardFp8 MainTrack<double>::mlp_backward_fp8(const Layer&) const;
template kernels::ProjectionFp8 MainTrack<double>::qkv_fp8(const Layer&) const;
template kernels::ProjectionFp8 MainTrack<double>::out_fp8(const Layer&) const;
#if SPEEDRUN_HAS_CUDA
template void MainTrack<bf16>::plan_fp8(MemoryPlan&);
template void MainTrack<bf16>::prepare_fp8();
template void MainTrack<bf16>::begin_step(bool);
template void MainTrack<bf16>::end_step(kernels::StepVerdict*);
template std::pair<void*, int64_t> MainTrack<bf16>::maxima();
template std::vector<StateTensor> MainTrack<bf16>::state();
template void MainTrack<bf16>::reset_state();
template std::vector<Fp8Losses> MainTrack<bf16>::take_fp8_losses(int64_t, int64_t);
template kernels::Relu2MlpFp8 MainTrack<bf16>::mlp_fp8(const Layer&, bool) const;
template kernels::HeadFp8 MainTrack<bf16>::head_fp8() const;
template kernels::Relu2MlpBackwardFp8 MainTrack<bf16>::mlp_backward_fp8(const Layer&) const;
template kernels::ProjectionFp8 MainTrack<bf16>::qkv_fp8(const Layer&) const;
template kernels::ProjectionFp8 MainTrack<bf16>::out_fp8(const Layer&) const;
#endif

}  // namespace speedrun
