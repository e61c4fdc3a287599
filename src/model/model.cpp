#include "src/model/model.h"

#include <algorithm>

#include "src/model/gpt.h"
#include "src/model/main_track.h"

namespace speedrun {

kernels::Softcap softcap_of(SoftcapKind kind) {
  switch (kind) {
    case SoftcapKind::none:
      return kernels::Softcap::none;
    case SoftcapKind::rational:
      return kernels::Softcap::rational;
    case SoftcapKind::sigmoid:
      return kernels::Softcap::sigmoid;
  }
  throw Error("internal: unknown soft-cap");
}

template <class T>
std::vector<float> Model<T>::read_logits(T* logits, const T* inp, const T* weight, const T* bias) {
  const int64_t V = config_.padded_vocab_size();
  kernels::head_logits(kernels::HeadLogits<T>{.logits = logits,
                                              .inp = inp,
                                              .weight = weight,
                                              .bias = bias,
                                              .N = 1,
                                              .C = config_.width,
                                              .V = static_cast<int>(V),
                                              .softcap = softcap_of(config_.softcap),
                                              .softcap_value = config_.softcap_value},
                       exec());
  std::vector<T> raw(static_cast<size_t>(V));
  device_.copy_out(raw.data(), logits, raw.size() * sizeof(T));
  device_.synchronize();
  std::vector<float> values(raw.size());
  std::transform(raw.begin(), raw.end(), values.begin(), [](T value) { return static_cast<float>(value); });
  return values;
}

template <class T>
std::unique_ptr<Model<T>> make_model(const Config& config, const ModelShape& shape, std::vector<ModelStage> stages, Device& device,
                                     Parameters<T>& parameters) {
  if (config.model.architecture == Architecture::main_track)
    return std::make_unique<MainTrack<T>>(config, shape, std::move(stages), device, parameters);
  return std::make_unique<Gpt<T>>(config, shape, std::move(stages), device, parameters);
}

template class Model<float>;
template class Model<double>;
template std::unique_ptr<Model<float>> make_model(const Config&, const ModelShape&, std::vector<ModelStage>, Device&,
                                                  Parameters<float>&);
template std::unique_ptr<Model<double>> make_model(const Config&, const ModelShape&, std::vector<ModelStage>, Device&,
                                                   Parameters<double>&);
#if SPEEDRUN_HAS_CUDA
template class Model<bf16>;
template std::unique_ptr<Model<bf16>> make_model(const Config&, const ModelShape&, std::vector<ModelStage>, Device&,
                                                 Parameters<bf16>&);
#endif

}  // namespace speedrun
