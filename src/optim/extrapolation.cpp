#include "src/optim/extrapolation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/base/error.h"
#include "src/optim/schedule.h"
#include "src/optim/sharding.h"

namespace speedrun {
namespace {

// Elements: every parameter of a snapshot starts at a multiple of this, like its weights.
constexpr int64_t kAlignment = 64;

// ema and average keep two snapshots: E, and the weights that a jump goes from.
constexpr size_t kAverage = 0, kCurrent = 1;

bool takes_part(const ParameterSpec& spec, ExtrapolatedParameters which) {
  using enum ParameterGroup;
  if (spec.frozen) return false;
  switch (which) {
    case ExtrapolatedParameters::matrices:
      return spec.group == matrix || spec.group == down;
    case ExtrapolatedParameters::all:
      return true;
    case ExtrapolatedParameters::all_but_tables:
      return spec.group != embedding && spec.group != position && spec.group != head && spec.group != bigram &&
             spec.group != value_embedding;
  }
  return false;
}

kernels::ExtrapolationMethod kernel_method(ExtrapolationKind kind) {
  using kernels::ExtrapolationMethod;
  switch (kind) {
    case ExtrapolationKind::rre:
      return ExtrapolationMethod::rre;
    case ExtrapolationKind::rre_suffix:
      return ExtrapolationMethod::rre_suffix;
    case ExtrapolationKind::mpe:
      return ExtrapolationMethod::mpe;
    case ExtrapolationKind::anderson:
      return ExtrapolationMethod::anderson;
    case ExtrapolationKind::linear:
      return ExtrapolationMethod::linear;
    case ExtrapolationKind::none:
    case ExtrapolationKind::ema:
    case ExtrapolationKind::average:
      break;
  }
  return ExtrapolationMethod::fixed;
}

}  // namespace

ExtrapolationStep extrapolation_step(const Config& config, int completed, int begin) {
  const Config::Extrapolation& keys = config.extrapolation;
  ExtrapolationStep step;
  if (keys.method == ExtrapolationKind::none) return step;
  const auto [first, last] = extrapolation_span(config);
  const int64_t interval = keys.interval(), from = keys.first_snapshot(std::max(first, begin));
  if (completed < from || completed > last) return step;
  const bool to_weights = keys.apply == ExtrapolationApply::weights;
  step.snapshot = completed % interval == 0;
  if (keys.averages()) {
    step.taken = (completed - from) / interval + 1;
    const bool differs = completed > from;
    step.jump = to_weights && completed == last && differs;
    step.readout = !to_weights && differs;
    return step;
  }
  const int64_t reach = (keys.history - 1) * interval;  // from the oldest snapshot of a jump to its newest
  const int64_t first_jump = keys.first_jump(from), period = keys.next_multiple(reach, keys.every);
  int64_t oldest = from;
  if (to_weights && completed > first_jump) oldest = first_jump + (completed - 1 - first_jump) / period * period;
  step.taken = (completed - oldest) / interval + 1;
  const bool due = step.snapshot && completed % keys.every == 0 && step.taken >= keys.history;
  step.jump = due && to_weights;
  step.readout = due && !to_weights;
  return step;
}

template <class T>
Extrapolation<T>::Extrapolation(const Config& config, Device& device, Parameters<T>& parameters, Communicator* communicator)
    : config_(config),
      device_(device),
      parameters_(parameters),
      communicator_(parameters.sharding().world > 1 ? communicator : nullptr),
      snapshots_(static_cast<size_t>(keys().averages() ? 2 : keys().history)) {
  require(parameters.sharding().world == 1 || communicator != nullptr, "internal: several ranks without a communicator");
  for (int p = 0; p < parameters.size(); ++p) {
    if (!takes_part(parameters.spec(p), keys().parameters)) continue;
    chosen_.push_back(p);
    offsets_.push_back(snapshot_count_);
    const int64_t count = parameters.own(p).count;
    for (int64_t first = 0; first < count; first += kernels::kSnapshotPiece) ++num_pieces_;
    snapshot_count_ += (count + kAlignment - 1) / kAlignment * kAlignment;
  }
}

template <class T>
void Extrapolation<T>::plan(MemoryPlan& memory) {
  if (!keys().host_memory) {
    for (Acc<T>*& snapshot : snapshots_) memory.add("weight extrapolation: snapshots", &snapshot, snapshot_count_);
  }
  const int k = static_cast<int>(snapshots_.size());
  memory.add("weight extrapolation: sums", &pieces_, num_pieces_);
  memory.add("weight extrapolation: sums", &sums_, kernels::kMaxSnapshotSums);
  memory.add("weight extrapolation: sums", &sums_scratch_, kernels::snapshot_sums_scratch(num_pieces_, k));
  memory.add("weight extrapolation: sums", &report_, 1);
}

template <class T>
void Extrapolation<T>::prepare(const kernels::StepVerdict* verdict) {
  verdict_ = verdict;
  if (keys().host_memory) {
    for (Acc<T>*& snapshot : snapshots_) {
      in_host_memory_.emplace_back(device_, static_cast<size_t>(snapshot_count_));
      snapshot = in_host_memory_.back().data();
      std::memset(snapshot, 0, static_cast<size_t>(snapshot_count_) * sizeof(Acc<T>));
    }
  }
  host_pieces_.clear();
  for (size_t i = 0; i < chosen_.size(); ++i) {
    const int p = chosen_[i];
    const ParameterRange own = parameters_.own(p);
    const bool counted = !parameters_.replicated(p) || parameters_.sharding().rank == 0;
    for (int64_t first = 0; first < own.count; first += kernels::kSnapshotPiece) {
      kernels::WeightRef<T> weight = parameters_.weight(p);
      weight.value += own.begin + first;
      if (weight.low != nullptr) weight.low += own.begin + first;
      host_pieces_.push_back({.weight = weight,
                              .offset = offsets_[i] + first,
                              .count = std::min(kernels::kSnapshotPiece, own.count - first),
                              .counted = counted});
    }
  }
  device_.copy_in(pieces_, host_pieces_.data(), host_pieces_.size() * sizeof(kernels::SnapshotPiece<T>));
  device_.synchronize();
}

template <class T>
void Extrapolation<T>::warm_up() {
  HostBuffer<kernels::JumpReport> report(device_, 1);
  for (Acc<T>* snapshot : snapshots_) take(snapshot);
  remember({.taken = 2});
  jump(snapshots_, nullptr, report.data());
  kept_ = snapshots_.back();
  end_readout();
  device_.synchronize();
}

template <class T>
std::string Extrapolation<T>::describe() const {
  const auto [first, last] = extrapolation_span(config_);
  int64_t elements = 0;
  for (const int p : chosen_) elements += parameters_.spec(p).count();
  const double bytes = static_cast<double>(snapshots_.size()) * static_cast<double>(snapshot_count_) * sizeof(Acc<T>);
  const std::string memory = fmt::format("{} of {} elements of FP{} in {} memory{}, {:.2f} GB",
                                         keys().averages() ? "average and copy" : fmt::format("{} snapshots", keys().history),
                                         elements, 8 * sizeof(Acc<T>), keys().host_memory ? "host" : "device",
                                         communicator_ == nullptr ? "" : " (this rank's part)", bytes * 1e-9);
  const bool to_weights = keys().apply == ExtrapolationApply::weights;
  std::string when;
  if (keys().averages()) {
    when = to_weights ? fmt::format("into the weights after update {}", last) : "for validations alone";
  } else {
    int due = std::max(first, begin_);
    const auto acts = [&](const ExtrapolationStep& step) { return step.jump || step.readout; };
    while (due <= last && !acts(extrapolation_step(config_, due, begin_))) ++due;
    when = fmt::format("{} every {} updates", to_weights ? "a jump" : "for validations alone, at most", keys().every);
    when += due <= last ? fmt::format(" from {} on", due) : ": too few of them for one";
  }
  return fmt::format("{}, updates {} to {}, {}; {} parameters; {}", kExtrapolationNames[static_cast<size_t>(keys().method)],
                     std::max(first, begin_), last, when, chosen_.size(), memory);
}

template <class T>
void Extrapolation<T>::take(Acc<T>* snapshot) {
  kernels::take_snapshot(kernels::TakeSnapshot<T>{.pieces = pieces_, .num_pieces = num_pieces_, .snapshot = snapshot},
                         device_.template exec<T>());
}

template <class T>
void Extrapolation<T>::remember(const ExtrapolationStep& step) {
  if (!keys().averages()) {
    take(slot(step.taken - 1));
  } else if (step.taken == 1) {
    take(snapshots_[kAverage]);
  } else {
    const double share = keys().method == ExtrapolationKind::ema ? 1.0 / keys().ema_updates : 1.0 / static_cast<double>(step.taken);
    kernels::average_weights(
        kernels::AverageWeights<T>{
            .pieces = pieces_, .num_pieces = num_pieces_, .average = snapshots_[kAverage], .share = static_cast<Acc<T>>(share)},
        device_.template exec<T>());
  }
}

template <class T>
typename Extrapolation<T>::Sources Extrapolation<T>::sources_of(const ExtrapolationStep& step) {
  if (keys().averages()) {
    take(snapshots_[kCurrent]);
    return snapshots_;
  }
  Sources sources;
  for (int i = keys().history; i > 0; --i) sources.push_back(slot(step.taken - i));
  return sources;
}

template <class T>
void Extrapolation<T>::spread() {
  spread_values(parameters_, communicator_, [&](const ParameterUnit& unit) {
    return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                       [&](int p) { return std::binary_search(chosen_.begin(), chosen_.end(), p); });
  });
}

template <class T>
void Extrapolation<T>::jump(const Sources& sources, Acc<T>* result, kernels::JumpReport* report) {
  const auto& exec = device_.template exec<T>();
  const int k = static_cast<int>(sources.size());
  kernels::SnapshotSums<T> sums{
      .pieces = pieces_, .num_pieces = num_pieces_, .snapshots = {}, .k = k, .scratch = sums_scratch_, .sums = sums_};
  kernels::JumpWeights<T> weights{
      .pieces = pieces_, .num_pieces = num_pieces_, .snapshots = {}, .k = k, .report = report_, .result = result};
  std::copy(sources.begin(), sources.end(), sums.snapshots);
  std::copy(sources.begin(), sources.end(), weights.snapshots);
  kernels::snapshot_sums(sums, exec);
  if (communicator_ != nullptr) {
    communicator_->fork();
    communicator_->all_reduce(sums_, k * (k - 1) / 2 + 1, CommType::f64, ReduceOp::sum);
    communicator_->join();
  }
  kernels::JumpPlan plan{.method = kernel_method(keys().method),
                         .k = k,
                         .regularization = keys().regularization,
                         .damping = keys().averages() ? 1 : keys().damping,
                         .max_jump = keys().averages() ? 0 : keys().max_jump,
                         .horizon = keys().horizon / keys().snapshot_every,  // in differences
                         .mixing = keys().mixing,
                         .sums = sums_,
                         .verdict = verdict_,
                         .report = report_};
  plan.fixed[0] = keys().blend;  // ema, average: from the weights back towards E, which the one difference comes from
  kernels::plan_jump(plan, exec);
  kernels::jump_weights(weights, exec);
  spread();
  device_.copy_out(report, report_, sizeof(kernels::JumpReport));
}

template <class T>
void Extrapolation<T>::before_update(int completed) {
  if (completed != begin_) return;
  const ExtrapolationStep step = extrapolation_step(config_, completed, begin_);
  if (step.snapshot) remember(step);
}

template <class T>
bool Extrapolation<T>::after_update(int completed, kernels::JumpReport* report) {
  const ExtrapolationStep step = extrapolation_step(config_, completed, begin_);
  if (step.snapshot) remember(step);
  if (!step.jump) return false;
  // History goes on from the snapshot that extrapolation_step counts as its first.
  jump(sources_of(step), keys().averages() ? nullptr : slot(0), report);
  return true;
}

template <class T>
bool Extrapolation<T>::begin_readout(int completed, kernels::JumpReport* report) {
  require(kept_ == nullptr, "internal: a read-out within a read-out");
  const ExtrapolationStep step = extrapolation_step(config_, completed, begin_);
  if (!step.readout) return false;
  const Sources sources = sources_of(step);
  HostBuffer<kernels::JumpReport> arriving(device_, 1);
  jump(sources, nullptr, arriving.data());
  device_.synchronize();
  *report = arriving[0];
  kept_ = sources.back();
  return true;
}

template <class T>
void Extrapolation<T>::end_readout() {
  require(kept_ != nullptr, "internal: no read-out to end");
  kernels::JumpWeights<T> back{
      .pieces = pieces_, .num_pieces = num_pieces_, .snapshots = {kept_}, .k = 1, .report = nullptr, .result = nullptr};
  kernels::jump_weights(back, device_.template exec<T>());
  spread();
  kept_ = nullptr;
}

template <class T>
std::vector<StateTensor> Extrapolation<T>::state() {
  std::vector<StateTensor> tensors;
  const size_t kept = keys().averages() ? 1 : snapshots_.size();  // the copy of the weights is made where it is needed
  for (size_t s = 0; s < kept; ++s) {
    const std::string kind = keys().averages() ? "average/" : fmt::format("snapshot.{}/", s);
    for (size_t i = 0; i < chosen_.size(); ++i) {
      const int p = chosen_[i];
      const ParameterRange own = parameters_.own(p);
      const StateTensor::Held held = parameters_.replicated(p) ? StateTensor::Held::whole : StateTensor::Held::part;
      tensors.push_back({"extrapolation." + kind + parameters_.spec(p).name, DTypeOf<Acc<T>>::value, snapshots_[s] + offsets_[i],
                         own.count, held, own.begin, parameters_.spec(p).count()});
    }
  }
  return tensors;
}

template class Extrapolation<float>;
template class Extrapolation<double>;
#if SPEEDRUN_HAS_CUDA
template class Extrapolation<bf16>;
#endif

}  // namespace speedrun
