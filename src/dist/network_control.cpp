#include "src/dist/network_control.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <utility>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/dist/cause.h"
#include "src/dist/control_thread.h"

namespace speedrun {
namespace {

// The longest that fail() waits: the hub lets a failure settle, tells the others and waits for their end, a second or so in all.
constexpr auto kFailLimit = std::chrono::seconds(4);

// Behind the payload of a collective message: ranks that make different calls find out instead of taking one for the other.
struct Trailer {
  uint64_t sequence;
  uint32_t kind;
  uint32_t unused;
};

constexpr const char* kCollectiveNames[] = {"a barrier", "a broadcast", "a gather"};

// Signals are the main thread's: its handlers see them, and its system calls are interrupted.
std::thread start_without_signals(std::shared_ptr<ControlState> state, std::unique_ptr<ControlThread> control) {
  sigset_t all, former;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &former);
  std::thread thread([state = std::move(state), control = std::move(control)] { control->run(); });
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
  return thread;
}

}  // namespace

// While the main thread waits for others it is not the one that makes no progress.
class NetworkControl::Waiting {
 public:
  explicit Waiting(ControlState& state) : state_(state) { state_.waiting = true; }
  ~Waiting() {
    state_.last_progress_s = monotonic_s();
    state_.waiting = false;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  ControlState& state_;
};

NetworkControl::NetworkControl(const World& world, const ControlOptions& options)
    : state_(std::make_shared<ControlState>(world, options)), exceptions_at_start_(std::uncaught_exceptions()) {
  open_cause_pipe(world.launched_here);
  thread_ = start_without_signals(state_, world.rank == 0 ? make_hub(*state_) : make_member(*state_));
  std::unique_lock lock(state_->mutex);
  const Waiting waiting(*state_);
  state_->changed.wait(lock, [&] { return state_->connected || state_->not_connected; });
  if (state_->connected) return;
  lock.unlock();
  thread_.join();
  throw Error(state_->not_connected->message, static_cast<ExitCode>(state_->not_connected->exit_code));
}

NetworkControl::~NetworkControl() {
  bool failed = false;
  {
    const std::lock_guard lock(state_->mutex);
    failed = state_->failure.has_value();
  }
  if (!failed && std::uncaught_exceptions() > exceptions_at_start_) {
    fail("ended by an error", static_cast<int>(ExitCode::failure));
    failed = true;
  }
  if (failed) {
    // The thread sees to it that this process ends, whatever its main thread gets stuck in next.
    thread_.detach();
    return;
  }
  // In order behind what is still to be sent.
  if (rank() != 0) post(0, MessageType::goodbye, std::make_shared<const Bytes>());
  {
    const Waiting waiting(*state_);
    std::unique_lock lock(state_->mutex);
    state_->leaving = true;
    state_->wake.set();
    const auto left = [&] { return state_->left; };
    // The hub's thread has a limit of its own, and names the rank that does not come to its end.
    const std::chrono::duration<double> limit(std::max(state_->options.connect_s, state_->options.progress_s));
    if (rank() == 0) {
      state_->changed.wait(lock, left);
    } else {
      state_->changed.wait_for(lock, limit, left);
    }
    state_->closing = true;
  }
  state_->wake.set();
  thread_.join();
}

void NetworkControl::post(int rank, MessageType type, std::shared_ptr<const Bytes> body) {
  const std::lock_guard lock(state_->mutex);
  state_->posts.push_back({rank, type, std::move(body)});
  state_->wake.set();
}

// ---------------------------------------------------------------- collectives

std::shared_ptr<const Bytes> NetworkControl::with_trailer(const Bytes& payload, Collective kind) const {
  auto body = std::make_shared<Bytes>();
  body->reserve(payload.size() + sizeof(Trailer));
  *body = payload;
  const Trailer trailer{sequence_, static_cast<uint32_t>(kind), 0};
  const auto* bytes = reinterpret_cast<const std::byte*>(&trailer);
  body->insert(body->end(), bytes, bytes + sizeof trailer);
  return body;
}

void NetworkControl::send_to_others(Collective kind, const Bytes& payload) {
  const std::shared_ptr<const Bytes> body = with_trailer(payload, kind);
  for (int other = 1; other < size(); ++other) post(other, MessageType::collective, body);
}

Bytes NetworkControl::receive(int rank, Collective kind) {
  const Waiting waiting(*state_);
  std::unique_lock lock(state_->mutex);
  std::deque<Bytes>& inbox = state_->inbox[rank];
  state_->changed.wait(lock, [&] { return !inbox.empty() || state_->departed[rank]; });
  const char* name = kCollectiveNames[static_cast<size_t>(kind)];
  if (inbox.empty()) throw Error(fmt::format("rank {} has ended while rank {} waits for it in {}", rank, this->rank(), name));
  Bytes body = std::move(inbox.front());
  inbox.pop_front();
  lock.unlock();
  Trailer trailer{};
  require(body.size() >= sizeof trailer, "rank ", rank, " sent ", body.size(), " bytes where ", sizeof trailer, " are the least");
  std::memcpy(&trailer, body.data() + body.size() - sizeof trailer, sizeof trailer);
  if (trailer.sequence != sequence_ || trailer.kind != static_cast<uint32_t>(kind)) {
    throw Error(fmt::format("rank {} is in {} (its call {}) where rank {} is in {} (its call {})", rank,
                            trailer.kind < std::size(kCollectiveNames) ? kCollectiveNames[trailer.kind] : "an unknown call",
                            trailer.sequence, this->rank(), name, sequence_));
  }
  body.erase(body.end() - static_cast<std::ptrdiff_t>(sizeof trailer), body.end());
  return body;
}

void NetworkControl::barrier() {
  ++sequence_;
  if (rank() == 0) {
    for (int other = 1; other < size(); ++other) receive(other, Collective::barrier);
    send_to_others(Collective::barrier, {});
  } else {
    post(0, MessageType::collective, with_trailer({}, Collective::barrier));
    receive(0, Collective::barrier);
  }
}

Bytes NetworkControl::broadcast(Bytes message) {
  ++sequence_;
  if (rank() != 0) return receive(0, Collective::broadcast);
  send_to_others(Collective::broadcast, message);
  return message;
}

std::vector<Bytes> NetworkControl::gather(const Bytes& message) {
  ++sequence_;
  if (rank() != 0) {
    post(0, MessageType::collective, with_trailer(message, Collective::gather));
    return {};
  }
  std::vector<Bytes> all{message};
  for (int other = 1; other < size(); ++other) all.push_back(receive(other, Collective::gather));
  return all;
}

void NetworkControl::waits_outside(bool begins) {
  // Before the flag, so that the time of the wait never counts for what comes after it.
  if (!begins) state_->last_progress_s = monotonic_s();
  state_->waiting_outside = begins;
}

// ---------------------------------------------------------------- the common stop

void NetworkControl::request_stop(int signal) {
  if (std::exchange(stop_requested_, true)) return;
  if (rank() == 0) {
    int none = 0;
    state_->wanted_signal.compare_exchange_strong(none, signal);
  } else {
    post(0, MessageType::stop_request, std::make_shared<const Bytes>(MessageWriter().number(static_cast<int32_t>(signal)).take()));
  }
}

int NetworkControl::stop_after(int step, int ahead) {
  int agreed = state_->agreed_step;
  if (rank() == 0 && agreed < 0 && state_->wanted_signal != 0) agreed = decide_stop(step, ahead);
  if (agreed >= 0 && last_asked_step_ >= agreed) {
    throw Error(
        fmt::format("rank {} has asked for step {} before it knew that all stop after {}: ranks are further apart than {} steps",
                    rank(), last_asked_step_, agreed, ahead));
  }
  if (agreed < 0) last_asked_step_ = step;
  return agreed;
}

// Only rank 0 decides, inside its stop_after(step), and returns when every other rank's control thread has noted the decision,
// which is to stop after S = step + ahead + 1. Every rank hears of it at the latest when it asks with S itself: it comes to
// stop_after(S) = stop_after(step + ahead + 1) only when rank 0, being at most `ahead` steps behind, has come to stop_after(step +
// 1) and so has left stop_after(step), and at that time S was noted everywhere. Nor can rank 0 wait for ever: the answer comes from
// the others' control threads, whatever their main threads do, or they are dead and this process ends.
int NetworkControl::decide_stop(int step, int ahead) {
  const int last = step + ahead + 1;
  const int signal = state_->wanted_signal;
  const auto body =
      std::make_shared<const Bytes>(MessageWriter().number(static_cast<int32_t>(last)).number(static_cast<int32_t>(signal)).take());
  for (int other = 1; other < size(); ++other) post(other, MessageType::stop_decision, body);
  const Waiting waiting(*state_);
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] {
    for (int other = 1; other < size(); ++other) {
      if (!state_->stop_known[other] && !state_->departed[other]) return false;
    }
    return true;
  });
  state_->agreed_signal = signal;
  state_->agreed_step = last;
  return last;
}

// ---------------------------------------------------------------- failures

void NetworkControl::fail(const std::string& message, int exit_code) {
  const Waiting waiting(*state_);
  std::unique_lock lock(state_->mutex);
  if (!state_->failure) state_->failure = ControlState::Failure{message, exit_code};
  state_->wake.set();
  state_->changed.wait_for(lock, kFailLimit, [&] { return state_->failure_known; });
}

}  // namespace speedrun
