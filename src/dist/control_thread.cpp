#include "src/dist/control_thread.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/dist/cause.h"

namespace speedrun {
namespace {

constexpr double kHeartbeatsPerLimit = 10;
constexpr double kLongestWaitSeconds = 0.1;  // limits that are not a descriptor's are looked at so often

}  // namespace

ControlThread::ControlThread(ControlState& state) : state_(state), now_s_(monotonic_s()) {}

void ControlThread::run() {
  try {
    for (;;) {
      const double before = now_s_;
      now_s_ = monotonic_s();
      // A process that was stopped itself, or got no processor, has no right to call others silent.
      if (now_s_ - before > state_.options.heartbeat_s / 2) {
        forgive_silence();
        progress_floor_s_ = now_s_;
      }
      pass();
      if (done_) return;
      {
        const std::lock_guard lock(state_.mutex);
        if (state_.closing) return;
      }
      wait(awaited(), std::min(kLongestWaitSeconds, state_.options.heartbeat_s / kHeartbeatsPerLimit / 2));
      state_.wake.clear();
    }
  } catch (const std::exception& error) {
    end_by_own_error(error.what());
  }
}

void ControlThread::wait(const std::vector<pollfd>& descriptors, double seconds) const {
  std::vector<pollfd> all = descriptors;
  all.push_back({state_.wake.descriptor(), POLLIN, 0});
  poll(all.data(), all.size(), std::max(1, static_cast<int>(seconds * 1e3)));
}

bool ControlThread::heartbeat_due() {
  if (now_s_ < heartbeat_s_) return false;
  heartbeat_s_ = now_s_ + state_.options.heartbeat_s / kHeartbeatsPerLimit;
  return true;
}

double ControlThread::progress_limit_s() const { return state_.options.progress_s * (state_.waiting_outside ? 2 : 1); }

bool ControlThread::main_thread_stalled() const {
  const double limit_s = progress_limit_s();
  return limit_s > 0 && !state_.waiting && now_s_ - std::max(state_.last_progress_s.load(), progress_floor_s_) > limit_s;
}

std::vector<ControlState::Post> ControlThread::take_posts() {
  const std::lock_guard lock(state_.mutex);
  return std::exchange(state_.posts, {});
}

void ControlThread::refuse_connection(const std::string& line, int exit_code) {
  const std::lock_guard lock(state_.mutex);
  state_.not_connected = ControlState::Failure{line, exit_code};
  state_.changed.notify_all();
  finish();
}

void ControlThread::end_after_own_failure(int exit_code) {
  {
    const std::lock_guard lock(state_.mutex);
    state_.failure_known = true;
    state_.changed.notify_all();
  }
  usleep(static_cast<useconds_t>(state_.options.heartbeat_s * 1e6));
  _exit(exit_code);
}

pollfd ControlThread::awaited_of(const Connection& connection) {
  const int events = connection.has_unsent() ? POLLIN | POLLOUT : POLLIN;
  return {connection.descriptor(), static_cast<short>(events), 0};
}

std::string ControlThread::rank_line(int rank, const std::optional<ProcessId>& process, const std::string& what) const {
  if (!process) return fmt::format("rank {}: {}", rank, one_line(what));
  return fmt::format("rank {} ({}): {}", rank, describe(*process), one_line(what));
}

Bytes write_hello(const Hello& hello) {
  MessageWriter writer;
  writer.number(hello.magic).number(hello.version).number(hello.rank).number(hello.size);
  write_process(writer, hello.process);
  return writer.text(hello.job).take();
}

Hello read_hello(const Bytes& body) {
  MessageReader reader(body);
  Hello hello;
  hello.magic = reader.number<uint64_t>();
  hello.version = reader.number<uint32_t>();
  // What follows is this version's own.
  if (hello.magic != Hello::kMagic || hello.version != Hello::kVersion) return hello;
  hello.rank = reader.number<int32_t>();
  hello.size = reader.number<int32_t>();
  hello.process = read_process(reader);
  hello.job = reader.text();
  return hello;
}

std::string job_of_environment() {
  const char* job = std::getenv(kJobVariable);
  return job == nullptr ? "" : job;
}

}  // namespace speedrun
