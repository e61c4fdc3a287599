#pragma once
// TCP sockets of the control plane, all non-blocking and closed in programs that this one starts.
#include <string>

namespace speedrun {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : descriptor_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  int descriptor() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  int release();
  void close();

 private:
  int descriptor_ = -1;
};

// Makes a listening socket where rank 0 is to be reached as `address`: on the loopback interface alone if that is what the address
// names, on all interfaces otherwise. `port` 0: any free one. Throws Error.
Socket listen_on(const std::string& address, int port);
int port_of(const Socket& socket);  // its own end's; -1 for what is no listening TCP socket

// The next connection waiting at a listening socket; none: an empty Socket.
Socket accept_from(const Socket& listener);

// Connects, again and again until `deadline_s` (of monotonic_s()), for the other side may not listen yet. Throws Error with the
// reason of the last attempt.
Socket connect_to(const std::string& address, int port, double deadline_s);

double monotonic_s();  // CLOCK_MONOTONIC

// What another thread ends a poll() with.
class WakeEvent {
 public:
  WakeEvent();  // throws Error
  ~WakeEvent();
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;
  int descriptor() const { return descriptor_; }
  void set();
  void clear();

 private:
  int descriptor_;
};

}  // namespace speedrun
