#include "src/train/trainer.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "fmt/format.h"
#include "src/config/config_io.h"
#include "src/core/device.h"
#include "src/data/prefix_table.h"
#include "src/data/sufficiency.h"
#include "src/dist/communicator.h"
#include "src/dist/control.h"
#include "src/dist/fault.h"
#include "src/dist/message.h"
#include "src/model/model_flops.h"
#include "src/optim/schedule.h"
#include "src/train/checkpoint.h"
#include "src/train/clock.h"
#include "src/train/data_setup.h"
#include "src/train/device_choice.h"
#include "src/train/engine.h"
#include "src/train/evaluate.h"
#include "src/train/run_folder.h"
#include "src/train/run_record.h"
#include "src/train/run_report.h"
#include "src/train/start.h"
#include "src/train/stop_signal.h"
#include "src/train/timeline.h"
#include "src/train/weights_file.h"

namespace speedrun {
namespace {

class Trainer {
 public:
  Trainer(const TrainOptions& options, Control& control, Log& log)
      : options_(options), config_(options.config), control_(control), log_(log) {
    record_.ranks = control.size();
  }

  int run();

 private:
  void open_data();
  void build_engine();
  void start();
  void set_prefix_table();
  void loop();  // to the last step, the target, a signal or a failure
  void submit(int step);
  void take(const StepResult& result);
  void drain();
  void validate(int completed);
  void save(int completed);
  void enter(Phase phase);
  void announce();
  void plan_timeline();
  void write_gradients();
  int finish();

  bool is_root() const { return options_.world.rank == 0; }
  bool has_several_ranks() const { return control_.size() > 1; }
  void fault(FaultPlace place, int64_t count) const { fault_point(place, count, options_.world.rank); }
  bool stop_wanted(int step);  // after this step

  const TrainOptions& options_;
  Config config_;
  Control& control_;
  Log& log_;
  PhaseClock clock_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Communicator> communicator_;
  std::optional<Timeline> timeline_;
  std::unique_ptr<Reader> reader_;
  std::optional<ValidationReader> validation_;
  ShardList train_shards_, val_shards_;
  std::unique_ptr<Engine> engine_;
  std::optional<RunFolder> folder_;
  std::optional<StartPoint> start_;
  std::optional<RunReport> report_;
  RunRecord record_;
  StepRows rows_;
  int first_step_ = 0, completed_ = 0, steps_ = 0, end_ = 0;  // end_: of this run, steps_: of the schedule
  int last_step_ = -1;                                        // several ranks: the step after which all stop; -1: nobody wants to
  std::filesystem::path newest_checkpoint_;                   // that the run could go on from; empty: none
  int64_t checkpoints_ = 0;
  std::vector<StageValues> stages_;
  std::vector<double> flops_per_token_;  // by stage
  double carried_s_ = 0;                 // of all phases, of the run before the checkpoint that this process goes on from
  double joules_mark_ = -1;              // energy counter when the training clock started; -1: not running or not measured
  std::string failure_;                  // a non-finite step
};

// Every switch waits for the device and reads the energy counter, so that time and joules are charged to the phase that spent them.
void Trainer::enter(Phase phase) {
  device_->synchronize();
  const std::optional<double> joules = device_->energy_joules();
  if (joules && joules_mark_ >= 0) record_.joules += *joules - joules_mark_;
  clock_.enter(phase);
  joules_mark_ = joules && phase == Phase::training ? *joules : -1;
}

void Trainer::open_data() {
  ReaderOptions reader_options = train_reader_options(config_);
  train_shards_ = reader_options.shards;
  log_.line(fmt::format("train data: {} shards, {} tokens, hash {:016x}", train_shards_.shards.size(), train_shards_.total_tokens,
                        train_shards_.hash));
  for (const ShardInfo& shard : train_shards_.shards) log_.line(fmt::format("  {}  {} tokens", shard.path, shard.num_tokens));
  const Sufficiency sufficiency = check_sufficient(
      config_.data.reader == ReaderKind::rows ? ReaderRule::rows : ReaderRule::documents, reader_options, step_runs(config_, end_));
  if (!sufficiency.sufficient) throw InputError(sufficiency.message);
  log_.line(sufficiency.message);
  validation_ = make_validation_reader(config_);
  val_shards_ = list_shards(config_.data.val);
  log_.line(
      fmt::format("validation data: {} shards, the first {} tokens are used", validation_->files().size(), config_.eval.tokens));
  reader_ = make_train_reader(config_, std::move(reader_options));
}

void Trainer::build_engine() {
  device_ = choose_device(config_, log_, options_.world);
  if (has_several_ranks()) {
    communicator_ = make_communicator(control_, *device_, config_.dist.ranks_per_gpu > 1);
    log_.line(fmt::format("ranks: {}", communicator_->describe()));
    if (config_.dist.ranks_per_gpu > 1)
      log_.warn(
          fmt::format("{} ranks share a GPU (dist.ranks_per_gpu): a test, whose times mean nothing", config_.dist.ranks_per_gpu));
    if (const std::string active = active_fault(); !active.empty()) log_.warn("a failure is ordered: SPEEDRUN_FAULT=" + active);
  }
  // No rank is to record its wait for the others to begin.
  if (!options_.timeline.file.empty())
    timeline_.emplace(options_.timeline, *device_, stages_, end_, [this] { control_.barrier(); });
  engine_ = make_engine(config_, *device_,
                        {.micro_batch_tokens = config_.train.micro_batch_tokens,
                         .evaluation_row_tokens = eval_row_tokens(config_),
                         .training = true,
                         .control = has_several_ranks() ? &control_ : nullptr,
                         .communicator = communicator_.get()});
  log_.line(fmt::format("model: {:.1f} M parameters", static_cast<double>(engine_->parameter_count()) * 1e-6));
  for (size_t i = 0; i < stages_.size(); ++i) {
    const StageValues& stage = stages_[i];
    const int64_t micro_batch = engine_->micro_batch_tokens(static_cast<int>(i));
    log_.line(fmt::format("steps {} to {}: {} tokens a step in {} micro-batches of {} tokens{}", stage.begin, stage.end,
                          stage.batch_tokens, stage.batch_tokens / micro_batch / record_.ranks, micro_batch,
                          has_several_ranks() ? fmt::format(" on each of {} ranks", record_.ranks) : std::string()));
  }
  log_.line("memory plan:\n" + engine_->memory_plan().table());
  record_.parameters = engine_->parameter_count();
  report_.emplace(config_, log_, device_->peak_bf16_flops() * record_.ranks, first_step_);
}

void Trainer::start() {
  enter(Phase::warmup);
  engine_->warm_up();
  enter(Phase::startup);
  if (start_) {
    go_on_from(*start_, config_, options_.world.rank, *engine_, *reader_, clock_, record_, log_);
    for (const double seconds : start_->meta.clock_s) carried_s_ += seconds;
    newest_checkpoint_ = start_->checkpoint;
  } else {
    set_initial_weights(config_, *engine_);
  }
}

void Trainer::plan_timeline() {
  timeline_->warmed_up(first_step_, [&](int step) { return eval_due(config_, step + 1) || checkpoint_due(config_, step + 1); });
}

void Trainer::submit(int step) {
  reader_->next(step_shape(config_, step), options_.world.rank, options_.world.size, rows_);
  const auto stage = static_cast<size_t>(schedule_at(config_, step).stage);
  // From the stage's first batch.
  if (flops_per_token_[stage] == 0) {
    flops_per_token_[stage] = flops_per_token(
        config_.model,
        attended_keys(config_.model, rows_.doc_start, rows_.row_tokens, stages_[stage].window_short, stages_[stage].window_long));
  }
  engine_->submit_step(step, rows_);
}

void Trainer::take(const StepResult& result) {
  if (!result.finite) {
    failure_ =
        fmt::format("step {}: {} is not finite; the weights were left as they were before it", result.step, result.bad_tensor);
    report_->bad_step(result);
    return;
  }
  completed_ = result.step + 1;
  control_.progress();
  record_.train_loss = result.loss;
  if (record_.first_step_s == 0) record_.first_step_s = clock_.total() - carried_s_;
  report_->step(result, flops_per_token_[static_cast<size_t>(schedule_at(config_, result.step).stage)], clock_);
  if (result.jump) report_->jump(completed_, *result.jump, false);
}

void Trainer::drain() {
  while (failure_.empty()) {
    const std::optional<StepResult> result = engine_->wait_result();
    if (!result) return;
    take(*result);
  }
}

void Trainer::validate(int completed) {
  enter(Phase::validation);
  Validation validation{.completed = completed, .loss = evaluate(*engine_, *validation_, completed, &control_), .raw = {}};
  kernels::JumpReport jump;
  if (std::isfinite(validation.loss) && engine_->begin_readout(completed, &jump)) {
    validation.raw = validation.loss;
    validation.loss = evaluate(*engine_, *validation_, completed, &control_);
    engine_->end_readout();
    report_->jump(completed, jump, true);
  }
  validation.clock_s = clock_.seconds(Phase::training);
  record_.val_loss = validation.loss;
  record_.val_loss_raw = validation.raw;
  if (validation.loss <= config_.train.target_loss && !record_.reached)
    record_.reached = TargetReached{completed, validation.clock_s, validation.loss};
  report_->validation(validation);
  // Finite gradients can still make a weight infinite (a huge learning rate): such weights are not to become a checkpoint. Of
  // initial weights the first step says more: which tensor it is.
  if (!std::isfinite(validation.loss) && (completed > 0 || steps_ == 0))
    failure_ = fmt::format("the validation loss after {} steps is not finite", completed);
}

void Trainer::save(int completed) {
  enter(Phase::checkpoint);
  CheckpointMeta meta;
  meta.step = completed;
  meta.reader = reader_->state();
  meta.last_val_loss = record_.val_loss.value_or(0);
  meta.has_val_loss = record_.val_loss.has_value();
  meta.last_val_loss_raw = record_.val_loss_raw;
  for (int p = 0; p < kNumPhases; ++p) meta.clock_s[p] = clock_.seconds(static_cast<Phase>(p));
  if (record_.reached) {
    meta.reached_step = record_.reached->step;
    meta.reached_clock_s = record_.reached->clock_s;
    meta.reached_loss = record_.reached->loss;
  }
  meta.joules = control_.sum(record_.joules);
  meta.config = dump_config(config_);
  meta.shards_hash = fmt::format("{:016x}", train_shards_.hash);
  meta.from_checkpoint = record_.from_checkpoint;
  meta.from_step = record_.from_step;
  const std::vector<StateEntry> state = engine_->state();
  if (!is_root()) {
    for (const StateEntry& entry : state) entry.read();  // rank 0 collects and writes
  } else {
    try {
      write_checkpoint(checkpoint_path(folder_->path(), completed), meta, state);
    } catch (const Error& error) {
      if (error.code() != ExitCode::non_finite || has_several_ranks()) throw;
      failure_ = error.what();
      return;
    }
  }
  fault(FaultPlace::checkpoint, checkpoints_++);
  control_.barrier();
  // A rank without the folder names the file; its lines are not shown anyway.
  newest_checkpoint_ = checkpoint_path(folder_ ? folder_->path() : std::filesystem::path(), completed);
  if (!is_root()) return;
  prune_checkpoints(folder_->path(), config_.checkpoint.keep);
  log_.line(fmt::format("checkpoint {}", newest_checkpoint_.string()));
}

// Where the loss has a prefix term.
void Trainer::set_prefix_table() {
  if (!engine_->wants_prefix_table()) return;
  const Gpt2Tokenizer tokenizer(config_.data.vocabulary, config_.model.vocab_size);
  engine_->set_prefix_table(prefix_table(tokenizer, config_.model.padded_vocab_size()));
}

// A signal stops one rank after the step at hand, several after one that none of them is past.
bool Trainer::stop_wanted(int step) {
  if (!has_several_ranks()) return StopSignal::received() != 0;
  return last_step_ >= 0 && step >= last_step_;
}

void Trainer::loop() {
  if (!has_several_ranks() && StopSignal::received() != 0) return;
  if (first_step_ == 0 && eval_due(config_, 0)) validate(0);
  enter(Phase::training);
  set_prefix_table();  // the clock runs: it is part of the training
  report_->training_begins(clock_.seconds(Phase::training));
  for (int step = first_step_; step < end_; ++step) {
    fault(FaultPlace::step, step);
    if (has_several_ranks()) {
      if (const int signal = StopSignal::received(); signal != 0) control_.request_stop(signal);
      last_step_ = control_.stop_after(step, static_cast<int>(kResultSlots));
    }
    if (timeline_) timeline_->before_step(step);
    submit(step);
    if (timeline_) timeline_->after_step(step);
    while (failure_.empty()) {
      const std::optional<StepResult> result = engine_->poll_result();
      if (!result) break;
      take(*result);
    }
    if (!failure_.empty()) return;
    const int completed = step + 1;
    // A validation that is due is made even before a stop: a resumed run would not come by it again.
    const bool stop = stop_wanted(step);
    const bool evaluate_now = eval_due(config_, completed), save_now = checkpoint_due(config_, completed) || stop;
    if (!evaluate_now && !save_now) continue;
    drain();
    if (timeline_) timeline_->interrupt();
    if (evaluate_now && failure_.empty()) {
      validate(completed);
      report_->fp8(engine_->take_fp8_losses());
    }
    const bool at_target = record_.reached && config_.train.stop_at_target;
    if ((save_now || (at_target && config_.checkpoint.at_end)) && failure_.empty()) save(completed);
    if (stop || at_target || !failure_.empty()) return;
    enter(Phase::training);
  }
  drain();
}

int Trainer::finish() {
  enter(Phase::startup);
  const int signal = has_several_ranks() ? control_.stop_signal() : StopSignal::received();
  // After a failure the ranks may be at different places: no more calls that all have to make.
  if (failure_.empty()) record_.joules = control_.sum(record_.joules);
  record_.steps = completed_;
  record_.tokens = report_->tokens();
  record_.flops = report_->flops();
  if (!failure_.empty()) {
    record_.outcome = "non-finite: " + failure_;
  } else if (signal != 0 && completed_ < end_) {
    record_.outcome = signal == 2 ? "SIGINT" : "SIGTERM";
  } else {
    record_.outcome = completed_ < end_ ? "stopped at target" : completed_ < steps_ ? "stopped at step" : "finished";
  }
  if (is_root()) folder_->write_result(result_json(config_, record_, clock_, *device_, train_shards_, val_shards_));
  report_->end(record_, clock_);
  if (const TableSums sums = engine_->table_sums(); sums.sparse + sums.dense > 0)
    log_.line(
        fmt::format("bigram table: {} sums over the ranks of its touched rows alone, {} of the whole", sums.sparse, sums.dense));
  if (!failure_.empty()) {
    const std::string newest =
        newest_checkpoint_.empty() ? "there is no checkpoint" : "the newest good checkpoint is " + newest_checkpoint_.string();
    throw Error(fmt::format("{}; {}", failure_, newest), ExitCode::non_finite);
  }
  if (record_.reached) {
    log_.line(fmt::format("target {} reached after {} steps, clock {:.3f} s", config_.train.target_loss, record_.reached->step,
                          record_.reached->clock_s));
  } else {
    log_.line(fmt::format("target {} not reached", config_.train.target_loss));
  }
  if (folder_) log_.line("run " + folder_->path().string());
  return signal != 0 && completed_ < end_ ? 128 + signal : 0;
}

void Trainer::write_gradients() {
  set_prefix_table();
  reader_->next(step_shape(config_, 0), 0, 1, rows_);
  double loss = 0;
  const std::vector<StateEntry> gradients = engine_->gradients(rows_, &loss);
  save_tensors(options_.gradients_file, gradients, {{"loss", fmt::format("{:.9g}", loss)}});
  log_.line(fmt::format("loss {:.6f}; gradients of the first step in {}", loss, options_.gradients_file));
}

void Trainer::announce() {
  const BuildInfo build = build_info();
  log_.line(fmt::format("speedrun {} ({}), CUDA {}, cuBLASLt {}, NCCL {}", build.version, build.commit, build.cuda, build.cublas,
                        build.nccl));
}

int Trainer::run() {
  steps_ = num_steps(config_);
  end_ = end_step(config_);
  stages_ = stages_of(config_);
  flops_per_token_.assign(stages_.size(), 0);
  StopSignal signals;
  if (options_.resume) folder_ = RunFolder::open(*options_.resume);
  announce();
  open_data();
  start_ = find_start(options_, train_shards_, control_, log_);
  if (start_) first_step_ = completed_ = start_->meta.step;
  build_engine();
  if (options_.dry_run) {
    if (start_ && is_root()) verify_checkpoint(start_->checkpoint);
    log_.line("dry run: data and memory suffice");
    return 0;
  }
  const bool keeps_run = options_.gradients_file.empty();
  fault(FaultPlace::init, 0);
  start();
  if (!keeps_run) {
    write_gradients();
    return 0;
  }
  if (is_root()) {
    // Only now that data, memory and weights are there is there a run to leave a folder of.
    if (!folder_) folder_ = RunFolder::create(config_, options_.config_name);
    log_.open((folder_->path() / "log.txt").string(), options_.resume.has_value());
    folder_->trim_metrics(first_step_);
    folder_->write_config(config_);
    report_->open_metrics(folder_->path() / "metrics.jsonl");
  }
  for (const std::string& text : engine_->notes()) log_.line(text);
  if (const std::string text = engine_->extrapolation_note(); !text.empty()) log_.line("weight extrapolation: " + text);
  if (timeline_) plan_timeline();
  loop();
  if (timeline_ && failure_.empty()) {
    const std::vector<Bytes> of_ranks = control_.gather(timeline_->packed());
    if (is_root()) write_timeline(options_.timeline.file, of_ranks, log_);
  }
  return finish();
}

}  // namespace

void check_ranks(const Config& config, int ranks) {
  for (const StageValues& stage : stages_of(config)) {
    const int64_t rows = stage.batch_tokens / stage.row_tokens;
    if (rows % ranks != 0)
      throw InputError(fmt::format("{} ranks cannot share a step of {} rows ({} tokens a step, rows of {}): use a divisor of {}",
                                   ranks, rows, stage.batch_tokens, stage.row_tokens, rows));
  }
}

int train(const TrainOptions& options, Log& log) {
  const Config::Dist& dist = options.config.dist;
  const std::unique_ptr<Control> control =
      make_control(options.world, {.connect_s = dist.connect_s, .heartbeat_s = dist.heartbeat_s, .progress_s = dist.progress_s});
  if (options.world.size == 1) return Trainer(options, *control, log).run();
  Log silent(Log::Terminal::none);
  const auto failed = [&](const std::string& what, ExitCode code) {
    std::fflush(stdout);
    control->fail(what, static_cast<int>(code));
    // The cause has been printed once, by the rank that all report to. Nothing is torn down: the other ranks are gone.
    std::_Exit(static_cast<int>(code));
  };
  // It outlives the exception: to tear it down could mean to wait for a collective that never ends.
  Trainer trainer(options, *control, options.world.rank == 0 ? log : silent);
  try {
    return trainer.run();
  } catch (const Error& error) {
    failed(error.what(), error.code());
  } catch (const std::exception& error) {
    failed(error.what(), ExitCode::failure);
  }
  return static_cast<int>(ExitCode::failure);
}

}  // namespace speedrun
