#pragma once
// Control of two or more ranks: what the main thread calls. The control thread beside it (control_thread.h) does all that touches
// the network; here are only the queues to and from it.
#include <memory>
#include <thread>

#include "src/dist/control.h"
#include "src/dist/control_state.h"

namespace speedrun {

class NetworkControl final : public Control {
 public:
  NetworkControl(const World& world, const ControlOptions& options);  // throws Error unless all ranks come
  ~NetworkControl() override;

  const World& world() const override { return state_->world; }
  void barrier() override;
  Bytes broadcast(Bytes message) override;
  std::vector<Bytes> gather(const Bytes& message) override;
  void progress() override { state_->last_progress_s = monotonic_s(); }
  void waits_outside(bool begins) override;
  void request_stop(int signal) override;
  int stop_after(int step, int ahead) override;
  int stop_signal() const override { return state_->agreed_signal; }
  void fail(const std::string& message, int exit_code) override;

 private:
  class Waiting;
  enum class Collective : uint32_t { barrier, broadcast, gather };
  void send_to_others(Collective kind, const Bytes& payload);
  Bytes receive(int rank, Collective kind);
  std::shared_ptr<const Bytes> with_trailer(const Bytes& payload, Collective kind) const;
  int decide_stop(int step, int ahead);
  void post(int rank, MessageType type, std::shared_ptr<const Bytes> body);

  const std::shared_ptr<ControlState> state_;  // the thread's too, which outlives this after fail()
  std::thread thread_;
  const int exceptions_at_start_;
  uint64_t sequence_ = 0;  // of the collective under way
  int last_asked_step_ = -1;
  bool stop_requested_ = false;
};

}  // namespace speedrun
