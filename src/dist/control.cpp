#include "src/dist/control.h"

#include "src/dist/message.h"
#include "src/dist/network_control.h"

namespace speedrun {
namespace {

// A run of one rank: nobody to agree with, nobody to tell.
class SoloControl final : public Control {
 public:
  explicit SoloControl(const World& world) : world_(world) {}
  const World& world() const override { return world_; }
  void barrier() override {}
  Bytes broadcast(Bytes message) override { return message; }
  std::vector<Bytes> gather(const Bytes& message) override { return {message}; }
  void progress() override {}
  void waits_outside(bool) override {}
  void request_stop(int signal) override {
    if (signal_ == 0) signal_ = signal;
  }
  int stop_after(int step, int) override {
    if (signal_ != 0 && step_ < 0) step_ = step;
    return step_;
  }
  int stop_signal() const override { return step_ < 0 ? 0 : signal_; }
  void fail(const std::string&, int) override {}

 private:
  const World world_;
  int signal_ = 0, step_ = -1;
};

}  // namespace

double Control::sum(double value) {
  double total = 0;
  for (const Bytes& each : gather(MessageWriter().number(value).take())) total += MessageReader(each).number<double>();
  const Bytes everybodys = broadcast(MessageWriter().number(total).take());
  return MessageReader(everybodys).number<double>();
}

bool Control::any(bool value) { return sum(value ? 1 : 0) != 0; }

std::unique_ptr<Control> make_control(const World& world, const ControlOptions& options) {
  if (world.size == 1) return std::make_unique<SoloControl>(world);
  return std::make_unique<NetworkControl>(world, options);
}

}  // namespace speedrun
