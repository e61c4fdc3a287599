#pragma once
// What the main thread and the control thread of a process share.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/dist/control.h"
#include "src/dist/message.h"
#include "src/dist/socket.h"

namespace speedrun {

struct ControlState {
  // For the control thread to send.
  struct Post {
    int rank;
    MessageType type;
    std::shared_ptr<const Bytes> body;
  };
  struct Failure {
    std::string message;
    int exit_code;
  };

  ControlState(const World& the_world, const ControlOptions& the_options)
      : world(the_world),
        options(the_options),
        inbox(the_world.size),
        departed(the_world.size, false),
        stop_known(the_world.size, false) {
    last_progress_s = monotonic_s();
  }

  const World world;
  const ControlOptions options;
  WakeEvent wake;  // after every change that the control thread must see

  std::mutex mutex;                 // of all up to the atomics
  std::condition_variable changed;  // by the control thread
  std::vector<Post> posts;
  std::vector<std::deque<Bytes>> inbox;  // by rank: bodies of collective messages not yet taken
  std::vector<bool> departed;            // by rank: said goodbye (hub)
  std::vector<bool> stop_known;          // by rank: has noted the decision to stop (hub)
  bool connected = false;
  std::optional<Failure> not_connected;  // why there will be no connection
  std::optional<Failure> failure;        // of this rank, told by fail()
  bool failure_known = false;            // by every rank
  bool leaving = false;                  // the main thread is done; the hub then waits for the other ranks' goodbye
  bool left = false;                     // and so are all others'
  bool closing = false;                  // the control thread is to return

  std::atomic<double> last_progress_s;        // of monotonic_s()
  std::atomic<bool> waiting = false;          // the main thread waits for other ranks: their progress counts
  std::atomic<bool> waiting_outside = false;  // of Control::waits_outside
  std::atomic<int> wanted_signal = 0;         // hub: of the first rank that wants to stop
  std::atomic<int> agreed_step = -1;          // all stop after it
  std::atomic<int> agreed_signal = 0;
};

}  // namespace speedrun
