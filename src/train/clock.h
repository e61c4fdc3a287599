#pragma once
// The run's clock and what it leaves out. The training clock runs only inside Phase::training; everything else is reported beside
// it.
#include <array>
#include <chrono>

namespace speedrun {

enum class Phase : int { startup, warmup, training, validation, checkpoint };
inline constexpr int kNumPhases = 5;

class PhaseClock {
 public:
  // The caller has waited for the device before each switch, so that work is charged to the phase that asked for it.
  void enter(Phase phase) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[static_cast<size_t>(phase_)] += std::chrono::duration<double>(now - since_).count();
    phase_ = phase;
    since_ = now;
  }
  double seconds(Phase phase) const {
    const double running = phase == phase_ ? std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count() : 0;
    return seconds_[static_cast<size_t>(phase)] + running;
  }
  double total() const {
    double sum = 0;
    for (int p = 0; p < kNumPhases; ++p) sum += seconds(static_cast<Phase>(p));
    return sum;
  }
  // A resumed run goes on from the seconds of the one it continues.
  void add(Phase phase, double seconds) { seconds_[static_cast<size_t>(phase)] += seconds; }

 private:
  std::array<double, kNumPhases> seconds_{};
  Phase phase_ = Phase::startup;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

}  // namespace speedrun
