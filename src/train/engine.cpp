#include "src/train/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "fmt/format.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/grad_stats/grad_stats.h"
#include "src/core/file.h"
#include "src/core/parameter.h"
#include "src/model/gpt.h"
#include "src/model/parameter_table.h"
#include "src/optim/optimizer.h"

namespace speedrun {
namespace {

// Staging buffers in flight: the host prepares this many micro-batches ahead of the device.
constexpr size_t kStagingSlots = 4;
// Steps whose results may be outstanding before the host waits for the oldest.
constexpr size_t kResultSlots = 8;

template <class T>
class EngineOf : public Engine {
 public:
  EngineOf(const Config& config, Device& device, const EngineOptions& options, int64_t micro_batch, int64_t logits_chunk)
      : config_(config),
        device_(device),
        options_(options),
        parameters_(parameter_table(config.model, config.optim), options.training),
        gpt_(config.model,
             {.tokens = micro_batch, .row_tokens = options.row_tokens, .logits_chunk = logits_chunk, .training = options.training},
             device, parameters_),
        optimizer_(config, device, parameters_) {
    parameters_.plan(plan_);
    gpt_.plan(plan_);
    if (options.training) optimizer_.plan(plan_);
    plan_.add("step inputs", &inputs_, 1);
    plan_.add("step inputs", &verdict_, 1);
    plan_.add("step inputs", &evaluation_, 1);
  }

  void allocate() {
    plan_.check(device_, "lower train.micro_batch_tokens or train.logits_chunk_tokens");
    arena_.emplace(device_, plan_);
    gpt_.prepare();
    if (options_.training) optimizer_.prepare(inputs_, verdict_);
    const auto n = static_cast<size_t>(gpt_.shape().tokens);
    for (size_t i = 0; i < kStagingSlots; ++i)
      staging_.push_back({HostBuffer<int32_t>(device_, 3 * n), HostBuffer<StepInputs<T>>(device_, 1), device_.make_event()});
    for (size_t i = 0; i < kResultSlots; ++i)
      results_.push_back({HostBuffer<kernels::StepVerdict>(device_, 1), device_.make_event()});
  }

  const MemoryPlan& memory_plan() const override { return plan_; }
  int64_t micro_batch_tokens() const override { return gpt_.shape().tokens; }
  int64_t parameter_count() const override { return parameters_.total_count(); }

  void warm_up() override {
    // No rows at all: padding throughout, each row a document of its own. Zeroed memory would be one document of the whole
    // micro-batch, and attention takes its square.
    stage({.num_rows = 0, .row_tokens = gpt_.shape().row_tokens, .inputs = {}, .targets = {}, .doc_start = {}}, 0,
          gpt_.shape().tokens)
        .sent->record();
    evaluate_graph_ = device_.capture([this] { gpt_.evaluate(); });
    if (options_.training) {
      micro_batch_graph_ = device_.capture([this] {
        gpt_.forward_backward(&inputs_->grad_scale);
        add_losses(verdict_, gpt_.shape().tokens);
      });
      std::set<uint32_t> masks;
      const int steps = std::max(num_steps(config_), 1);
      for (int step = 0; step < steps; ++step) masks.insert(Optimizer<T>::update_mask(schedule_at(config_, step)));
      for (const uint32_t mask : masks) {
        optimizer_graphs_[mask] = device_.capture([this, mask] { optimizer_.update(mask); });
        optimizer_graphs_[mask]->launch();
      }
      micro_batch_graph_->launch();
      optimizer_.reset_state();
    }
    evaluate_graph_->launch();
    device_.zero(verdict_, sizeof(*verdict_));
    set_initial_verdict();
    device_.synchronize();
  }

  void initialize(uint64_t seed) override { parameters_.initialize(device_, seed); }

  void submit_step(int step, const StepRows& rows) override {
    const StepValues values = schedule_at(config_, step);
    submit_micro_batches(step, values, rows);
    optimizer_graphs_.at(Optimizer<T>::update_mask(values))->launch();
    require(submitted_ - taken_ < kResultSlots, "internal: results of steps were not taken");
    Result& result = results_[submitted_ % kResultSlots];
    device_.copy_out(result.verdict.data(), verdict_, sizeof(kernels::StepVerdict));
    result.arrived->record();
    result.step = step;
    result.tokens = rows.num_rows * rows.row_tokens;
    ++submitted_;
  }

  std::optional<StepResult> poll_result() override {
    if (taken_ == submitted_) return std::nullopt;
    // A full ring means the next step would overwrite a result: then its age is bounded by waiting here.
    if (submitted_ - taken_ < kResultSlots && !results_[taken_ % kResultSlots].arrived->done()) return std::nullopt;
    return wait_result();
  }

  std::optional<StepResult> wait_result() override {
    if (taken_ == submitted_) return std::nullopt;
    Result& result = results_[taken_ % kResultSlots];
    result.arrived->wait();
    ++taken_;
    const kernels::StepVerdict& verdict = result.verdict[0];
    StepResult out{.step = result.step,
                   .loss = verdict.loss_sum / static_cast<double>(result.tokens),
                   .grad_norm = verdict.grad_norm,
                   .finite = verdict.skip == 0,
                   .bad_tensor = {}};
    if (!out.finite)
      out.bad_tensor = verdict.bad_parameter < 0 ? "loss" : "gradient of " + parameters_.spec(verdict.bad_parameter).name;
    return out;
  }

  void evaluate_rows(const StepRows& rows) override {
    const int64_t n = gpt_.shape().tokens, total = rows.num_rows * rows.row_tokens;
    for (int64_t first = 0; first < total; first += n) {
      stage(rows, first, n).sent->record();
      evaluate_graph_->launch();
      add_losses(evaluation_, std::min(n, total - first));
    }
  }

  double take_evaluation_sum() override {
    HostBuffer<kernels::StepVerdict> host(device_, 1);
    device_.copy_out(host.data(), evaluation_, sizeof(kernels::StepVerdict));
    device_.zero(evaluation_, sizeof(kernels::StepVerdict));
    device_.synchronize();
    return host[0].loss_sum;
  }

  std::vector<float> token_losses(const StepRows& rows) override {
    const int64_t n = gpt_.shape().tokens, total = rows.num_rows * rows.row_tokens;
    std::vector<float> losses;
    std::vector<Acc<T>> part(static_cast<size_t>(n));
    for (int64_t first = 0; first < total; first += n) {
      stage(rows, first, n).sent->record();
      evaluate_graph_->launch();
      device_.copy_out(part.data(), gpt_.losses(), part.size() * sizeof(Acc<T>));
      device_.synchronize();
      const auto valid = static_cast<size_t>(std::min(n, total - first));
      for (size_t i = 0; i < valid; ++i) losses.push_back(static_cast<float>(part[i]));
    }
    return losses;
  }

  std::vector<float> next_logits(const std::vector<int32_t>& tokens) override {
    const int64_t row = gpt_.shape().row_tokens, n = gpt_.shape().tokens;
    require(!tokens.empty() && static_cast<int64_t>(tokens.size()) <= row, "internal: ", tokens.size(), " tokens for a row of ",
            row);
    StepRows rows{.num_rows = 1, .row_tokens = row, .inputs = tokens, .targets = {}, .doc_start = {}};
    rows.inputs.resize(static_cast<size_t>(row), 0);
    rows.targets.assign(static_cast<size_t>(row), 0);
    rows.doc_start.assign(static_cast<size_t>(row), 0);
    stage(rows, 0, n).sent->record();
    return gpt_.logits_at(static_cast<int64_t>(tokens.size()) - 1);
  }

  std::vector<StateEntry> state() override {
    std::vector<StateEntry> entries;
    for (int p = 0; p < parameters_.size(); ++p) {
      const ParameterSpec& spec = parameters_.spec(p);
      entries.push_back({std::string(kParameterPrefix) + spec.name, DTypeOf<Acc<T>>::value, spec.shape,
                         [this, p] { return bytes_of(parameters_.read_master(device_, p)); },
                         [this, p](const std::vector<std::byte>& bytes) {
                           std::vector<Acc<T>> master(bytes.size() / sizeof(Acc<T>));
                           std::memcpy(master.data(), bytes.data(), bytes.size());
                           parameters_.write_master(device_, p, master);
                         }});
    }
    if (!options_.training) return entries;
    for (const StateTensor& tensor : optimizer_.state()) {
      const size_t size = static_cast<size_t>(tensor.count) * dtype_size(tensor.dtype);
      entries.push_back({tensor.name,
                         tensor.dtype,
                         {tensor.count},
                         [this, tensor, size] {
                           std::vector<std::byte> bytes(size);
                           device_.copy_out(bytes.data(), tensor.data, size);
                           device_.synchronize();
                           return bytes;
                         },
                         [this, tensor](const std::vector<std::byte>& bytes) {
                           device_.copy_in(tensor.data, bytes.data(), bytes.size());
                           device_.synchronize();
                         }});
    }
    return entries;
  }

  std::vector<StateEntry> gradients(const StepRows& rows, double* loss) override {
    device_.zero(parameters_.grads(), static_cast<size_t>(parameters_.buffer_count()) * sizeof(Acc<T>));
    submit_micro_batches(0, schedule_at(config_, 0), rows);
    HostBuffer<kernels::StepVerdict> host(device_, 1);
    device_.copy_out(host.data(), verdict_, sizeof(kernels::StepVerdict));
    device_.synchronize();
    *loss = host[0].loss_sum / static_cast<double>(rows.num_rows * rows.row_tokens);
    std::vector<StateEntry> entries;
    for (int p = 0; p < parameters_.size(); ++p) {
      const ParameterSpec& spec = parameters_.spec(p);
      entries.push_back({spec.name, DTypeOf<Acc<T>>::value, spec.shape,
                         [this, p] { return bytes_of(parameters_.read_grad(device_, p)); }, nullptr});
    }
    return entries;
  }

  uint64_t weights_hash() override { return parameters_.hash(device_); }

  std::vector<std::string> notes() const override {
    std::vector<std::string> notes;
#if SPEEDRUN_HAS_CUDA
    if (device_.is_cuda()) {
      for (const std::string& shape : device_.cuda_exec().gemm->untuned())
        notes.push_back("matrix product not in the tuning table, heuristic's first answer: " + shape);
    }
#endif
    return notes;
  }

 private:
  struct Staging {
    HostBuffer<int32_t> batch;  // (3, N): inputs, targets, document starts
    HostBuffer<StepInputs<T>> inputs;
    std::unique_ptr<Event> sent;
  };
  struct Result {
    HostBuffer<kernels::StepVerdict> verdict;
    std::unique_ptr<Event> arrived;
    int step = 0;
    int64_t tokens = 0;
  };

  static std::vector<std::byte> bytes_of(const std::vector<Acc<T>>& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(Acc<T>));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  // A fresh verdict carries a gradient scale of 1.
  void set_initial_verdict() {
    const kernels::StepVerdict initial;
    device_.copy_in(verdict_, &initial, sizeof(initial));
    device_.copy_in(evaluation_, &initial, sizeof(initial));
    device_.synchronize();
  }

  void add_losses(kernels::StepVerdict* verdict, int64_t count) {
    kernels::loss_sum(kernels::LossSum<T>{.verdict = verdict, .loss = gpt_.losses(), .N = count}, device_.template exec<T>());
  }

  // Forward and backward over all rows of a step: gradients and the loss sum are complete when the queue has passed.
  void submit_micro_batches(int step, const StepValues& values, const StepRows& rows) {
    const int64_t n = gpt_.shape().tokens, total = rows.num_rows * rows.row_tokens;
    require(total % n == 0, "internal: a step of ", total, " tokens is not made of micro-batches of ", n);
    device_.zero(&verdict_->loss_sum, sizeof(double));
    for (int64_t first = 0; first < total; first += n) {
      Staging& slot = stage(rows, first, n);
      if (first == 0) {
        slot.inputs[0] = Optimizer<T>::inputs_of(config_, values, step);
        device_.copy_in(inputs_, slot.inputs.data(), sizeof(StepInputs<T>));
      }
      slot.sent->record();
      micro_batch_graph_->launch();
    }
  }

  // Sends tokens first … first + n − 1 of the rows to the model's batch buffers. Past the rows' end the last row is padded with
  // copies of token 0, each row a document of its own, so that every value is defined.
  Staging& stage(const StepRows& rows, int64_t first, int64_t n) {
    Staging& slot = staging_[staged_++ % kStagingSlots];
    slot.sent->wait();
    int32_t* inputs = slot.batch.data();
    int32_t* targets = inputs + n;
    int32_t* doc_start = targets + n;
    const int64_t total = rows.num_rows * rows.row_tokens, row = gpt_.shape().row_tokens;
    require(rows.row_tokens == row, "internal: rows of ", rows.row_tokens, " tokens for a model of rows of ", row);
    const int64_t valid = std::min(n, total - first);
    std::copy_n(rows.inputs.begin() + first, valid, inputs);
    std::copy_n(rows.targets.begin() + first, valid, targets);
    std::fill(inputs + valid, inputs + n, 0);
    std::fill(targets + valid, targets + n, 0);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row_start = t / row * row;
      doc_start[t] = static_cast<int32_t>(row_start + (t < valid ? rows.doc_start[static_cast<size_t>(first + t)] : 0));
    }
    const size_t bytes = static_cast<size_t>(n) * sizeof(int32_t);
    device_.copy_in(gpt_.tokens(), inputs, bytes);
    device_.copy_in(gpt_.targets(), targets, bytes);
    device_.copy_in(gpt_.doc_start(), doc_start, bytes);
    return slot;
  }

  Config config_;
  Device& device_;
  EngineOptions options_;
  MemoryPlan plan_;
  Parameters<T> parameters_;
  Gpt<T> gpt_;
  Optimizer<T> optimizer_;
  StepInputs<T>* inputs_ = nullptr;
  kernels::StepVerdict *verdict_ = nullptr, *evaluation_ = nullptr;
  std::optional<Arena> arena_;
  std::vector<Staging> staging_;
  std::vector<Result> results_;
  size_t staged_ = 0, submitted_ = 0, taken_ = 0;
  std::unique_ptr<Graph> micro_batch_graph_, evaluate_graph_;
  std::map<uint32_t, std::unique_ptr<Graph>> optimizer_graphs_;
};

// Tokens whose logits are held at once: enough to fill the GPU (the product's rows), small against the activations.
int64_t choose_logits_chunk(const Config& config, bool cuda, int64_t micro_batch) {
  if (config.train.logits_chunk_tokens > 0) return std::min(config.train.logits_chunk_tokens, micro_batch);
  return std::min<int64_t>(micro_batch, cuda ? 16384 : 1024);
}

template <class T>
std::unique_ptr<Engine> make_engine_of(const Config& config, Device& device, const EngineOptions& options) {
  const bool cuda = device.is_cuda();
  const auto build = [&](int64_t micro_batch) {
    return std::make_unique<EngineOf<T>>(config, device, options, micro_batch, choose_logits_chunk(config, cuda, micro_batch));
  };
  int64_t micro_batch = options.micro_batch_tokens;
  if (micro_batch == 0) {
    // The largest number of whole rows that divides the step and fits; a CPU gains nothing beyond its caches.
    const int64_t rows = config.train.batch_tokens / options.row_tokens;
    const auto budget = static_cast<size_t>(0.92 * static_cast<double>(device.memory().free_bytes));
    for (int64_t part = rows; part >= 1 && micro_batch == 0; --part) {
      if (rows % part != 0 || (!cuda && part > 1 && part * options.row_tokens > 4096)) continue;
      if (part == 1 || build(part * options.row_tokens)->memory_plan().total_bytes() <= budget)
        micro_batch = part * options.row_tokens;
    }
  }
  std::unique_ptr<EngineOf<T>> engine = build(micro_batch);
  engine->allocate();
  return engine;
}

}  // namespace

std::unique_ptr<Engine> make_engine(const Config& config, Device& device, const EngineOptions& options) {
#if SPEEDRUN_HAS_CUDA
  if (device.is_cuda()) return make_engine_of<bf16>(config, device, options);
#endif
  return make_engine_of<float>(config, device, options);
}

}  // namespace speedrun
