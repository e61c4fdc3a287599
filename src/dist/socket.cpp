#include "src/dist/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {
namespace {

constexpr int kBacklog = 1024;         // all ranks may come at once
constexpr double kAttemptSeconds = 2;  // for one connect(): a packet that nobody answers must not use up the whole time
constexpr double kFirstPause = 0.002, kLongestPause = 0.05;  // between attempts, in s

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& address, int port, std::string& problem) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) problem = gai_strerror(error);
  return {found, freeaddrinfo};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// A literal address or localhost: a host's own name may be on the loopback interface for the host itself alone.
bool names_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.compare(0, 4, "127.") == 0;
}

Socket open_socket(int family) { return Socket(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

void set_option(const Socket& socket, int level, int name, int value) {
  setsockopt(socket.descriptor(), level, name, &value, sizeof value);
}

bool bind_and_listen(const Socket& socket, const sockaddr* address, socklen_t size) {
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  return bind(socket.descriptor(), address, size) == 0 && listen(socket.descriptor(), kBacklog) == 0;
}

// A port of the range that systems hand out may be given to the very socket that connects to it, which then talks to itself.
bool is_own_end(const Socket& socket) {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  if (getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&own), &own_size) != 0) return false;
  if (getpeername(socket.descriptor(), reinterpret_cast<sockaddr*>(&other), &other_size) != 0) return false;
  return own_size == other_size && std::memcmp(&own, &other, own_size) == 0;
}

// 0 or the errno of the attempt.
int try_connect(const Socket& socket, const addrinfo& where, double deadline_s) {
  if (connect(socket.descriptor(), where.ai_addr, where.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    pollfd wait{socket.descriptor(), POLLOUT, 0};
    while (poll(&wait, 1, 20) == 0) {
      if (monotonic_s() > deadline_s) return ETIMEDOUT;
    }
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return error;
  }
  return is_own_end(socket) ? ECONNREFUSED : 0;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = other.release();
  }
  return *this;
}

int Socket::release() {
  const int descriptor = descriptor_;
  descriptor_ = -1;
  return descriptor;
}

void Socket::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Socket listen_on(const std::string& address, int port) {
  std::string problem;
  Socket socket;
  if (names_loopback(address)) {
    const AddressList found = resolve(address, port, problem);
    for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
      socket = open_socket(each->ai_family);
      if (socket && is_loopback(each->ai_addr) && bind_and_listen(socket, each->ai_addr, each->ai_addrlen)) return socket;
      problem = std::strerror(errno);
    }
  } else {
    // IPv6 for both; IPv4 alone where the system has no IPv6.
    socket = open_socket(AF_INET6);
    sockaddr_in6 any6{};
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons(static_cast<uint16_t>(port));
    if (socket) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (socket && bind_and_listen(socket, reinterpret_cast<const sockaddr*>(&any6), sizeof any6)) return socket;
    if (!socket || errno == EADDRNOTAVAIL) {
      socket = open_socket(AF_INET);
      sockaddr_in any4{};
      any4.sin_family = AF_INET;
      any4.sin_port = any6.sin6_port;
      if (socket && bind_and_listen(socket, reinterpret_cast<const sockaddr*>(&any4), sizeof any4)) return socket;
    }
    problem = std::strerror(errno);
  }
  throw Error(fmt::format("rank 0 cannot listen at {} port {}: {} (MASTER_PORT names another port)", address, port, problem));
}

int port_of(const Socket& socket) {
  int listening = 0;
  socklen_t size = sizeof listening;
  sockaddr_storage own{};
  socklen_t own_size = sizeof own;
  if (getsockopt(socket.descriptor(), SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening == 0) return -1;
  if (getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&own), &own_size) != 0) return -1;
  if (own.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(own).sin_port);
  return own.ss_family == AF_INET6 ? ntohs(reinterpret_cast<const sockaddr_in6&>(own).sin6_port) : -1;
}

Socket accept_from(const Socket& listener) {
  Socket socket(accept4(listener.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

Socket connect_to(const std::string& address, int port, double deadline_s) {
  std::string problem;
  double pause_s = kFirstPause;
  do {
    const AddressList found = resolve(address, port, problem);
    for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
      Socket socket = open_socket(each->ai_family);
      const int error = socket ? try_connect(socket, *each, std::min(deadline_s, monotonic_s() + kAttemptSeconds)) : errno;
      if (error == 0) {
        set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
        return socket;
      }
      problem = std::strerror(error);
    }
    usleep(static_cast<useconds_t>(pause_s * 1e6));
    pause_s = std::min(2 * pause_s, kLongestPause);
  } while (monotonic_s() < deadline_s);
  throw Error(problem);
}

double monotonic_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

WakeEvent::WakeEvent() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  require(descriptor_ >= 0, "eventfd: ", std::strerror(errno));
}

WakeEvent::~WakeEvent() { ::close(descriptor_); }

void WakeEvent::set() { eventfd_write(descriptor_, 1); }

void WakeEvent::clear() {
  eventfd_t ignored;
  eventfd_read(descriptor_, &ignored);
}

}  // namespace speedrun
