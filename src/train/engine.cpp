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
#include "src/model/model.h"
#include "src/model/parameter_table.h"
#include "src/optim/optimizer.h"

namespace speedrun {
namespace {

// Staging buffers in flight: the host prepares this many micro-batches ahead of the device.
constexpr size_t kStagingSlots = 4;
// Steps whose results may be outstanding before the host waits for the oldest.
constexpr size_t kResultSlots = 8;

// Tokens whose logits are held at once: enough to fill the GPU (the product's rows), small against the activations.
int64_t choose_logits_chunk(const Config& config, bool cuda, int64_t micro_batch) {
  if (config.train.logits_chunk_tokens > 0) return std::min(config.train.logits_chunk_tokens, micro_batch);
  return std::min<int64_t>(micro_batch, cuda ? 16384 : 1024);
}

// The largest part of a step of `batch` tokens that is made of whole rows, divides it and has at most `limit` tokens; at least a
// row.
int64_t micro_batch_of(int64_t batch, int64_t row, int64_t limit) {
  const int64_t rows = batch / row;
  for (int64_t part = rows; part > 1; --part) {
    if (rows % part == 0 && part * row <= limit) return part * row;
  }
  return row;
}

ModelStage model_stage(const StageValues& stage) {
  return {.window_short = stage.window_short,
          .window_long = stage.window_long,
          .attention_scale = stage.attention_scale,
          .rotary_frequencies = stage.rotary_frequencies,
          .loss_terms = stage.loss_terms,
          .prefix_loss = stage.prefix_loss};
}

// Every stage of the schedule, then what the last validation uses.
std::vector<ModelStage> model_stages(const Config& config) {
  std::vector<ModelStage> stages;
  for (const StageValues& stage : stages_of(config)) stages.push_back(model_stage(stage));
  stages.push_back(model_stage(final_evaluation_stage(config)));
  return stages;
}

template <class T>
class EngineOf : public Engine {
 public:
  // limit: most tokens of a micro-batch, see micro_batch_of.
  EngineOf(const Config& config, Device& device, const EngineOptions& options, int64_t limit)
      : config_(config),
        device_(device),
        options_(options),
        steps_(num_steps(config)),
        parameters_(parameter_table(config.model, config.optim), options.training),
        optimizer_(config, device, parameters_) {
    int64_t row = options.evaluation_row_tokens;
    if (options.training) {
      for (const StageValues& stage : stages_of(config)) {
        micro_batches_.push_back({.tokens = micro_batch_of(stage.batch_tokens, stage.row_tokens, limit),
                                  .row_tokens = stage.row_tokens,
                                  .stage = static_cast<int>(micro_batches_.size())});
        max_tokens_ = std::max(max_tokens_, micro_batches_.back().tokens);
        row = std::max(row, stage.row_tokens);
      }
    }
    const int64_t evaluation_row = options.evaluation_row_tokens;
    const int64_t rows = std::max<int64_t>(config.eval.tokens / evaluation_row, 1);
    evaluation_tokens_ = std::clamp<int64_t>(std::max(limit, max_tokens_) / evaluation_row, 1, rows) * evaluation_row;
    max_tokens_ = std::max(max_tokens_, evaluation_tokens_);
    model_ = make_model<T>(config,
                           {.max_tokens = max_tokens_,
                            .max_row_tokens = row,
                            .logits_chunk = choose_logits_chunk(config, device.is_cuda(), max_tokens_),
                            .training = options.training},
                           model_stages(config), device, parameters_);
    parameters_.plan(plan_);
    model_->plan(plan_);
    if (options.training) optimizer_.plan(plan_);
    plan_.add("step inputs", &inputs_, 1);
    plan_.add("step inputs", &verdict_, 1);
    plan_.add("step inputs", &evaluation_, 1);
  }

  void allocate() {
    plan_.check(device_, "lower train.micro_batch_tokens, eval.row_tokens or train.logits_chunk_tokens");
    arena_.emplace(device_, plan_);
    model_->prepare();
    if (options_.training) optimizer_.prepare(inputs_, verdict_);
    const auto n = static_cast<size_t>(max_tokens_);
    for (size_t i = 0; i < kStagingSlots; ++i)
      staging_.push_back({HostBuffer<int32_t>(device_, 3 * n), HostBuffer<StepInputs<T>>(device_, 1), device_.make_event()});
    for (size_t i = 0; i < kResultSlots; ++i)
      results_.push_back({HostBuffer<kernels::StepVerdict>(device_, 1), device_.make_event()});
  }

  const MemoryPlan& memory_plan() const override { return plan_; }
  int64_t micro_batch_tokens(int stage) const override { return micro_batches_.at(static_cast<size_t>(stage)).tokens; }
  int64_t evaluation_tokens() const override { return evaluation_tokens_; }
  int64_t parameter_count() const override { return parameters_.total_count(); }

  void warm_up() override {
    derive_graph_ = captured([this] { model_->derive_weights(); });
    if (options_.training) warm_up_training();
    std::set<PassKey> evaluations;
    for (int completed = 0; completed <= steps_; ++completed) {
      // A saved model may be of any step; a training run evaluates after some.
      if (!options_.training || eval_due(config_, completed)) evaluations.insert(evaluation_key(completed));
    }
    for (const PassKey& key : evaluations) {
      const ModelPass pass = evaluation_pass(key);
      stage_padding(pass);
      model_->set_pass(pass);
      evaluate_graphs_[key] = captured([this] { model_->evaluate(); });
    }
    device_.zero(verdict_, sizeof(*verdict_));
    set_initial_verdict();
    device_.synchronize();
  }

  void initialize(uint64_t seed) override {
    parameters_.initialize(device_, seed);
    // Until they part, the embedding is the head.
    if (!config_.model.tied_until_split) return;
    parameters_.write_master(device_, parameters_.index("wte"), parameters_.read_master(device_, parameters_.index("head.weight")));
  }

  bool wants_prefix_table() const override { return model_->prefix() != nullptr; }

  void set_prefix_table(const std::vector<int32_t>& prefix) override {
    device_.copy_in(model_->prefix(), prefix.data(), prefix.size() * sizeof(int32_t));
    device_.synchronize();
  }

  void submit_step(int step, const StepRows& rows) override {
    const StepValues values = schedule_at(config_, step);
    submit_micro_batches(step, values, rows);
    optimizer_graphs_.at(Optimizer<T>::update_mask(values))->launch();
    if (values.split) split_graph_->launch();
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
    if (!out.finite) out.bad_tensor = bad_tensor(verdict.bad_parameter);
    return out;
  }

  void begin_evaluation(int completed) override {
    evaluation_now_ = evaluation_key(completed);
    model_->set_pass(evaluation_pass(evaluation_now_));
    derive_graph_->launch();
  }

  void evaluate_rows(const StepRows& rows) override {
    const int64_t n = evaluation_tokens_, total = rows.num_rows * rows.row_tokens;
    for (int64_t first = 0; first < total; first += n) {
      stage(rows, first, n).sent->record();
      evaluate_graphs_.at(evaluation_now_)->launch();
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
    const int64_t n = evaluation_tokens_, total = rows.num_rows * rows.row_tokens;
    std::vector<float> losses;
    std::vector<Acc<T>> part(static_cast<size_t>(n));
    for (int64_t first = 0; first < total; first += n) {
      stage(rows, first, n).sent->record();
      evaluate_graphs_.at(evaluation_now_)->launch();
      device_.copy_out(part.data(), model_->losses(), part.size() * sizeof(Acc<T>));
      device_.synchronize();
      const auto valid = static_cast<size_t>(std::min(n, total - first));
      for (size_t i = 0; i < valid; ++i) losses.push_back(static_cast<float>(part[i]));
    }
    return losses;
  }

  std::vector<float> next_logits(const std::vector<int32_t>& tokens) override {
    const int64_t row = options_.evaluation_row_tokens, n = evaluation_tokens_;
    require(!tokens.empty() && static_cast<int64_t>(tokens.size()) <= row, "internal: ", tokens.size(), " tokens for a row of ",
            row);
    StepRows rows{.num_rows = 1, .row_tokens = row, .inputs = tokens, .targets = {}, .doc_start = {}};
    rows.inputs.resize(static_cast<size_t>(row), 0);
    rows.targets.assign(static_cast<size_t>(row), 0);
    rows.doc_start.assign(static_cast<size_t>(row), 0);
    stage(rows, 0, n).sent->record();
    return model_->logits_at(static_cast<int64_t>(tokens.size()) - 1);
  }

  std::vector<Fp8Losses> take_fp8_losses() override {
    std::vector<Fp8Losses> losses = model_->take_fp8_losses(counted_tokens_, counted_steps_);
    counted_tokens_ = counted_steps_ = 0;
    return losses;
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
    std::vector<StateTensor> tensors = optimizer_.state();
    for (const StateTensor& tensor : model_->state()) tensors.push_back(tensor);
    for (const StateTensor& tensor : tensors) {
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

  // Which graph: stage of the model, and whether embedding and head are one.
  struct PassKey {
    int stage = 0;
    bool tied = false;
    bool operator<(const PassKey& other) const { return std::pair(stage, tied) < std::pair(other.stage, other.tied); }
  };

  std::string bad_tensor(int32_t index) const {
    if (index == -1) return "loss";
    if (index < -1) return fmt::format("FP8 maximum {}", -2 - index);
    return "gradient of " + parameters_.spec(index).name;
  }

  // Windows are those that the next step would have; after the last one, those of the last validation.
  PassKey evaluation_key(int completed) const {
    const bool ended = completed >= steps_;
    const StepValues values = schedule_at(config_, std::max(ended ? steps_ - 1 : completed, 0));
    const bool tied = values.tied && !(ended && values.split);
    return {ended ? static_cast<int>(stages_of(config_).size()) : values.stage, tied};
  }

  ModelPass evaluation_pass(const PassKey& key) const {
    return {.tokens = evaluation_tokens_, .row_tokens = options_.evaluation_row_tokens, .stage = key.stage, .tied = key.tied};
  }

  // No rows at all: padding throughout, each row a document of its own. Zeroed memory would be one document of the whole
  // micro-batch, and attention takes its square.
  void stage_padding(const ModelPass& pass) {
    stage({.num_rows = 0, .row_tokens = pass.row_tokens, .inputs = {}, .targets = {}, .doc_start = {}}, 0, pass.tokens)
        .sent->record();
  }

  // The graph of some work, run once; the CPU has nothing to warm up.
  std::unique_ptr<Graph> captured(std::function<void()> work) {
    std::unique_ptr<Graph> graph = device_.capture(std::move(work));
    if (device_.is_cuda()) graph->launch();
    return graph;
  }

  // Graphs of every step of the schedule: forward and backward by stage, the optimizer by what updates.
  void warm_up_training() {
    for (const bool exact : {false, true}) {
      begin_graphs_[exact] = captured([this, exact] { model_->begin_step(exact); });
    }
    std::set<uint32_t> masks;
    std::set<PassKey> keys;
    for (int step = 0; step < std::max(steps_, 1); ++step) {
      const StepValues values = schedule_at(config_, step);
      masks.insert(Optimizer<T>::update_mask(values));
      keys.insert({values.stage, values.tied});
      if (values.split && !split_graph_) split_graph_ = captured([this] { optimizer_.split_embedding(); });
    }
    for (const PassKey& key : keys) {
      ModelPass pass = micro_batches_[static_cast<size_t>(key.stage)];
      pass.tied = key.tied;
      stage_padding(pass);
      model_->set_pass(pass);
      micro_batch_graphs_[key] = captured([this, tokens = pass.tokens] {
        model_->forward_backward(&inputs_->grad_scale, &inputs_->loss_weights);
        add_losses(verdict_, tokens);
      });
    }
    end_graph_ = captured([this] { model_->end_step(verdict_); });
    for (const uint32_t mask : masks) optimizer_graphs_[mask] = captured([this, mask] { optimizer_.update(mask); });
    optimizer_.reset_state();
    model_->reset_state();
  }

  void add_losses(kernels::StepVerdict* verdict, int64_t count) {
    kernels::loss_sum(kernels::LossSum<T>{.verdict = verdict, .loss = model_->losses(), .N = count}, device_.template exec<T>());
  }

  // Forward and backward over all rows of a step: gradients and the loss sum are complete when the queue has passed.
  void submit_micro_batches(int step, const StepValues& values, const StepRows& rows) {
    ModelPass pass = micro_batches_[static_cast<size_t>(values.stage)];
    pass.tied = values.tied;
    const int64_t n = pass.tokens, total = rows.num_rows * rows.row_tokens;
    require(rows.row_tokens == pass.row_tokens, "internal: rows of ", rows.row_tokens, " tokens in a stage of rows of ",
            pass.row_tokens);
    require(total % n == 0, "internal: a step of ", total, " tokens is not made of micro-batches of ", n);
    model_->set_pass(pass);  // graphs hold it already; the CPU looks
    Graph& graph = *micro_batch_graphs_.at({values.stage, values.tied});
    device_.zero(&verdict_->loss_sum, sizeof(double));
    derive_graph_->launch();
    begin_graphs_.at(step < config_.fp8.down_weight_exact_steps)->launch();
    for (int64_t first = 0; first < total; first += n) {
      Staging& slot = stage(rows, first, n);
      if (first == 0) {
        slot.inputs[0] = Optimizer<T>::inputs_of(config_, values, step);
        device_.copy_in(inputs_, slot.inputs.data(), sizeof(StepInputs<T>));
      }
      slot.sent->record();
      graph.launch();
    }
    end_graph_->launch();
    counted_tokens_ += total;
    ++counted_steps_;
  }

  // Sends tokens first … first + n − 1 of the rows to the model's batch buffers. Past the rows' end the last row is padded with
  // copies of token 0, each row a document of its own, so that every value is defined.
  Staging& stage(const StepRows& rows, int64_t first, int64_t n) {
    Staging& slot = staging_[staged_++ % kStagingSlots];
    slot.sent->wait();
    int32_t* inputs = slot.batch.data();
    int32_t* targets = inputs + n;
    int32_t* doc_start = targets + n;
    const int64_t total = rows.num_rows * rows.row_tokens, row = rows.row_tokens;
    const int64_t valid = std::clamp<int64_t>(total - first, 0, n);
    std::copy_n(rows.inputs.begin() + first, valid, inputs);
    std::copy_n(rows.targets.begin() + first, valid, targets);
    std::fill(inputs + valid, inputs + n, 0);
    std::fill(targets + valid, targets + n, 0);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row_start = t / row * row;
      doc_start[t] = static_cast<int32_t>(row_start + (t < valid ? rows.doc_start[static_cast<size_t>(first + t)] : 0));
    }
    const size_t bytes = static_cast<size_t>(n) * sizeof(int32_t);
    device_.copy_in(model_->tokens(), inputs, bytes);
    device_.copy_in(model_->targets(), targets, bytes);
    device_.copy_in(model_->doc_start(), doc_start, bytes);
    return slot;
  }

  Config config_;
  Device& device_;
  EngineOptions options_;
  int steps_;
  MemoryPlan plan_;
  Parameters<T> parameters_;
  std::unique_ptr<Model<T>> model_;
  Optimizer<T> optimizer_;
  std::vector<ModelPass> micro_batches_;  // by stage
  int64_t max_tokens_ = 0, evaluation_tokens_ = 0;
  PassKey evaluation_now_;
  int64_t counted_tokens_ = 0, counted_steps_ = 0;  // since take_fp8_losses
  StepInputs<T>* inputs_ = nullptr;
  kernels::StepVerdict *verdict_ = nullptr, *evaluation_ = nullptr;
  std::optional<Arena> arena_;
  std::vector<Staging> staging_;
  std::vector<Result> results_;
  size_t staged_ = 0, submitted_ = 0, taken_ = 0;
  std::unique_ptr<Graph> derive_graph_, end_graph_, split_graph_;
  std::map<bool, std::unique_ptr<Graph>> begin_graphs_;  // by `exact`
  std::map<PassKey, std::unique_ptr<Graph>> micro_batch_graphs_, evaluate_graphs_;
  std::map<uint32_t, std::unique_ptr<Graph>> optimizer_graphs_;
};

template <class T>
std::unique_ptr<Engine> make_engine_of(const Config& config, Device& device, const EngineOptions& options) {
  const auto build = [&](int64_t limit) { return std::make_unique<EngineOf<T>>(config, device, options, limit); };
  int64_t limit = options.micro_batch_tokens;
  if (limit == 0 && !device.is_cuda()) limit = 4096;  // a CPU gains nothing beyond its caches
  if (limit == 0) {
    // The largest micro-batch, of all that divide a stage's step, that fits; else whatever is smallest.
    std::set<int64_t, std::greater<>> sizes;
    for (const StageValues& stage : stages_of(config)) {
      const int64_t rows = stage.batch_tokens / stage.row_tokens;
      for (int64_t part = 1; part <= rows; ++part)
        if (rows % part == 0) sizes.insert(part * stage.row_tokens);
    }
    const auto budget = static_cast<size_t>(0.92 * static_cast<double>(device.memory().free_bytes));
    for (const int64_t size : sizes) {
      limit = size;
      if (build(size)->memory_plan().total_bytes() <= budget) break;
    }
  }
  std::unique_ptr<EngineOf<T>> engine = build(limit);
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
