#include "src/optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"
#include "src/optim/sharding.h"

namespace speedrun {
namespace {

// Adam's bias correction 1 − β^t, as FP32 sees it; exact enough for t = 1 and large t alike.
float correction(double beta, int64_t t) { return static_cast<float>(-std::expm1(static_cast<double>(t) * std::log(beta))); }

int64_t matrix_elements(const ParameterSpec& spec) { return spec.count() / spec.matrices; }
// normuon: statistics of a matrix, along its longer side
int64_t second_of_matrix(const ParameterSpec& spec) { return std::max(spec.shape[0] / spec.matrices, spec.shape[1]); }

bool is_due(uint32_t mask, int group) { return (mask >> group & 1u) != 0; }

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
Optimizer<T>::Optimizer(const Config& config, Device& device, Parameters<T>& parameters, Communicator* communicator)
    : config_(config.optim),
      grad_clip_(config.train.grad_clip),
      device_(device),
      parameters_(parameters),
      communicator_(parameters.sharding().world > 1 ? communicator : nullptr) {
  require(parameters.sharding().world == 1 || communicator != nullptr, "internal: several ranks without a communicator");
  const auto& rows = config_.muon.coefficients;
  for (int i = 0; i < config_.muon.iterations; ++i) {
    const auto& row = rows[std::min(static_cast<size_t>(i), rows.size() - 1)];
    coefficients_.push_back({row[0], row[1], row[2]});
  }
  for (int p = 0; p < parameters.size(); ++p) {
    const ParameterSpec& spec = parameters.spec(p);
    if (spec.frozen) continue;
    const Config::Group& group = group_config(config_, spec.group);
    if (!is_muon(group.optimizer)) {
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
    const ParameterRange own = parameters.own(p);
    const int64_t first = own.begin / matrix_elements(spec), last = (own.begin + own.count) / matrix_elements(spec);
    for (int64_t part = first; part < last; ++part)
      batch->sources.emplace_back(muon_parameters_.size() - 1, static_cast<int>(part));
  }
}

template <class T>
ParameterRange Optimizer<T>::second_range(int parameter) const {
  const ParameterSpec& spec = parameters_.spec(parameter);
  const ParameterRange own = parameters_.own(parameter);
  const int64_t each = second_of_matrix(spec);
  return {own.begin / matrix_elements(spec) * each, own.count / matrix_elements(spec) * each};
}

template <class T>
bool Optimizer<T>::cut_by_rows(int parameter) const {
  const Sharding& sharding = parameters_.sharding();
  const std::vector<int64_t>& shape = parameters_.spec(parameter).shape;
  return shape.size() == 2 && std::any_of(sharding.units.begin(), sharding.units.end(), [&](const ParameterUnit& unit) {
           return unit.kind == ParameterUnit::Kind::elements && unit.parameters.front() == parameter &&
                  unit.slice * sharding.world == shape[0] * shape[1] && unit.slice % shape[1] == 0;
         });
}

template <class T>
void Optimizer<T>::allow_sparse(int parameter, int64_t rows_per_owner) {
  const ParameterSpec& spec = parameters_.spec(parameter);
  require(cut_by_rows(parameter), "internal: ", spec.name, " is not cut by rows");
  sparse_table_ = parameter;
  sparse_rows_.emplace(SparseRowsShape{.V = spec.shape[0],
                                       .C = static_cast<int>(spec.shape[1]),
                                       .ranks = parameters_.sharding().world,
                                       .rows_per_owner = rows_per_owner});
  touched_capacity_ = parameters_.sharding().world * rows_per_owner;
}

template <class T>
void Optimizer<T>::plan(MemoryPlan& memory) {
  for (AdamTensor& tensor : adam_) {
    const size_t bytes = static_cast<size_t>(parameters_.own(tensor.parameter).count) * dtype_size(tensor.dtype);
    memory.add_bytes("optimizer: Adam", &tensor.m, bytes);
    memory.add_bytes("optimizer: Adam", &tensor.v, bytes);
  }
  for (MuonParameter& owner : muon_parameters_) {
    const ParameterSpec& spec = parameters_.spec(owner.parameter);
    memory.add("optimizer: Muon", &owner.momentum, parameters_.own(owner.parameter).count);
    if (group_config(config_, spec.group).optimizer == OptimizerKind::normuon)
      memory.add("optimizer: Muon", &owner.second, second_range(owner.parameter).count);
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
  if (sparse_rows_) {
    const std::string category = "ranks: touched rows of " + parameters_.spec(sparse_table_).name;
    sparse_rows_->plan(memory, category);
    memory.add(category, &touched_rows_, 1 + touched_capacity_);
  }
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
      Acc<T>* second =
          owner.second == nullptr ? nullptr : owner.second + part * second_of_matrix(spec) - second_range(owner.parameter).begin;
      batch.host.push_back({.weight = weight,
                            .momentum = owner.momentum + offset - parameters_.own(owner.parameter).begin,
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

// A unit updates as a whole: its parameters have the same interval. The embedding that is tied to the head is a unit alone or has
// no gradient.
template <class T>
bool Optimizer<T>::due(const ParameterUnit& unit, uint32_t mask) const {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(), [&](int p) {
    return !parameters_.spec(p).frozen && is_due(mask, static_cast<int>(parameters_.spec(p).group));
  });
}

template <class T>
void Optimizer<T>::begin_sparse_sum(int64_t rows_per_owner) {
  sparse_rows_->set_capacity(rows_per_owner);
  sparse_rows_->pack(device_, parameters_.grad(sparse_table_), touched_rows_ + 1, touched_rows_);
  communicator_->fork();
  communicator_->group_start();
  sparse_rows_->exchange(*communicator_);
  communicator_->group_end();
}

template <class T>
void Optimizer<T>::begin_sum(const Acc<T>* grad, const GradientSums& sums) {
  if (sums.rows_per_owner > 0 && grad == parameters_.grad(sparse_table_)) {
    begin_sparse_sum(sums.rows_per_owner);
    return;
  }
  for (const ParameterUnit& unit : parameters_.sharding().units) {
    if (unit.kind != ParameterUnit::Kind::elements || parameters_.grads() + unit.offset != grad) continue;
    communicator_->fork();
    communicator_->reduce_scatter(parameters_.grads() + unit.offset, unit.slice, comm_type<Acc<T>>());
  }
}

template <class T>
bool Optimizer<T>::sums_tables(uint32_t mask) const {
  const std::vector<ParameterUnit>& units = parameters_.sharding().units;
  return std::any_of(units.begin(), units.end(),
                     [&](const ParameterUnit& unit) { return unit.kind == ParameterUnit::Kind::elements && due(unit, mask); });
}

template <class T>
void Optimizer<T>::sum_gradients(uint32_t mask, const GradientSums& sums) {
  constexpr CommType type = comm_type<Acc<T>>();
  Acc<T>* sparse = sums.rows_per_owner > 0 ? parameters_.grad(sparse_table_) : nullptr;
  if (sparse != nullptr && !sums.begun) begin_sparse_sum(sums.rows_per_owner);
  communicator_->fork();
  communicator_->group_start();
  communicator_->all_reduce(&verdict_->loss_sum, 1, CommType::f64, ReduceOp::sum);
  for (const ParameterUnit& unit : parameters_.sharding().units) {
    Acc<T>* grads = parameters_.grads() + unit.offset;
    if (!due(unit, mask) || grads == sparse || (sums.begun && unit.kind == ParameterUnit::Kind::elements)) continue;
    if (unit.kind == ParameterUnit::Kind::replicated) {
      communicator_->all_reduce(grads, unit.slice, type, ReduceOp::sum);
    } else {
      communicator_->reduce_scatter(grads, unit.slice, type);
    }
  }
  communicator_->group_end();
  communicator_->join();
  if (sparse == nullptr) return;
  // Rows that no rank touched are zero here, too.
  sparse_rows_->set_capacity(sums.rows_per_owner);
  sparse_rows_->sum(device_, sparse);
}

template <class T>
void Optimizer<T>::update(uint32_t mask, const GradientSums& sums) {
  const kernels::GradVerdict<T> verdict{.verdict = verdict_,
                                        .sums = sums_,
                                        .scratch = sums_scratch_,
                                        .grads = parameters_.grads(),
                                        .segments = segments_,
                                        .num_segments = parameters_.size(),
                                        .grad_clip = grad_clip_,
                                        .groups = mask};
  if (communicator_ != nullptr) sum_gradients(mask, sums);
  kernels::grad_sums(verdict, device_.template exec<T>());
  if (communicator_ != nullptr) {
    communicator_->fork();
    communicator_->all_reduce(sums_, parameters_.size(), CommType::f64, ReduceOp::sum);
    communicator_->join();
  }
  kernels::grad_verdict(verdict, device_.template exec<T>());
  update_muon(mask);
  update_adam(mask);
  zero_gradients(mask);
  spread_values(parameters_, communicator_, [&](const ParameterUnit& unit) { return due(unit, mask); });
}

template <class T>
void Optimizer<T>::update_muon(uint32_t mask) {
  for (const MuonBatch& batch : muon_) {
    if (!is_due(mask, batch.group) || batch.host.empty()) continue;
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
        device_.template exec<T>());
  }
}

template <class T>
void Optimizer<T>::update_adam(uint32_t mask) {
  for (const AdamTensor& tensor : adam_) {
    const ParameterSpec& spec = parameters_.spec(tensor.parameter);
    const ParameterRange own = parameters_.own(tensor.parameter);
    const int group_index = static_cast<int>(spec.group);
    if (!is_due(mask, group_index) || own.count == 0) continue;
    const Config::Group& group = group_config(config_, spec.group);
    kernels::WeightRef<T> weight = parameters_.weight(tensor.parameter);
    weight.value += own.begin;
    if (weight.low != nullptr) weight.low += own.begin;
    kernels::adamw_update(
        kernels::AdamW<T>{.weight = weight,
                          .m = tensor.m,
                          .v = tensor.v,
                          .bf16_state = group.state == StateDType::bf16,
                          .grad = parameters_.grad(tensor.parameter) + own.begin,
                          .step = &inputs_->adam[group_index],
                          .verdict = verdict_,
                          .n = own.count,
                          .beta1 = group.beta1,
                          .beta2 = group.beta2,
                          .eps = group.eps,
                          .form = group.optimizer == OptimizerKind::adam ? kernels::AdamForm::cautious : kernels::AdamForm::adamw,
                          .decays = spec.decay},
        device_.template exec<T>());
  }
}

template <class T>
void Optimizer<T>::zero_gradients(uint32_t mask) {
  const auto zero = [&](int64_t from, int64_t to) {
    device_.zero(parameters_.grads() + from, static_cast<size_t>(to - from) * sizeof(Acc<T>));
  };
  for (const ParameterUnit& unit : parameters_.sharding().units) {
    const int64_t slices = unit.kind == ParameterUnit::Kind::replicated ? 1 : parameters_.sharding().world;
    if (due(unit, mask)) zero(unit.offset, unit.offset + slices * unit.slice);
  }
  if (!parameters_.sharding().units.empty()) return;
  // Neighbouring parameters that are done with their gradients are zeroed in one go.
  for (int p = 0; p < parameters_.size();) {
    int end = p;
    while (end < parameters_.size() && is_due(mask, static_cast<int>(parameters_.spec(end).group))) ++end;
    if (end > p) zero(parameters_.offset(p), end < parameters_.size() ? parameters_.offset(end) : parameters_.buffer_count());
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
  const ParameterRange own = parameters_.own(from.parameter), own_to = parameters_.own(to.parameter);
  require(own.begin == own_to.begin && own.count == own_to.count, "internal: wte and head.weight are divided in different ways");
  require(parameters_.spec(to.parameter).count() == n && to.dtype == from.dtype && embedding.split == head.split,
          "internal: wte and head.weight differ in size, state or master");
  const auto count = static_cast<size_t>(n);
  device_.copy(embedding.value, head.value, count * sizeof(T));
  if (head.low != nullptr) device_.copy(embedding.low, head.low, count * sizeof(uint16_t));
  const size_t state_bytes = static_cast<size_t>(own.count) * dtype_size(from.dtype);
  device_.copy(to.m, from.m, state_bytes);
  device_.copy(to.v, from.v, state_bytes);
}

template <class T>
void Optimizer<T>::reset_momentum(const std::vector<int>& parameters, const kernels::JumpReport* report) {
  const auto reset = [&](int parameter, void* moment, DType dtype) {
    const int64_t count = parameters_.own(parameter).count;
    if (count == 0 || std::find(parameters.begin(), parameters.end(), parameter) == parameters.end()) return;
    kernels::reset_moment({.moment = moment, .bytes = count * static_cast<int64_t>(dtype_size(dtype)), .report = report},
                          device_.template exec<T>());
  };
  for (const AdamTensor& tensor : adam_) reset(tensor.parameter, tensor.m, tensor.dtype);
  for (const MuonParameter& owner : muon_parameters_) reset(owner.parameter, owner.momentum, DTypeOf<Acc<T>>::value);
}

template <class T>
std::vector<StateTensor> Optimizer<T>::state() {
  std::vector<StateTensor> tensors;
  const auto add = [&](const char* kind, int p, DType dtype, void* data, ParameterRange range, int64_t whole_count) {
    const StateTensor::Held held = parameters_.replicated(p) ? StateTensor::Held::whole : StateTensor::Held::part;
    tensors.push_back({kind + parameters_.spec(p).name, dtype, data, range.count, held, range.begin, whole_count});
  };
  for (const AdamTensor& tensor : adam_) {
    const int p = tensor.parameter;
    add("adam.m/", p, tensor.dtype, tensor.m, parameters_.own(p), parameters_.spec(p).count());
    add("adam.v/", p, tensor.dtype, tensor.v, parameters_.own(p), parameters_.spec(p).count());
  }
  for (const MuonParameter& owner : muon_parameters_) {
    const int p = owner.parameter;
    const ParameterSpec& spec = parameters_.spec(p);
    constexpr DType dtype = DTypeOf<Acc<T>>::value;
    add("muon.momentum/", p, dtype, owner.momentum, parameters_.own(p), spec.count());
    if (owner.second != nullptr || group_config(config_, spec.group).optimizer == OptimizerKind::normuon)
      add("normuon.second/", p, dtype, owner.second, second_range(p), spec.matrices * second_of_matrix(spec));
  }
  // Groups that update every n-th step carry summed gradients from one step to the next, each rank those of its rows.
  for (int p = 0; p < parameters_.size(); ++p) {
    const ParameterSpec& spec = parameters_.spec(p);
    if (spec.frozen || group_config(config_, spec.group).every == 1) continue;
    const StateTensor::Held held = communicator_ == nullptr ? StateTensor::Held::whole : StateTensor::Held::sum;
    tensors.push_back({"grad/" + spec.name, DTypeOf<Acc<T>>::value, parameters_.grad(p), spec.count(), held, 0, spec.count()});
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
