#include "src/train/stop_signal.h"

#include <unistd.h>

#include <csignal>
#include <ctime>

namespace speedrun {
namespace {

// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t received_signal = 0;
timespec received_at;
struct sigaction former_int, former_term;

// Launchers and timeout(1) send a signal to the process and once more to its group: what arrives within a second is the same
// request.
constexpr double kSameRequestSeconds = 1;

void handle(int signal) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (received_signal != 0) {
    const double since =
        static_cast<double>(now.tv_sec - received_at.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec - received_at.tv_nsec);
    if (since > kSameRequestSeconds) _exit(128 + signal);
    return;
  }
  received_at = now;
  received_signal = signal;
}

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = handle;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &former_int);
  sigaction(SIGTERM, &action, &former_term);
}

StopSignal::~StopSignal() {
  sigaction(SIGINT, &former_int, nullptr);
  sigaction(SIGTERM, &former_term, nullptr);
}

int StopSignal::received() { return received_signal; }

}  // namespace speedrun
