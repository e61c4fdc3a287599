#include "src/train/engine.h"

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstring>
#include <map>
#include <set>

#include "fmt/format.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/grad_stats/grad_stats.h"
#include "src/core/file.h"
#include "src/core/parameter.h"
#include "src/dist/message.h"
#include "src/model/model.h"
#include "src/model/parameter_table.h"
#include "src/optim/extrapolation.h"
#include "src/optim/optimizer.h"
#include "src/optim/sharding.h"
#include "src/train/batch_staging.h"
#include "src/train/collected_state.h"
#include "src/train/engine_shapes.h"
#include "src/train/result_ring.h"
#include "src/train/touched_rows.h"

namespace speedrun {
namespace {

template <class T>
class EngineOf : public Engine {
 public:
  // limit: most tokens of a micro-batch, see micro_batch_of.
  EngineOf(const Config& config, Device& device, const EngineOptions& options, int64_t limit)
      : config_(config),
        device_(device),
        options_(options),
        steps_(num_steps(config)),
        world_(options.control == nullptr ? 1 : options.control->size()),
        rank_(options.control == nullptr ? 0 : options.control->rank()),
        parameters_(make_parameters(config, options.training, rank_, world_)),
        optimizer_(config, device, parameters_, options.communicator),
        collected_(device, options.control),
        results_(device, options.control, options.communicator, [this](int32_t index) { return bad_tensor(index); }) {
    int64_t row = options.evaluation_row_tokens;
    if (options.training) {
      for (const StageValues& stage : stages_of(config)) {
        micro_batches_.push_back({.tokens = micro_batch_of(stage.batch_tokens / world_, stage.row_tokens, limit),
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
    if (options.training) allow_sparse_table();
    parameters_.plan(plan_);
    model_->plan(plan_);
    if (options.training) optimizer_.plan(plan_);
    if (options.training && config.extrapolation.method != ExtrapolationKind::none)
      extrapolation_.emplace(config, device, parameters_, options.communicator);
    if (extrapolation_) extrapolation_->plan(plan_);
    plan_.add("step inputs", &inputs_, 1);
    plan_.add("step inputs", &verdict_, 1);
    plan_.add("step inputs", &evaluation_, 1);
  }

  void allocate() {
    plan_.check(device_, "lower train.micro_batch_tokens, eval.row_tokens or train.logits_chunk_tokens");
    arena_.emplace(device_, plan_);
    model_->prepare();
    if (options_.training) optimizer_.prepare(inputs_, verdict_);
    if (extrapolation_) extrapolation_->prepare(verdict_);
    if (touched_) touched_->allocate();
    staging_.emplace(device_, *model_, max_tokens_);
    results_.allocate();
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
    if (extrapolation_) extrapolation_->before_update(step);
    const StepValues values = schedule_at(config_, step);
    GradientSums sums{.begun = begins_sums_in_backward(values)};
    if (touched_) sums.rows_per_owner = touched_->submit(rows, values.stage, updates_bigram(values), optimizer_.touched_rows());
    submit_micro_batches(step, values, rows, sums);
    end_graph_->launch();
    optimizer_graphs_.at({Optimizer<T>::update_mask(values), sums})->launch();
    if (values.split) split_graph_->launch();
    const bool jumped = extrapolate(step + 1);
    results_.submit(step, world_ * rows.num_rows * rows.row_tokens, verdict_, jumped);
  }

  std::optional<StepResult> poll_result() override { return results_.poll(); }
  std::optional<StepResult> wait_result() override { return results_.wait(); }

  bool begin_readout(int completed, kernels::JumpReport* report) override {
    return extrapolation_ && extrapolation_->begin_readout(completed, report);
  }
  void end_readout() override { extrapolation_->end_readout(); }
  std::string extrapolation_note() const override { return extrapolation_ ? extrapolation_->describe() : std::string(); }
  void restart_extrapolation(int completed) override {
    if (extrapolation_) extrapolation_->restore(completed);
  }

  void begin_evaluation(int completed) override {
    evaluation_now_ = evaluation_key(completed);
    model_->set_pass(evaluation_pass(evaluation_now_));
    derive_graph_->launch();
  }

  void evaluate_rows(const StepRows& rows) override {
    const int64_t n = evaluation_tokens_, total = rows.num_rows * rows.row_tokens;
    for (int64_t first = 0; first < total; first += n) {
      staging_->stage(rows, first, n).sent->record();
      evaluate_graphs_.at(evaluation_now_)->launch();
      add_losses(evaluation_, std::min(n, total - first));
    }
  }

  double take_evaluation_sum() override {
    HostBuffer<kernels::StepVerdict> host(device_, 1);
    device_.copy_out(host.data(), evaluation_, sizeof(kernels::StepVerdict));
    device_.zero(evaluation_, sizeof(kernels::StepVerdict));
    device_.synchronize();
    return options_.control == nullptr ? host[0].loss_sum : options_.control->sum(host[0].loss_sum);
  }

  std::vector<float> token_losses(const StepRows& rows) override {
    const int64_t n = evaluation_tokens_, total = rows.num_rows * rows.row_tokens;
    std::vector<float> losses;
    std::vector<Acc<T>> part(static_cast<size_t>(n));
    for (int64_t first = 0; first < total; first += n) {
      staging_->stage(rows, first, n).sent->record();
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
    staging_->stage(rows, 0, n).sent->record();
    return model_->logits_at(static_cast<int64_t>(tokens.size()) - 1);
  }

  std::vector<Fp8Losses> take_fp8_losses() override {
    std::vector<Fp8Losses> losses = model_->take_fp8_losses(counted_tokens_, counted_steps_);
    counted_tokens_ = counted_steps_ = 0;
    return losses;
  }

  std::vector<StateEntry> state() override {
    std::vector<StateEntry> entries;
    for (int p = 0; p < parameters_.size(); ++p) entries.push_back(parameter_entry(p));
    if (!options_.training) return entries;
    std::vector<StateTensor> tensors = optimizer_.state();
    for (const StateTensor& tensor : model_->state()) tensors.push_back(tensor);
    if (extrapolation_) {
      for (const StateTensor& tensor : extrapolation_->state()) tensors.push_back(tensor);
      entries.push_back(extrapolation_begin());
    }
    for (const StateTensor& tensor : tensors) {
      const int64_t count = tensor.held == StateTensor::Held::part ? tensor.whole_count : tensor.count;
      entries.push_back({tensor.name,
                         tensor.dtype,
                         {count},
                         [this, tensor](PieceSink& sink) { collected_.read(tensor, sink); },
                         [this, tensor](size_t begin, std::span<const std::byte> piece) {
                           collected_.write(tensor, begin, piece);
                           if (touched_) touched_->forget();
                         }});
    }
    return entries;
  }

  std::vector<StateEntry> gradients(const StepRows& rows, double* loss) override {
    device_.zero(parameters_.grads(), static_cast<size_t>(parameters_.buffer_count()) * sizeof(Acc<T>));
    require(world_ == 1, "internal: gradients of several ranks");
    submit_micro_batches(0, schedule_at(config_, 0), rows, {});
    end_graph_->launch();
    HostBuffer<kernels::StepVerdict> host(device_, 1);
    device_.copy_out(host.data(), verdict_, sizeof(kernels::StepVerdict));
    device_.synchronize();
    *loss = host[0].loss_sum / static_cast<double>(rows.num_rows * rows.row_tokens);
    std::vector<StateEntry> entries;
    for (int p = 0; p < parameters_.size(); ++p) {
      const ParameterSpec& spec = parameters_.spec(p);
      const StateTensor grad{spec.name, kMasterType, parameters_.grad(p), spec.count()};
      entries.push_back(
          {spec.name, kMasterType, spec.shape, [this, grad](PieceSink& sink) { collected_.read(grad, sink); }, nullptr});
    }
    return entries;
  }

  uint64_t weights_hash() override {
    uint64_t hash = 0;
    for (const StateEntry& entry : state()) {
      if (!entry.name.starts_with(kParameterPrefix)) continue;
      HashBytes of_entry(hash);
      EachPiece sink([&](std::span<const std::byte> piece) { of_entry.add(piece.data(), piece.size()); });
      entry.read_to(sink);
      hash = of_entry.value();
    }
    return hash;
  }

  std::vector<std::string> notes() const override {
    std::vector<std::string> notes;
#if SPEEDRUN_HAS_CUDA
    if (device_.is_cuda()) {
      for (const std::string& shape : device_.cuda_exec().gemm->untuned())
        notes.push_back("matrix product not in the tuning table, heuristic's first answer: " + shape);
    }
#endif
    if (touched_) notes.push_back(touched_->note());
    return notes;
  }

  TableSums table_sums() const override {
    if (!touched_) return {};
    return {touched_->sparse_updates(), touched_->dense_updates()};
  }

 private:
  static constexpr DType kMasterType = DTypeOf<Acc<T>>::value;

  static Parameters<T> make_parameters(const Config& config, bool training, int rank, int world) {
    std::vector<ParameterSpec> specs = parameter_table(config.model, config.optim);
    Sharding sharding = make_sharding(specs, config.optim, rank, world);
    return Parameters<T>(std::move(specs), training, std::move(sharding));
  }

  // The master values of a parameter.
  StateEntry parameter_entry(int p) {
    const ParameterSpec& spec = parameters_.spec(p);
    const ParameterRange own = parameters_.own(p);
    const CollectedState::Share share{
        parameters_.replicated(p) ? StateTensor::Held::whole : StateTensor::Held::part, kMasterType, own.count,
        [this, p, own](int64_t first, int64_t n, std::byte* to) {
          parameters_.read_master(device_, collected_.staging(), p, {own.begin + first, n}, reinterpret_cast<Acc<T>*>(to));
        }};
    const auto write = [this, p](size_t begin, std::span<const std::byte> piece) {
      constexpr size_t kElement = sizeof(Acc<T>);
      const ParameterRange range{static_cast<int64_t>(begin / kElement), static_cast<int64_t>(piece.size() / kElement)};
      parameters_.write_master(device_, collected_.staging(), p, range, reinterpret_cast<const Acc<T>*>(piece.data()));
    };
    return {std::string(kParameterPrefix) + spec.name, kMasterType, spec.shape,
            [this, share](PieceSink& sink) { collected_.read(share, sink); }, write};
  }

  // The update that the history of weight extrapolation goes back to, as a state entry.
  StateEntry extrapolation_begin() {
    return small_entry(
        std::string(kExtrapolationPrefix) + "begin", DType::i64, {1},
        [this] {
          if (rank_ != 0) return std::vector<std::byte>();
          std::vector<std::byte> bytes(sizeof(int64_t));
          const int64_t begin = extrapolation_->begin();
          std::memcpy(bytes.data(), &begin, sizeof(begin));
          return bytes;
        },
        [this](const std::vector<std::byte>& bytes) {
          int64_t begin = 0;
          std::memcpy(&begin, bytes.data(), sizeof(begin));
          extrapolation_->restore(static_cast<int>(begin));
        });
  }

  // True if there was a jump or a refused one.
  bool extrapolate(int completed) {
    if (!extrapolation_ || !extrapolation_->after_update(completed, results_.jump_slot())) return false;
    if (config_.extrapolation.reset_momentum)
      optimizer_.reset_momentum(extrapolation_->parameters(), extrapolation_->last_report());
    return true;
  }

  // A fresh verdict carries a gradient scale of 1.
  void set_initial_verdict() {
    const kernels::StepVerdict initial;
    device_.copy_in(verdict_, &initial, sizeof(initial));
    device_.copy_in(evaluation_, &initial, sizeof(initial));
    device_.synchronize();
  }

  // Which graph: stage of the model, whether embedding and head are one, and, where sums over the ranks begin in it, how (else as
  // default).
  struct PassKey {
    int stage = 0;
    bool tied = false;
    GradientSums sums = {};
    auto operator<=>(const PassKey&) const = default;
  };
  struct UpdateKey {
    uint32_t mask;
    GradientSums sums;
    auto operator<=>(const UpdateKey&) const = default;
  };

  // Gradients are complete in the backward pass itself where a step is one micro-batch.
  bool begins_sums_in_backward(const StepValues& values) const {
    const int64_t tokens = micro_batches_[static_cast<size_t>(values.stage)].tokens;
    return world_ > 1 && model_->announces() && tokens * world_ == values.batch_tokens &&
           optimizer_.sums_tables(Optimizer<T>::update_mask(values));
  }

  static PassKey pass_key(const StepValues& values, const GradientSums& sums) {
    return {values.stage, values.tied, sums.begun ? sums : GradientSums{}};
  }

  static bool updates_bigram(const StepValues& values) { return values.group(ParameterGroup::bigram).update; }

  // The touched rows of the bigram table travel alone where they are fewer bytes.
  void allow_sparse_table() {
    const int table = parameters_.index("bigram.table");
    if (!config_.dist.sparse_tables || table < 0 || !optimizer_.cut_by_rows(table)) return;
    const ParameterSpec& spec = parameters_.spec(table);
    const SparseRowsShape shape{.V = spec.shape[0], .C = static_cast<int>(spec.shape[1]), .ranks = world_};
    std::vector<int64_t> capacities;
    for (const StageValues& stage : stages_of(config_)) {
      const int64_t tokens = stage.batch_tokens / world_ * config_.optim.bigram.every;
      capacities.push_back(options_.touched_rows > 0 ? options_.touched_rows : touched_rows_capacity(shape, tokens));
    }
    const int64_t largest = *std::max_element(capacities.begin(), capacities.end());
    if (largest == 0) return;
    touched_.emplace(device_, *options_.control, shape.V, std::move(capacities));
    optimizer_.allow_sparse(table, largest);
  }

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
    staging_->stage({.num_rows = 0, .row_tokens = pass.row_tokens, .inputs = {}, .targets = {}, .doc_start = {}}, 0, pass.tokens)
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
    std::set<UpdateKey> updates;
    std::set<PassKey> keys;
    for (int step = 0; step < std::max(steps_, 1); ++step) {
      const StepValues values = schedule_at(config_, step);
      std::vector<GradientSums> variants = {{.begun = begins_sums_in_backward(values)}};
      if (touched_ && updates_bigram(values) && touched_->capacity(values.stage) > 0)
        variants.push_back({.begun = variants[0].begun, .rows_per_owner = touched_->capacity(values.stage)});
      for (const GradientSums& sums : variants) {
        updates.insert({Optimizer<T>::update_mask(values), sums});
        keys.insert(pass_key(values, sums));
      }
      if (values.split && !split_graph_) split_graph_ = captured([this] { optimizer_.split_embedding(); });
    }
    for (const PassKey& key : keys) {
      ModelPass pass = micro_batches_[static_cast<size_t>(key.stage)];
      pass.tied = key.tied;
      stage_padding(pass);
      model_->set_pass(pass);
      micro_batch_graphs_[key] = captured([this, pass, sums = key.sums] {
        if (sums.begun) model_->set_listener([this, sums](const Acc<T>* grad) { optimizer_.begin_sum(grad, sums); });
        model_->forward_backward(&inputs_->grad_scale, &inputs_->loss_weights);
        add_losses(verdict_, pass.tokens);
        model_->set_listener(nullptr);
        if (sums.begun) options_.communicator->join();
      });
    }
    end_graph_ = captured([this] {
      share_maxima();
      model_->end_step(verdict_);
    });
    for (const UpdateKey& key : updates) optimizer_graphs_[key] = captured([this, key] { optimizer_.update(key.mask, key.sums); });
    if (extrapolation_) extrapolation_->warm_up();
    optimizer_.reset_state();
    model_->reset_state();
  }

  void share_maxima() {
    const auto [words, count] = model_->maxima();
    if (world_ == 1 || count == 0) return;
    options_.communicator->fork();
    options_.communicator->all_reduce(words, count, CommType::u32, ReduceOp::max);
    options_.communicator->join();
  }

  void add_losses(kernels::StepVerdict* verdict, int64_t count) {
    kernels::loss_sum(kernels::LossSum<T>{.verdict = verdict, .loss = model_->losses(), .N = count}, device_.template exec<T>());
  }

  // Forward and backward over this rank's rows of a step: what end_step completes.
  void submit_micro_batches(int step, const StepValues& values, const StepRows& rows, const GradientSums& sums) {
    ModelPass pass = micro_batches_[static_cast<size_t>(values.stage)];
    pass.tied = values.tied;
    const int64_t n = pass.tokens, total = rows.num_rows * rows.row_tokens;
    require(rows.row_tokens == pass.row_tokens, "internal: rows of ", rows.row_tokens, " tokens in a stage of rows of ",
            pass.row_tokens);
    require(total % n == 0, "internal: a step of ", total, " tokens is not made of micro-batches of ", n);
    model_->set_pass(pass);  // graphs hold it already; the CPU looks
    Graph& graph = *micro_batch_graphs_.at(pass_key(values, sums));
    device_.zero(&verdict_->loss_sum, sizeof(double));
    derive_graph_->launch();
    begin_graphs_.at(step < config_.fp8.down_weight_exact_steps)->launch();
    for (int64_t first = 0; first < total; first += n) {
      typename BatchStaging<T>::Slot& slot = staging_->stage(rows, first, n);
      if (first == 0) {
        slot.inputs[0] = Optimizer<T>::inputs_of(config_, values, step);
        device_.copy_in(inputs_, slot.inputs.data(), sizeof(StepInputs<T>));
      }
      slot.sent->record();
      graph.launch();
    }
    counted_tokens_ += total;
    ++counted_steps_;
  }

  Config config_;
  Device& device_;
  EngineOptions options_;
  int steps_;
  int world_, rank_;
  MemoryPlan plan_;
  Parameters<T> parameters_;
  std::unique_ptr<Model<T>> model_;
  Optimizer<T> optimizer_;
  std::optional<Extrapolation<T>> extrapolation_;
  CollectedState collected_;
  ResultRing results_;
  std::optional<TouchedRows> touched_;    // several ranks: of the bigram table, if its gradient may travel sparsely
  std::vector<ModelPass> micro_batches_;  // by stage
  int64_t max_tokens_ = 0, evaluation_tokens_ = 0;
  PassKey evaluation_now_;
  int64_t counted_tokens_ = 0, counted_steps_ = 0;  // since take_fp8_losses
  StepInputs<T>* inputs_ = nullptr;
  kernels::StepVerdict *verdict_ = nullptr, *evaluation_ = nullptr;
  std::optional<Arena> arena_;
  std::optional<BatchStaging<T>> staging_;
  std::unique_ptr<Graph> derive_graph_, end_graph_, split_graph_;
  std::map<bool, std::unique_ptr<Graph>> begin_graphs_;  // by `exact`
  std::map<PassKey, std::unique_ptr<Graph>> micro_batch_graphs_, evaluate_graphs_;
  std::map<UpdateKey, std::unique_ptr<Graph>> optimizer_graphs_;
};

// Every rank's free memory is a little different; all take rank 0's choice (and this waits until none looks at its memory any
// more).
int64_t agreed(Control& control, int64_t limit) {
  control.barrier();
  const Bytes chosen = control.broadcast(MessageWriter().number(limit).take());
  return MessageReader(chosen).number<int64_t>();
}

template <class T>
std::unique_ptr<Engine> make_engine_of(const Config& config, Device& device, const EngineOptions& options) {
  const auto build = [&](int64_t limit) { return std::make_unique<EngineOf<T>>(config, device, options, limit); };
  const int world = options.control == nullptr ? 1 : options.control->size();
  int64_t limit = options.micro_batch_tokens;
  if (limit == 0 && !device.is_cuda()) limit = 4096;  // a CPU gains nothing beyond its caches
  if (limit == 0) {
    // The largest micro-batch, of all that divide a rank's part of a stage's step, that fits; else whatever is smallest.
    std::set<int64_t, std::greater<>> sizes;
    for (const StageValues& stage : stages_of(config)) {
      const int64_t rows = stage.batch_tokens / stage.row_tokens / world;
      for (int64_t part = 1; part <= rows; ++part)
        if (rows % part == 0) sizes.insert(part * stage.row_tokens);
    }
    const auto budget =
        static_cast<size_t>(0.92 * static_cast<double>(device.memory().free_bytes) / std::max(config.dist.ranks_per_gpu, 1));
    for (const int64_t size : sizes) {
      limit = size;
      if (build(size)->memory_plan().total_bytes() <= budget) break;
    }
    if (world > 1) limit = agreed(*options.control, limit);
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
