#pragma once
// Weight extrapolation in a run (config keys extrapolation.*): which updates are remembered, when a jump is due, and the averages
// of the weights beside it. The mathematics stand in kernels/extrapolation/extrapolation.h. n counts completed updates; with first
// … last from extrapolation_span (src/optim/schedule.h), nothing happens at other n:
//   rre … linear   snapshots where n is a multiple of snapshot_every; the newest `history` are kept. A jump is due at a multiple of
//                  `every` when so many are there. apply weights: the weights jump, and history begins anew with where they are
//                  then (a refused jump empties it, too). apply readout: the weights jump for every validation that a jump would be
//                  due at, and come back; history goes on.
//   ema            E = weights at n = first, from then on E += (weights − E) / ema_updates after every update
//   average        E = mean of the weights at the multiples of snapshot_every
//                  apply weights: after update `last` the weights become (1 − blend) · weights + blend · E. apply readout: for
//                  every validation after more than `first` updates, and they come back.
// Where the weights come from, n = 0 or the update that a run branched off after, counts like an update: those weights are
// remembered, too.
//
// State is sharded like the parameters: each rank remembers what it updates, sums of a jump are those of all ranks, weights are
// gathered after it.
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/extrapolation/extrapolation.h"
#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"
#include "src/core/state_tensor.h"
#include "src/dist/communicator.h"

namespace speedrun {

// What happens after update n: a pure function of the config and of the update that history goes back to (a branched run begins
// without one).
struct ExtrapolationStep {
  bool snapshot = false;  // methods with a history: the weights are remembered; ema, average: E takes them in
  bool jump = false;      // the weights change (apply weights)
  bool readout = false;   // a validation here sees other weights (apply readout)
  int64_t taken = 0;      // snapshots since history began anew, the one of n included, before a jump
};
ExtrapolationStep extrapolation_step(const Config& config, int completed, int begin);

template <class T>
class Extrapolation {
 public:
  // For a config whose extrapolation.method is not none. communicator: null with one rank.
  Extrapolation(const Config& config, Device& device, Parameters<T>& parameters, Communicator* communicator);

  // Snapshots, averages, sums; with extrapolation.host_memory the snapshots are outside the plan, in pinned host memory that the
  // kernels read over the bus.
  void plan(MemoryPlan& memory);
  void prepare(const kernels::StepVerdict* verdict);              // after allocation; synchronous
  void warm_up();                                                 // runs every kernel once; weights must be zero, and state is
  std::string describe() const;                                   // for the log: method, parameters, snapshots and their bytes
  const std::vector<int>& parameters() const { return chosen_; }  // those that take part

  // Before and after every update, asynchronous. after_update: true if a jump was made (or refused): its report is on its way to
  // `report`, host memory of the caller's that asynchronous copies may use.
  void before_update(int completed);
  bool after_update(int completed, kernels::JumpReport* report);
  const kernels::JumpReport* last_report() const { return report_; }  // of the last jump, on the device

  // apply readout: the weights as this validation is to see them, and back to the same bits. begin: false if there is nothing to
  // see after `completed` updates (see extrapolation_step); weights are then untouched. Synchronous.
  bool begin_readout(int completed, kernels::JumpReport* report);
  void end_readout();

  // History for checkpoints ("extrapolation.snapshot.0/…", "extrapolation.average/…") and the update that it goes back to. After
  // loading state of the same settings: restore(begin); a run that branches off with other settings begins anew after `completed`:
  // restore(completed).
  std::vector<StateTensor> state();
  int begin() const { return begin_; }
  void restore(int begin) { begin_ = begin; }

 private:
  // Snapshots oldest first, the newest one of the weights as they are.
  using Sources = std::vector<Acc<T>*>;

  const Config::Extrapolation& keys() const { return config_.extrapolation; }
  Acc<T>* slot(int64_t taken) const { return snapshots_[static_cast<size_t>(taken % keys().history)]; }
  Sources sources_of(const ExtrapolationStep& step);
  void remember(const ExtrapolationStep& step);
  void take(Acc<T>* snapshot);
  void jump(const Sources& sources, Acc<T>* result, kernels::JumpReport* report);
  void spread();

  Config config_;
  Device& device_;
  Parameters<T>& parameters_;
  Communicator* communicator_;
  std::vector<int> chosen_;
  std::vector<int64_t> offsets_;  // of each chosen parameter's own range in a snapshot
  int64_t snapshot_count_ = 0;    // elements of a snapshot, with what aligns them
  std::vector<kernels::SnapshotPiece<T>> host_pieces_;
  int64_t num_pieces_ = 0;
  int begin_ = 0;

  // (history); ema, average: E and the weights before a jump
  std::vector<Acc<T>*> snapshots_;
  std::vector<HostBuffer<Acc<T>>> in_host_memory_;
  kernels::SnapshotPiece<T>* pieces_ = nullptr;
  double *sums_ = nullptr, *sums_scratch_ = nullptr;
  kernels::JumpReport* report_ = nullptr;
  const kernels::StepVerdict* verdict_ = nullptr;
  Acc<T>* kept_ = nullptr;  // in a read-out: the snapshot of the training weights
};

}  // namespace speedrun
