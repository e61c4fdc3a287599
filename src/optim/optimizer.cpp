#include "src/optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

// Adam's bias correction 1 − β^t, as FP32 sees it; exact enough for t = 1 and large t alike.
float correction(double beta, int64_t t) { return static_cast<float>(-std::expm1(static_cast<double>(t) * std::log(beta))); }

// normuon: statistics of all matrices of a parameter, each along its longer side
int64_t second_count(const ParameterSpec& spec) { return spec.matrices * std::max(spec.shape[0] / spec.matrices, spec.shape[1]); }

bool is_adam(OptimizerKind kind) { return kind == OptimizerKind::adamw || kind == OptimizerKind::adam; }

// d(objective) / d(loss of a token)
double token_weight(const Config& config, const StepValues& values) {
  const auto batch_tokens = static_cast<double>(values.batch_tokens);
  switch (config.train.reduction) {
    case ReductionKind::mean:
      return 1 / batch_tokens;
    case ReductionKind::sum:
      return 1;
    case ReductionKind::row_mean:
      return static_cast<double>(stages_of(config).at(static_cast<size_t>(values.stage)).row_tokens) / batch_tokens;
  }
  return 1;
}

}  // namespace

template <class T>
Optimizer<T>::Optimizer(const Config& config, Device& device, Parameters<T>& parameters)
    : config_(config.optim), grad_clip_(config.train.grad_clip), device_(device), parameters_(parameters) {
  const auto& rows = config_.muon.coefficients;
  for (int i = 0; i < config_.muon.iterations; ++i) {
    const auto& row = rows[std::min(static_cast<size_t>(i), rows.size() - 1)];
    coefficients_.push_back({row[0], row[1], row[2]});
  }
  for (int p = 0; p < parameters.size(); ++p) {
    const ParameterSpec& spec = parameters.spec(p);
    if (spec.frozen) continue;
    const Config::Group& group = group_config(config_, spec.group);
    if (is_adam(group.optimizer)) {
      const bool half = group.state == StateDType::bf16 && std::is_same_v<T, bf16>;
      adam_.push_back({p, half ? DType::bf16 : DTypeOf<Acc<T>>::value});
      continue;
    }
    require(spec.shape.size() == 2, "optim: Muon updates matrices, but ", spec.name, " is none");
    muon_parameters_.push_back({p});
    const int rows_each = static_cast<int>(spec.shape[0] / spec.matrices), cols = static_cast<int>(spec.shape[1]);
    auto batch = std::find_if(muon_.begin(), muon_.end(), [&](const MuonBatch& b) {
      return b.kind == group.optimizer && b.every == group.every && b.rows == rows_each && b.cols == cols;
    });
    if (batch == muon_.end()) {
      muon_.push_back({.group = static_cast<int>(spec.group),
                       .kind = group.optimizer,
                       .every = group.every,
                       .rows = rows_each,
                       .cols = cols,
                       .host = {},
                       .sources = {}});
      batch = muon_.end() - 1;
    }
    for (int part = 0; part < spec.matrices; ++part) batch->sources.emplace_back(muon_parameters_.size() - 1, part);
  }
}

template <class T>
void Optimizer<T>::plan(MemoryPlan& memory) {
  for (AdamTensor& tensor : adam_) {
    const size_t bytes = static_cast<size_t>(parameters_.spec(tensor.parameter).count()) * dtype_size(tensor.dtype);
    memory.add_bytes("optimizer: Adam", &tensor.m, bytes);
    memory.add_bytes("optimizer: Adam", &tensor.v, bytes);
  }
  for (MuonParameter& owner : muon_parameters_) {
    const ParameterSpec& spec = parameters_.spec(owner.parameter);
    memory.add("optimizer: Muon", &owner.momentum, spec.count());
    if (group_config(config_, spec.group).optimizer == OptimizerKind::normuon)
      memory.add("optimizer: Muon", &owner.second, second_count(spec));
  }
  int64_t x = 0, gram = 0, sums = 0;
  for (MuonBatch& batch : muon_) {
    const int64_t n = static_cast<int64_t>(batch.sources.size()), side = std::min(batch.rows, batch.cols);
    memory.add("optimizer: tables", &batch.device, n);
    x = std::max(x, n * batch.rows * batch.cols);
    gram = std::max(gram, n * side * side);
    sums = std::max(sums, n * kernels::muon_sums(batch.rows, batch.cols));
  }
  memory.add("optimizer: Newton-Schulz", &muon_x_, 2 * x);
  memory.add("optimizer: Newton-Schulz", &muon_gram_, 2 * gram);
  memory.add("optimizer: Newton-Schulz", &muon_sums_, sums);
  memory.add("optimizer: tables", &segments_, parameters_.size());
  memory.add("optimizer: tables", &sums_, parameters_.size());
  memory.add("optimizer: tables", &sums_scratch_, kernels::grad_verdict_scratch(parameters_.size()));
}

template <class T>
void Optimizer<T>::prepare(const StepInputs<T>* inputs, kernels::StepVerdict* verdict) {
  inputs_ = inputs;
  verdict_ = verdict;
  const std::vector<kernels::GradSegment> segments = parameters_.segments();
  device_.copy_in(segments_, segments.data(), segments.size() * sizeof(kernels::GradSegment));
  for (MuonBatch& batch : muon_) {
    batch.host.clear();
    for (const auto& [position, part] : batch.sources) {
      const MuonParameter& owner = muon_parameters_[position];
      const ParameterSpec& spec = parameters_.spec(owner.parameter);
      const int64_t offset = static_cast<int64_t>(part) * batch.rows * batch.cols;
      kernels::WeightRef<T> weight = parameters_.weight(owner.parameter);
      weight.value += offset;
      if (weight.low != nullptr) weight.low += offset;
      Acc<T>* second = owner.second == nullptr ? nullptr : owner.second + int64_t{part} * std::max(batch.rows, batch.cols);
      batch.host.push_back({.weight = weight,
                            .momentum = owner.momentum + offset,
                            .second = second,
                            .grad = parameters_.grad(owner.parameter) + offset,
                            .step = &inputs_->muon[static_cast<int>(spec.group)],
                            .decays = spec.decay});
    }
    device_.copy_in(batch.device, batch.host.data(), batch.host.size() * sizeof(kernels::MuonMatrix<T>));
  }
  device_.synchronize();
}

template <class T>
StepInputs<T> Optimizer<T>::inputs_of(const Config& config, const StepValues& values, int step) {
  StepInputs<T> inputs;
  inputs.grad_scale = static_cast<Acc<T>>(token_weight(config, values));
  for (size_t term = 0; term < values.next_weights.size(); ++term)
    inputs.loss_weights.next[term] = static_cast<Acc<T>>(values.next_weights[term]);
  inputs.loss_weights.prefix = static_cast<Acc<T>>(values.prefix_weight);
  for (int g = 0; g < kNumParameterGroups; ++g) {
    const GroupStep& group = values.groups[static_cast<size_t>(g)];
    const Config::Group& settings = group_config(config.optim, static_cast<ParameterGroup>(g));
    const int64_t updates = (step + 1) / settings.every;  // this one included, if it is one
    const auto lr = static_cast<float>(group.lr);
    // Decoupled decay goes with the rate, that of the record's two forms with its square; normuon leaves the group's multiplier out
    // of one factor.
    double decay = group.lr * group.weight_decay;
    if (settings.optimizer == OptimizerKind::adam) decay *= group.lr;
    if (settings.optimizer == OptimizerKind::normuon) decay *= settings.lr * values.lr_factor;
    inputs.adam[g] = {lr, static_cast<float>(decay), correction(settings.beta1, updates), correction(settings.beta2, updates)};
    inputs.muon[g] = {lr, static_cast<float>(decay), static_cast<float>(values.muon_momentum)};
  }
  return inputs;
}

template <class T>
uint32_t Optimizer<T>::update_mask(const StepValues& values) {
  uint32_t mask = 0;
  for (int g = 0; g < kNumParameterGroups; ++g) {
    if (values.groups[static_cast<size_t>(g)].update) mask |= 1u << g;
  }
  return mask;
}

template <class T>
void Optimizer<T>::update(uint32_t mask) {
  const kernels::Exec<T>& exec = device_.template exec<T>();
  kernels::grad_verdict(kernels::GradVerdict<T>{.verdict = verdict_,
                                                .sums = sums_,
                                                .scratch = sums_scratch_,
                                                .grads = parameters_.grads(),
                                                .segments = segments_,
                                                .num_segments = parameters_.size(),
                                                .grad_clip = grad_clip_},
                        exec);
  const auto due = [&](int group) { return (mask >> group & 1u) != 0; };
  for (const MuonBatch& batch : muon_) {
    if (!due(batch.group)) continue;
    kernels::muon_update(
        kernels::Muon<T>{.matrices = batch.device,
                         .coefficients = coefficients_.data(),
                         .x = muon_x_,
                         .gram = muon_gram_,
                         .sums = muon_sums_,
                         .verdict = verdict_,
                         .batch = static_cast<int>(batch.host.size()),
                         .rows = batch.rows,
                         .cols = batch.cols,
                         .iterations = config_.muon.iterations,
                         .nesterov = config_.muon.nesterov,
                         .norm_margin = config_.muon.norm_margin,
                         .eps = config_.muon.eps,
                         .form = batch.kind == OptimizerKind::normuon ? kernels::MuonForm::normuon : kernels::MuonForm::muon,
                         .beta2 = config_.muon.beta2},
        exec);
  }
  for (const AdamTensor& tensor : adam_) {
    const ParameterSpec& spec = parameters_.spec(tensor.parameter);
    const int group_index = static_cast<int>(spec.group);
    if (!due(group_index)) continue;
    const Config::Group& group = group_config(config_, spec.group);
    kernels::adamw_update(
        kernels::AdamW<T>{.weight = parameters_.weight(tensor.parameter),
                          .m = tensor.m,
                          .v = tensor.v,
                          .bf16_state = group.state == StateDType::bf16,
                          .grad = parameters_.grad(tensor.parameter),
                          .step = &inputs_->adam[group_index],
                          .verdict = verdict_,
                          .n = spec.count(),
                          .beta1 = group.beta1,
                          .beta2 = group.beta2,
                          .eps = group.eps,
                          .form = group.optimizer == OptimizerKind::adam ? kernels::AdamForm::cautious : kernels::AdamForm::adamw,
                          .decays = spec.decay},
        exec);
  }
  // Neighbouring parameters that are done with their gradients are zeroed in one go.
  for (int p = 0; p < parameters_.size();) {
    int end = p;
    while (end < parameters_.size() && due(static_cast<int>(parameters_.spec(end).group))) ++end;
    if (end > p) {
      const int64_t from = parameters_.offset(p),
                    to = end < parameters_.size() ? parameters_.offset(end) : parameters_.buffer_count();
      device_.zero(parameters_.grads() + from, static_cast<size_t>(to - from) * sizeof(Acc<T>));
    }
    p = std::max(end, p + 1);
  }
}

template <class T>
typename Optimizer<T>::AdamTensor& Optimizer<T>::adam_tensor(const char* name) {
  const int p = parameters_.index(name);
  const auto found = std::find_if(adam_.begin(), adam_.end(), [p](const AdamTensor& tensor) { return tensor.parameter == p; });
  require(p >= 0 && found != adam_.end(), "internal: splitting the embedding needs Adam's state of ", name);
  return *found;
}

template <class T>
void Optimizer<T>::split_embedding() {
  const AdamTensor &from = adam_tensor("head.weight"), &to = adam_tensor("wte");
  const kernels::WeightRef<T> head = parameters_.weight(from.parameter), embedding = parameters_.weight(to.parameter);
  const int64_t n = parameters_.spec(from.parameter).count();
  require(parameters_.spec(to.parameter).count() == n && to.dtype == from.dtype && embedding.split == head.split,
          "internal: wte and head.weight differ in size, state or master");
  const auto count = static_cast<size_t>(n);
  device_.copy(embedding.value, head.value, count * sizeof(T));
  if (head.low != nullptr) device_.copy(embedding.low, head.low, count * sizeof(uint16_t));
  device_.copy(to.m, from.m, count * dtype_size(from.dtype));
  device_.copy(to.v, from.v, count * dtype_size(from.dtype));
}

template <class T>
std::vector<StateTensor> Optimizer<T>::state() {
  std::vector<StateTensor> tensors;
  for (const AdamTensor& tensor : adam_) {
    const ParameterSpec& spec = parameters_.spec(tensor.parameter);
    tensors.push_back({"adam.m/" + spec.name, tensor.dtype, tensor.m, spec.count()});
    tensors.push_back({"adam.v/" + spec.name, tensor.dtype, tensor.v, spec.count()});
  }
  for (const MuonParameter& owner : muon_parameters_) {
    const ParameterSpec& spec = parameters_.spec(owner.parameter);
    tensors.push_back({"muon.momentum/" + spec.name, DTypeOf<Acc<T>>::value, owner.momentum, spec.count()});
    if (owner.second != nullptr)
      tensors.push_back({"normuon.second/" + spec.name, DTypeOf<Acc<T>>::value, owner.second, second_count(spec)});
  }
  // Groups that update every n-th step carry summed gradients from one step to the next.
  for (int p = 0; p < parameters_.size(); ++p) {
    const ParameterSpec& spec = parameters_.spec(p);
    if (!spec.frozen && group_config(config_, spec.group).every > 1)
      tensors.push_back({"grad/" + spec.name, DTypeOf<Acc<T>>::value, parameters_.grad(p), spec.count()});
  }
  return tensors;
}

template <class T>
void Optimizer<T>::reset_state() {
  for (const StateTensor& tensor : state()) device_.zero(tensor.data, static_cast<size_t>(tensor.count) * dtype_size(tensor.dtype));
  device_.zero(parameters_.grads(), static_cast<size_t>(parameters_.buffer_count()) * sizeof(Acc<T>));
}

template class Optimizer<float>;
template class Optimizer<double>;
#if SPEEDRUN_HAS_CUDA
template class Optimizer<bf16>;
#endif

}  // namespace speedrun
