// FP8 in the Main Track's model: memory, scales, and what happens once per step.
#include "fmt/format.h"
#include "kernels/relu2_mlp/relu2_up_sm90.h"
#include "src/model/main_track.h"

namespace speedrun {
namespace {

using kernels::Fp8Scale;
using kernels::Fp8Scaling;

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
  const int64_t n = shape_.max_tokens, C = config_.width, F = config_.mlp_hidden, V = vocabulary_, chunk = shape_.logits_chunk;
  const bool up = fp8_.mlp_up == Precision::fp8, down = fp8_.mlp_down == Precision::fp8, head = fp8_.head == Precision::fp8;
  if (!up && !down && !head) return;
  memory.add("FP8: scales and tables", &scale_buffer_, num_scales());
  memory.add("FP8: scales and tables", &weight_items_, 2 * static_cast<int64_t>(layers_.size()) + 1);
  for (Layer& layer : layers_) {
    if (up) memory.add("FP8: weights", &layer.up8, F * C);
    if (down) memory.add("FP8: weights", &layer.down8, F * C);
  }
  if (up) memory.add("FP8: activations", &inp8_, n * C);
  if (down) memory.add("FP8: activations", &post8_, n * F);
  if (!head) return;
  memory.add("FP8: weights", &head8_, V * C);
  memory.add("FP8: weights", &head8_t_, V * C);
  memory.add("FP8: activations", &head_inp8_, chunk * C);
  memory.add("FP8: activations", &head_inp8_t_, chunk * C);
  memory.add("FP8: logits' gradient", &head_grad8_, chunk * V);
  memory.add("FP8: logits' gradient", &head_grad8_t_, chunk * V);
}

template <class T>
void MainTrack<T>::prepare_fp8() {
  if (scale_buffer_ == nullptr) return;
  const int64_t layers = static_cast<int64_t>(layers_.size());
  Fp8Scale* next = scale_buffer_;
  for (Fp8Scale** kind : {&scales_.inp, &scales_.up, &scales_.post, &scales_.down}) {
    *kind = next;
    next += layers;
  }
  scales_.head_inp = next++;
  scales_.head_weight = next++;
  scales_.head_grad = next++;
  const int C = config_.width, F = config_.mlp_hidden;
  up_items_.clear();
  down_items_.clear();
  head_items_.clear();
  for (Layer& layer : layers_) {
    if (layer.up8 != nullptr) up_items_.push_back({layer.up8, nullptr, layer.up_weight, scales_.up + layer.index, F, C});
    if (layer.down8 != nullptr) down_items_.push_back({nullptr, layer.down8, layer.down_weight, scales_.down + layer.index, F, C});
  }
  if (head8_ != nullptr)
    head_items_.push_back({head8_, head8_t_, head_weight_, scales_.head_weight, static_cast<int>(vocabulary_), C});
  std::vector<kernels::Fp8WeightItem<T>> all = up_items_;
  all.insert(all.end(), down_items_.begin(), down_items_.end());
  all.insert(all.end(), head_items_.begin(), head_items_.end());
  device_.copy_in(weight_items_, all.data(), all.size() * sizeof(all[0]));
  device_.synchronize();
  write_initial_scales();
}

template <class T>
void MainTrack<T>::write_initial_scales() {
  if (scale_buffer_ == nullptr) return;
  std::vector<Fp8Scale> scales(static_cast<size_t>(num_scales()));
  const auto set = [&](Fp8Scale* scale, double bound) {
    if (!fp8_.force_unit_scales) scales[static_cast<size_t>(scale - scale_buffer_)].scale = static_cast<float>(bound / kE4m3Max);
  };
  for (const Layer& layer : layers_) {
    if (fp8_.mlp_up_scaling == ScalingKind::fixed) set(scales_.inp + layer.index, fp8_.mlp_up_bound);
    if (fp8_.mlp_down_scaling == ScalingKind::fixed) set(scales_.post + layer.index, fp8_.mlp_down_bound);
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
    const bool takes = fp8_operands ? kernels::relu2_up_sm90_takes<e4m3>(C, F, exec()) : kernels::relu2_up_sm90_takes<bf16>(C, F, exec());
    if (!takes && fp8_.mlp_up_kernel == MlpUpKernel::fused) {
      throw InputError(fmt::format("fp8.mlp_up_kernel = fused: needs compute capability 9.0 and other shapes than model.width = {}, "
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
          .down8 = layer.down8,
          .down_scale = scales_.down + layer.index,
          .post8 = post8_,
          .post_scale = scales_.post + layer.index,
          .post_scaling = fp8_scaling(fp8_, fp8_.mlp_down_scaling),
          .fused_up = fused_up(layer.up8 != nullptr),
          .count = fp8_.warn_saturated > 0};
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
          .grad_scale8 = scales_.head_grad,
          .grad_bound = fp8_.force_unit_scales ? static_cast<double>(kE4m3Max) : fp8_.head_grad_bound,
          .count = fp8_.warn_saturated > 0};
}

// Weights to E4M3. Up: by their own maximum. Down: by the maximum of the pass before with a margin, in the first steps by their
// own.
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
  quantize(down_items_, exact ? Fp8Scaling::current : Fp8Scaling::delayed);
  quantize(head_items_, Fp8Scaling::fixed);
  if (!down_items_.empty() && !fp8_.force_unit_scales) {
    kernels::fp8_next_scales({.scales = scales_.down,
                              .num_scales = static_cast<int>(layers_.size()),
                              .margin = fp8_.down_weight_margin,
                              .verdict = nullptr},
                             exec());
  }
}

template <class T>
void MainTrack<T>::end_step(kernels::StepVerdict* verdict) {
  if (!scaled_host_.empty()) {
    kernels::scaled_weights_backward(
        kernels::ScaledWeights<T>{
            .items = scaled_items_, .scratch = scaled_scratch_, .num_items = static_cast<int>(scaled_host_.size())},
        exec());
  }
  if (scale_buffer_ == nullptr || fp8_.force_unit_scales) return;
  const auto next = [&](Fp8Scale* scales, ScalingKind kind, Precision precision) {
    if (precision != Precision::fp8 || kind != ScalingKind::delayed) return;
    kernels::fp8_next_scales(
        {.scales = scales, .num_scales = static_cast<int>(layers_.size()), .margin = fp8_.mlp_down_margin, .verdict = verdict},
        exec());
  };
  next(scales_.inp, fp8_.mlp_up_scaling, fp8_.mlp_up);
  next(scales_.post, fp8_.mlp_down_scaling, fp8_.mlp_down);
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
  const bool up = fp8_.mlp_up == Precision::fp8, down = fp8_.mlp_down == Precision::fp8, head = fp8_.head == Precision::fp8;
  for (const Layer& layer : layers_) {
    const std::string name = fmt::format("h.{}.mlp.", layer.index);
    take(name + "up input", scales_.inp + layer.index, up, tokens * C);
    take(name + "up weight", scales_.up + layer.index, up, steps * F * C);
    take(name + "down input", scales_.post + layer.index, down, tokens * F);
    take(name + "down weight", scales_.down + layer.index, down, steps * F * C);
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
template std::vector<StateTensor> MainTrack<float>::state();
template void MainTrack<float>::reset_state();
template std::vector<Fp8Losses> MainTrack<float>::take_fp8_losses(int64_t, int64_t);
template kernels::Relu2MlpFp8 MainTrack<float>::mlp_fp8(const Layer&, bool) const;
template kernels::HeadFp8 MainTrack<float>::head_fp8() const;
template void MainTrack<double>::plan_fp8(MemoryPlan&);
template void MainTrack<double>::prepare_fp8();
template void MainTrack<double>::begin_step(bool);
template void MainTrack<double>::end_step(kernels::StepVerdict*);
template std::vector<StateTensor> MainTrack<double>::state();
template void MainTrack<double>::reset_state();
template std::vector<Fp8Losses> MainTrack<double>::take_fp8_losses(int64_t, int64_t);
template kernels::Relu2MlpFp8 MainTrack<double>::mlp_fp8(const Layer&, bool) const;
template kernels::HeadFp8 MainTrack<double>::head_fp8() const;
#if SPEEDRUN_HAS_CUDA
template void MainTrack<bf16>::plan_fp8(MemoryPlan&);
template void MainTrack<bf16>::prepare_fp8();
template void MainTrack<bf16>::begin_step(bool);
template void MainTrack<bf16>::end_step(kernels::StepVerdict*);
template std::vector<StateTensor> MainTrack<bf16>::state();
template void MainTrack<bf16>::reset_state();
template std::vector<Fp8Losses> MainTrack<bf16>::take_fp8_losses(int64_t, int64_t);
template kernels::Relu2MlpFp8 MainTrack<bf16>::mlp_fp8(const Layer&, bool) const;
template kernels::HeadFp8 MainTrack<bf16>::head_fp8() const;
#endif

}  // namespace speedrun
