// The control thread of every rank but 0: connected to the hub, which judges and tells. When the hub itself is gone each member
// ends by itself: the first to take the word from the launcher's pipe says so (under other launchers rank 1).
#include <unistd.h>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/dist/cause.h"
#include "src/dist/control_thread.h"

namespace speedrun {
namespace {

constexpr double kLauncherSeconds = 0.3;  // in which a launcher has seen the end of a rank
constexpr double kSpeakerSeconds = 1;     // that ranks differ by in finding rank 0 silent, at most
constexpr int kMachineFailure = static_cast<int>(ExitCode::failure);

class Member final : public ControlThread {
 public:
  explicit Member(ControlState& state) : ControlThread(state), connect_limit_s_(monotonic_s() + state.options.connect_s) {}

 private:
  void pass() override;
  std::vector<pollfd> awaited() const override;
  void forgive_silence() override;
  void end_by_own_error(const std::string& what) override;

  void connect();
  void hear(Message& message);
  void send_posts();
  void look_at_main_thread();
  void obey_abort(MessageReader reader);
  void hub_is_lost(const std::string& what, bool silent);
  void no_connection(const std::string& what);
  void end_process(int exit_code);

  std::unique_ptr<Connection> hub_;
  ProcessId hub_process_;
  bool greeted_ = false, complete_ = false, failure_sent_ = false, left_ = false;
  const double connect_limit_s_;
};

std::vector<pollfd> Member::awaited() const { return hub_ ? std::vector{awaited_of(*hub_)} : std::vector<pollfd>(); }

void Member::forgive_silence() {
  if (hub_) hub_->forgive_silence();
}

void Member::pass() {
  if (!hub_) return connect();
  std::vector<Message> messages;
  hub_->read(messages);
  for (Message& message : messages) hear(message);
  if (left_) finish();
  if (finished()) return;
  if (hub_->closed()) return hub_is_lost("killed or crashed: its connection closed", false);
  send_posts();
  look_at_main_thread();
  if (greeted_ && heartbeat_due()) hub_->send(MessageType::heartbeat);
  hub_->write();
  // The launcher's socket takes connections before rank 0 lives.
  if (greeted_ && now() > hub_->heard_s() + state_.options.heartbeat_s) {
    hub_is_lost(fmt::format("no sign of life for {:g} s", state_.options.heartbeat_s), true);
  } else if (!greeted_ && now() > connect_limit_s_) {
    no_connection(fmt::format("did not answer within {:g} s", state_.options.connect_s));
  }
}

void Member::connect() {
  const World& world = state_.world;
  try {
    hub_ = std::make_unique<Connection>(connect_to(world.address, world.port, connect_limit_s_));
  } catch (const Error& error) {
    return no_connection(fmt::format("did not answer within {:g} s: {}", state_.options.connect_s, error.what()));
  }
  Hello hello;
  hello.rank = world.rank;
  hello.size = world.size;
  hello.process = this_process();
  hello.job = job_of_environment();
  hub_->send(MessageType::hello, write_hello(hello));
  hub_->write();
}

void Member::hear(Message& message) {
  MessageReader reader(message.body);
  switch (message.type) {
    case MessageType::heartbeat:
      return;
    case MessageType::greeting: {
      hub_process_ = read_process(reader);
      greeted_ = true;
      return;
    }
    case MessageType::refusal:
      return no_connection(fmt::format("refused rank {}: {}", state_.world.rank, reader.text()));
    case MessageType::complete: {
      complete_ = true;
      const std::lock_guard lock(state_.mutex);
      state_.connected = true;
      return state_.changed.notify_all();
    }
    case MessageType::collective: {
      const std::lock_guard lock(state_.mutex);
      state_.inbox[0].push_back(std::move(message.body));
      return state_.changed.notify_all();
    }
    case MessageType::stop_decision: {
      const auto step = reader.number<int32_t>();
      state_.agreed_signal = reader.number<int32_t>();
      state_.agreed_step = step;
      return hub_->send(MessageType::stop_known);  // after the store: the hub's main thread goes on when it hears this
    }
    case MessageType::failure_known:
      return end_process(kMachineFailure);
    case MessageType::abort:
      return obey_abort(reader);
    case MessageType::farewell: {
      left_ = true;
      const std::lock_guard lock(state_.mutex);
      state_.left = true;
      return state_.changed.notify_all();
    }
    default:
      throw Error("rank 0 sent a message that only other ranks send");
  }
}

void Member::send_posts() {
  for (const ControlState::Post& post : take_posts()) hub_->send_in_order(post.type, post.body);
}

void Member::look_at_main_thread() {
  if (failure_sent_ || !complete_) return;
  MessageWriter writer;
  {
    const std::lock_guard lock(state_.mutex);
    if (state_.failure) {
      writer.number(static_cast<int32_t>(state_.failure->exit_code)).text(state_.failure->message);
    } else if (main_thread_stalled()) {
      writer.number(static_cast<int32_t>(kMachineFailure)).text(fmt::format("no progress for {:g} s", progress_limit_s()));
    } else {
      return;
    }
  }
  failure_sent_ = true;
  hub_->send(MessageType::failure, writer.take());
}

void Member::obey_abort(MessageReader reader) {
  const auto exit_code = reader.number<int32_t>();
  const bool silent = reader.number<uint8_t>() != 0;
  const ProcessId process = read_process(reader);
  if (silent) kill_if_here(process);
  end_process(exit_code);
}

void Member::end_process(int exit_code) {
  std::optional<int> own_failure;
  {
    const std::lock_guard lock(state_.mutex);
    if (state_.failure) own_failure = state_.failure->exit_code;
  }
  if (own_failure) end_after_own_failure(*own_failure);
  _exit(exit_code);
}

void Member::hub_is_lost(const std::string& what, bool silent) {
  if (!greeted_) {
    // A launcher of ours sees how rank 0 ended, which says more: it comes first if it has something to say.
    if (state_.world.launched_here) usleep(static_cast<useconds_t>(kLauncherSeconds * 1e6));
    return no_connection("closed the connection without a greeting: it ended, or something else listens there");
  }
  const bool speaks = state_.world.launched_here ? may_tell_cause() : state_.world.rank == 1;
  if (speaks) print_cause(rank_line(0, hub_process_, what));
  // Rank 1 comes to the same view by itself, not by what the others do to rank 0.
  if (silent && !speaks && !state_.world.launched_here) usleep(static_cast<useconds_t>(kSpeakerSeconds * 1e6));
  if (silent) kill_if_here(hub_process_);
  end_process(kMachineFailure);
}

// make_control throws the line, and main prints it.
void Member::no_connection(const std::string& what) {
  const World& world = state_.world;
  if (!may_tell_cause()) end_process(kMachineFailure);
  refuse_connection(
      fmt::format("rank {}: rank 0 at {} port {} (MASTER_ADDR, MASTER_PORT) {}", world.rank, world.address, world.port, what),
      kMachineFailure);
}

void Member::end_by_own_error(const std::string& what) {
  if (may_tell_cause()) print_cause(rank_line(state_.world.rank, std::nullopt, "its control thread: " + what));
  end_process(kMachineFailure);
}

}  // namespace

std::unique_ptr<ControlThread> make_member(ControlState& state) { return std::make_unique<Member>(state); }

}  // namespace speedrun
