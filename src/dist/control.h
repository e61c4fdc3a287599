#pragma once
// The ranks' control plane: small messages over TCP, a heartbeat, and the one rule for failures: whatever happens to one rank,
// within `limit_s` every process is gone and the first cause has been printed once, with its rank. Rank 0 is the hub that all
// others are connected to. A thread of its own in every process sends and watches heartbeats, so that the rule holds while the
// rank's main thread computes or waits for a GPU.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/dist/world.h"

namespace speedrun {

struct ControlOptions {
  double connect_s = 60;    // how long to wait for all ranks at the start
  double heartbeat_s = 10;  // a rank that has been silent for so long counts as dead (killed, stopped, its host gone)
  double progress_s = 0;    // no progress() of a rank for so long is a failure as well; 0: never. One rank alone is not watched
};

class Control {
 public:
  // The good end: says goodbye, so that nobody takes it for a failure, and waits for all others' (at most the larger of connect_s
  // and progress_s). Not after fail(), and not while an exception unwinds the stack: that is a failure too.
  virtual ~Control() = default;
  Control() = default;
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  virtual const World& world() const = 0;
  int rank() const { return world().rank; }
  int size() const { return world().size; }

  // Collective, blocking, for small messages; all ranks make the same calls in the same order. With one rank they cost nothing.
  virtual void barrier() = 0;
  virtual std::vector<std::byte> broadcast(std::vector<std::byte> message) = 0;  // rank 0's, on every rank
  virtual std::vector<std::vector<std::byte>> gather(
      const std::vector<std::byte>& message) = 0;  // by rank on rank 0, empty elsewhere
  double sum(double value);                        // over the ranks, in their order, so that every rank has the same bits
  bool any(bool value);

  // The main thread lives: a step, a validation row, a part of a checkpoint is done. Costs nothing. Every call above counts as
  // well, and while it waits for other ranks no progress is expected.
  virtual void progress() = 0;

  // The main thread begins or ends a wait outside the calls above that other ranks may be the reason for: in a collective of the
  // transport, for a GPU. That it makes no progress is its failure only after twice progress_s: the rank that the others wait for
  // is then the one that is named. See OutsideWait.
  virtual void waits_outside(bool begins) = 0;

  // A stop that all ranks make at the same step. request_stop: this rank wants to stop (a signal arrived); any rank may, the first
  // reason counts; not from a signal handler. stop_after: asked by every rank before it submits `step`, in the order of the steps,
  // where no rank is more than `ahead` steps further than any other: the step after which all stop, the same on every rank; -1
  // while nobody wants to. Every rank is told before it submits that step. Waits for nothing but, once on rank 0, the answer of the
  // others' threads.
  virtual void request_stop(int signal) = 0;
  virtual int stop_after(int step, int ahead) = 0;
  virtual int stop_signal() const = 0;  // of the rank that asked first; 0: none

  // This rank failed: its message becomes the cause, printed as "speedrun: rank N: MESSAGE", unless another rank was first. Returns
  // after all ranks know, within a few seconds; the caller then prints nothing and ends its process with `exit_code` (after
  // heartbeat_s this is done for it). All others end by themselves with it. With one rank it does nothing.
  virtual void fail(const std::string& message, int exit_code) = 0;
};

class OutsideWait {
 public:
  explicit OutsideWait(Control& control) : control_(control) { control_.waits_outside(true); }
  ~OutsideWait() { control_.waits_outside(false); }
  OutsideWait(const OutsideWait&) = delete;
  OutsideWait& operator=(const OutsideWait&) = delete;

 private:
  Control& control_;
};

// Connects all ranks; throws Error naming the ranks that did not come within connect_s, on rank 0 alone where there is one to say
// it. With one rank nothing is opened. Call it before any other thread and any GPU context exists: a socket closed early in the end
// of a crashed process tells the others early. Under this program's launcher, or with SPEEDRUN_JOB set to the same text for all
// ranks of a run, ranks of another run are refused.
std::unique_ptr<Control> make_control(const World& world, const ControlOptions& options);

}  // namespace speedrun
