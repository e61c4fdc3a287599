// Rank 0's control thread: takes in the ranks at the start, passes their messages to the main thread, and judges. A rank whose
// connection ends without a goodbye has crashed; one that is silent for too long is killed if it is on this host. What a rank tells
// of its own failure is believed a moment later only: other ranks' transports feel a crash before its last word, the end of its
// connection, may be read here.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "kernels/base/error.h"
#include "src/dist/cause.h"
#include "src/dist/control_thread.h"

namespace speedrun {
namespace {

constexpr double kHelloSeconds = 5;     // a connection that does not say who it is by then is not one of ours
constexpr double kSettleSeconds = 0.1;  // between a failure that a rank tells and its judgement
constexpr double kEndSeconds = 1;       // the ranks have to end once they are told to; then those of this host are killed
constexpr int kMachineFailure = static_cast<int>(ExitCode::failure);

class Hub final : public ControlThread {
 public:
  explicit Hub(ControlState& state);

 private:
  struct Peer {
    std::unique_ptr<Connection> connection;  // none: has not come yet
    ProcessId process;
    std::vector<Message> messages;  // of this round
    bool departed = false;          // said goodbye
  };
  struct Newcomer {
    Connection connection;
    double since_s;
  };
  struct Cause {
    std::string line;
    int rank = 0;
    int exit_code = kMachineFailure;
    bool told = false;    // by the rank itself, with fail()
    bool silent = false;  // the rank is to be killed
    double since_s = 0;
  };

  void pass() override;
  std::vector<pollfd> awaited() const override;
  void forgive_silence() override;
  void end_by_own_error(const std::string& what) override;

  void take_in_newcomers();
  bool take_in(Newcomer& newcomer);  // true: done with it, for good or bad
  void welcome(Connection connection, const Hello& hello);
  void all_have_come();
  void read_peers();
  void hear(int rank, Message& message);
  void send_posts();
  void look_at_main_thread();
  void watch_times();
  void blame(Cause cause);
  void blame_rank(int rank, const std::string& what, bool silent = false);
  void end_all(const Cause& cause);
  void tell_and_await_end(const Cause& cause);
  void take_leave();
  std::vector<int> ranks_where(bool (*condition)(const Peer&)) const;

  Socket listener_;
  std::vector<Newcomer> newcomers_;
  std::vector<Peer> peers_;  // by rank; the first, this process, stays empty
  std::optional<Cause> cause_;
  bool all_here_ = false, farewell_sent_ = false;
  const double start_s_;
  double leaving_since_s_ = -1;
};

// The launcher has opened the socket before it started any rank, so that nobody else can have the port.
Socket listening_socket(const World& world) {
  const char* text = std::getenv(kListenVariable);
  if (text != nullptr && world.launched_here) {
    Socket inherited(std::atoi(text));
    if (port_of(inherited) == world.port) {
      fcntl(inherited.descriptor(), F_SETFD, FD_CLOEXEC);
      return inherited;
    }
    inherited.release();  // something else
  }
  return listen_on(world.address, world.port);
}

Hub::Hub(ControlState& state)
    : ControlThread(state), listener_(listening_socket(state.world)), peers_(state.world.size), start_s_(monotonic_s()) {}

std::vector<pollfd> Hub::awaited() const {
  std::vector<pollfd> all;
  if (listener_) all.push_back({listener_.descriptor(), POLLIN, 0});
  for (const Newcomer& newcomer : newcomers_) all.push_back(awaited_of(newcomer.connection));
  for (const Peer& peer : peers_) {
    if (peer.connection && !peer.connection->closed()) all.push_back(awaited_of(*peer.connection));
  }
  return all;
}

void Hub::pass() {
  take_in_newcomers();
  read_peers();
  send_posts();
  look_at_main_thread();
  watch_times();
  if (cause_ && (!cause_->told || now() >= cause_->since_s + kSettleSeconds)) return end_all(*cause_);
  const bool heartbeat = heartbeat_due();
  for (Peer& peer : peers_) {
    if (!peer.connection) continue;
    if (heartbeat) peer.connection->send(MessageType::heartbeat);
    peer.connection->write();
  }
  take_leave();
}

void Hub::forgive_silence() {
  for (Peer& peer : peers_) {
    if (peer.connection) peer.connection->forgive_silence();
  }
}

void Hub::end_by_own_error(const std::string& what) {
  blame({.line = rank_line(0, std::nullopt, "its control thread: " + what)});
  end_all(*cause_);
}

// ---------------------------------------------------------------- the start

void Hub::take_in_newcomers() {
  if (!listener_) return;
  while (Socket socket = accept_from(listener_)) newcomers_.push_back({Connection(std::move(socket)), now()});
  for (size_t i = 0; i < newcomers_.size();) {
    if (take_in(newcomers_[i])) {
      newcomers_.erase(newcomers_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  if (std::all_of(peers_.begin() + 1, peers_.end(), [](const Peer& peer) { return peer.connection != nullptr; })) all_have_come();
}

bool Hub::take_in(Newcomer& newcomer) {
  try {
    std::vector<Message> messages;
    newcomer.connection.read(messages);
    if (messages.empty()) return newcomer.connection.closed() || now() > newcomer.since_s + kHelloSeconds;
    if (messages.size() > 1 || messages[0].type != MessageType::hello) return true;
    const Hello hello = read_hello(messages[0].body);
    if (hello.magic == Hello::kMagic) welcome(std::move(newcomer.connection), hello);
  } catch (const Error&) {
    // Whoever tries the ports of this host speaks something else.
  }
  return true;
}

void Hub::welcome(Connection connection, const Hello& hello) {
  const int size = state_.world.size;
  std::string refusal;
  if (hello.version != Hello::kVersion) {
    refusal = fmt::format("a rank runs another version of this program (control protocol {}, rank 0 has {})", hello.version,
                          Hello::kVersion);
  } else if (hello.job != job_of_environment()) {
    // Another run's, by mistake at this port: that is no failure of this run.
    connection.send(MessageType::refusal, MessageWriter().text("that is rank 0 of another run (SPEEDRUN_JOB differs)").take());
    return connection.write();
  } else if (hello.size != size) {
    refusal = rank_line(hello.rank, hello.process, fmt::format("has WORLD_SIZE={} where rank 0 has {}", hello.size, size));
  } else if (hello.rank < 1 || hello.rank >= size) {
    refusal = rank_line(hello.rank, hello.process,
                        hello.rank == 0 ? "there is a rank 0 already" : fmt::format("there are {} ranks", size));
  } else if (peers_[hello.rank].connection) {
    refusal = rank_line(hello.rank, hello.process,
                        fmt::format("there is a rank {} already, {}", hello.rank, describe(peers_[hello.rank].process)));
  }
  if (!refusal.empty()) {
    connection.send(MessageType::refusal, MessageWriter().text(refusal).take());
    connection.write();
    return blame({.line = refusal});
  }
  Peer& peer = peers_[hello.rank];
  peer.process = hello.process;
  peer.connection = std::make_unique<Connection>(std::move(connection));
  MessageWriter greeting;
  write_process(greeting, this_process());
  peer.connection->send(MessageType::greeting, greeting.take());
}

void Hub::all_have_come() {
  all_here_ = true;
  listener_.close();
  newcomers_.clear();
  for (Peer& peer : peers_) {
    if (peer.connection) peer.connection->send(MessageType::complete);
  }
  const std::lock_guard lock(state_.mutex);
  state_.connected = true;
  state_.changed.notify_all();
}

// ---------------------------------------------------------------- the run

void Hub::read_peers() {
  std::vector<int> ranks;
  for (int rank = 1; rank < state_.world.size; ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.connection || peer.connection->closed()) continue;
    try {
      peer.connection->read(peer.messages);
    } catch (const Error& error) {
      blame_rank(rank, error.what());
    }
    ranks.push_back(rank);
  }
  for (const int rank : ranks) {
    Peer& peer = peers_[rank];
    try {
      for (Message& message : peer.messages) hear(rank, message);
    } catch (const Error& error) {
      blame_rank(rank, error.what());
    }
    peer.messages.clear();
    if (peer.connection->closed() && !peer.departed) blame_rank(rank, "killed or crashed: its connection closed");
  }
}

void Hub::hear(int rank, Message& message) {
  MessageReader reader(message.body);
  switch (message.type) {
    case MessageType::heartbeat:
      return;
    case MessageType::collective: {
      const std::lock_guard lock(state_.mutex);
      state_.inbox[rank].push_back(std::move(message.body));
      return state_.changed.notify_all();
    }
    case MessageType::stop_request: {
      int none = 0;
      state_.wanted_signal.compare_exchange_strong(none, reader.number<int32_t>());
      return;
    }
    case MessageType::stop_known: {
      const std::lock_guard lock(state_.mutex);
      state_.stop_known[rank] = true;
      return state_.changed.notify_all();
    }
    case MessageType::failure: {
      const auto exit_code = reader.number<int32_t>();
      return blame({.line = rank_line(rank, std::nullopt, reader.text()), .rank = rank, .exit_code = exit_code, .told = true});
    }
    case MessageType::goodbye: {
      peers_[rank].departed = true;
      const std::lock_guard lock(state_.mutex);
      state_.departed[rank] = true;
      return state_.changed.notify_all();
    }
    default:
      blame_rank(rank, "sent a message that only rank 0 sends");
  }
}

void Hub::send_posts() {
  for (const ControlState::Post& post : take_posts()) {
    Connection& connection = *peers_[post.rank].connection;
    if (post.type == MessageType::collective) {
      connection.send_in_order(post.type, post.body);
    } else {
      connection.send(post.type, *post.body);
    }
  }
}

void Hub::look_at_main_thread() {
  const std::lock_guard lock(state_.mutex);
  if (state_.failure) {
    blame({.line = rank_line(0, std::nullopt, state_.failure->message), .exit_code = state_.failure->exit_code, .told = true});
  } else if (main_thread_stalled()) {
    blame({.line = rank_line(0, std::nullopt, fmt::format("no progress for {:g} s", progress_limit_s())), .told = true});
  }
  if (state_.leaving && leaving_since_s_ < 0) leaving_since_s_ = now();
}

void Hub::watch_times() {
  const ControlOptions& options = state_.options;
  for (int rank = 1; rank < state_.world.size; ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.connection && !peer.connection->closed() && now() > peer.connection->heard_s() + options.heartbeat_s)
      blame_rank(rank, fmt::format("no sign of life for {:g} s", options.heartbeat_s), true);
  }
  if (!all_here_ && now() > start_s_ + options.connect_s) {
    const std::vector<int> missing = ranks_where([](const Peer& peer) { return peer.connection == nullptr; });
    blame({.line = fmt::format("{} {}: did not come within {:g} s of rank 0's start", missing.size() == 1 ? "rank" : "ranks",
                               fmt::join(missing, ", "), options.connect_s),
           .rank = missing[0]});
  }
  const double leave_limit_s = std::max(options.connect_s, options.progress_s);
  if (leaving_since_s_ >= 0 && now() > leaving_since_s_ + leave_limit_s) {
    const std::vector<int> late = ranks_where([](const Peer& peer) { return !peer.departed; });
    if (!late.empty()) blame_rank(late[0], fmt::format("not at its end {:g} s after rank 0", leave_limit_s), true);
  }
}

std::vector<int> Hub::ranks_where(bool (*condition)(const Peer&)) const {
  std::vector<int> ranks;
  for (int rank = 1; rank < state_.world.size; ++rank) {
    if (condition(peers_[rank])) ranks.push_back(rank);
  }
  return ranks;
}

// ---------------------------------------------------------------- the end

// The first cause stays, but a crash found while a told failure settles comes before it.
void Hub::blame(Cause cause) {
  cause.since_s = now();
  if (!cause_ || (cause_->told && !cause.told && cause.rank != cause_->rank)) cause_ = std::move(cause);
}

void Hub::blame_rank(int rank, const std::string& what, bool silent) {
  blame({.line = rank_line(rank, peers_[rank].process, what), .rank = rank, .silent = silent});
}

void Hub::end_all(const Cause& cause) {
  listener_.close();
  newcomers_.clear();
  // Before all ranks are here make_control throws the line, and main prints it.
  const bool speaks = may_tell_cause();
  if (speaks && all_here_) print_cause(cause.line);
  if (cause.silent) kill_if_here(peers_[cause.rank].process);
  tell_and_await_end(cause);
  std::optional<int> own_failure;
  {
    const std::lock_guard lock(state_.mutex);
    if (state_.failure) own_failure = state_.failure->exit_code;
  }
  if (own_failure) end_after_own_failure(*own_failure);
  if (all_here_ || !speaks) _exit(cause.exit_code);
  refuse_connection(cause.line, cause.exit_code);
}

// Until all others have ended, or kEndSeconds. The rank that told its failure ends by itself; it hears when everybody knows.
void Hub::tell_and_await_end(const Cause& cause) {
  Connection* teller = cause.told ? peers_[cause.rank].connection.get() : nullptr;
  MessageWriter order;
  order.number(static_cast<int32_t>(cause.exit_code)).number(static_cast<uint8_t>(cause.silent));
  write_process(order, peers_[cause.rank].process);
  const Bytes body = order.take();
  for (Peer& peer : peers_) {
    if (peer.connection && peer.connection.get() != teller) peer.connection->send(MessageType::abort, body);
  }
  bool teller_knows = teller == nullptr;
  std::vector<Message> ignored;
  for (const double limit_s = monotonic_s() + kEndSeconds; monotonic_s() < limit_s;) {
    bool unsent = false, alive = false;
    for (Peer& peer : peers_) {
      if (!peer.connection || peer.connection->closed()) continue;
      peer.connection->write();
      try {
        peer.connection->read(ignored);
      } catch (const Error&) {
        // It ends, whatever it says.
      }
      ignored.clear();
      if (peer.connection.get() == teller) continue;
      unsent = unsent || (peer.connection->has_unsent() && !peer.connection->closed());
      alive = alive || !peer.connection->closed();
    }
    if (!teller_knows && !unsent) {
      teller->send(MessageType::failure_known);
      teller->write();
      teller_knows = true;
    }
    if (!alive && teller_knows && (teller == nullptr || !teller->has_unsent())) return;
    wait(awaited(), 0.02);
  }
  if (!teller_knows) {
    teller->send(MessageType::failure_known);
    teller->write();
  }
  for (const Peer& peer : peers_) {
    if (peer.connection && peer.connection.get() != teller && !peer.connection->closed()) kill_if_here(peer.process);
  }
}

// Once everybody has said goodbye. The members close first, so that nothing sent to them is lost; one that does not is silent.
void Hub::take_leave() {
  if (leaving_since_s_ < 0 || !ranks_where([](const Peer& peer) { return !peer.departed; }).empty()) return;
  if (!farewell_sent_) {
    farewell_sent_ = true;
    for (const int rank : ranks_where([](const Peer&) { return true; })) {
      peers_[rank].connection->send(MessageType::farewell);
      peers_[rank].connection->write();
    }
  }
  if (!ranks_where([](const Peer& peer) { return !peer.connection->closed(); }).empty()) return;
  const std::lock_guard lock(state_.mutex);
  state_.left = true;
  state_.changed.notify_all();
  finish();
}

}  // namespace

std::unique_ptr<ControlThread> make_hub(ControlState& state) { return std::make_unique<Hub>(state); }

}  // namespace speedrun
