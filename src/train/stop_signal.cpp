#include "src/train/stop_signal.h"

#include <unistd.h>

#include <csignal>

namespace speedrun {
namespace {

// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t received_signal = 0;
struct sigaction former_int, former_term;

void handle(int signal) {
  if (received_signal != 0) _exit(128 + signal);
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
