#pragma once
// What ranks tell each other: a type and a body of bytes. Numbers travel in the byte order of the host; all ranks have the same.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace speedrun {

using Bytes = std::vector<std::byte>;

enum class MessageType : uint16_t {
  hello,          // to the hub, the first word of a connection: Hello
  refusal,        // to a newcomer: why it may not take part
  greeting,       // to a newcomer that is welcome: the hub's ProcessId
  complete,       // all ranks have come
  heartbeat,      // nothing but a sign of life
  collective,     // a part of barrier, broadcast or gather
  stop_request,   // to the hub: a signal
  stop_decision,  // the step after which all stop, the signal
  stop_known,     // to the hub: this rank has noted the decision
  failure,        // to the hub: exit code, message
  failure_known,  // to the rank that told the failure: every rank has been told
  abort,          // end yourself now: exit code, whom to kill
  goodbye,        // to the hub: nothing more will come
  farewell,       // all ranks have said goodbye
};

struct Message {
  MessageType type;
  Bytes body;
};

// Puts a body together.
class MessageWriter {
 public:
  template <class Number>
  MessageWriter& number(Number value) {
    append(&value, sizeof value);
    return *this;
  }
  MessageWriter& text(const std::string& text);
  Bytes take() { return std::move(body_); }

 private:
  void append(const void* data, size_t bytes);
  Bytes body_;
};

// Takes a body apart; throws Error where it ends too early.
class MessageReader {
 public:
  explicit MessageReader(const Bytes& body) : body_(body) {}
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, next(sizeof value), sizeof value);
    return value;
  }
  std::string text();

 private:
  const std::byte* next(size_t bytes);
  const Bytes& body_;
  size_t position_ = 0;
};

}  // namespace speedrun
