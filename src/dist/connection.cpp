#include "src/dist/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

struct FrameHeader {
  uint32_t bytes;  // of the body
  uint16_t type;
  uint16_t more;  // 1: the message goes on in another frame of this type
};

constexpr size_t kReadBytes = 256 * 1024;
constexpr int kReadsPerPass = 16;  // so that one rank's long message does not keep the thread from the others

Bytes make_frame(MessageType type, const std::byte* body, size_t bytes, bool more) {
  const FrameHeader header{static_cast<uint32_t>(bytes), static_cast<uint16_t>(type), static_cast<uint16_t>(more)};
  Bytes frame(sizeof header + bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  if (bytes != 0) std::memcpy(frame.data() + sizeof header, body, bytes);
  return frame;
}

}  // namespace

Connection::Connection(Socket socket) : socket_(std::move(socket)), heard_s_(monotonic_s()), received_(kReadBytes) {}

void Connection::send(MessageType type, Bytes body) {
  require(body.size() <= kChunkBytes, "a message of ", body.size(), " bytes is too long to go first");
  urgent_.push_back(make_frame(type, body.data(), body.size(), false));
}

void Connection::send_in_order(MessageType type, std::shared_ptr<const Bytes> body) {
  in_order_.push_back({type, std::move(body), 0});
}

bool Connection::has_unsent() const {
  return !broken_ && !closed_ && (frame_sent_ < frame_.size() || !urgent_.empty() || !in_order_.empty());
}

bool Connection::next_frame() {
  frame_sent_ = 0;
  if (!urgent_.empty()) {
    frame_ = std::move(urgent_.front());
    urgent_.pop_front();
    return true;
  }
  if (in_order_.empty()) {
    frame_.clear();
    return false;
  }
  InOrder& message = in_order_.front();
  const size_t bytes = std::min(kChunkBytes, message.body->size() - message.sent);
  const bool more = message.sent + bytes < message.body->size();
  frame_ = make_frame(message.type, message.body->data() + message.sent, bytes, more);
  message.sent += bytes;
  if (!more) in_order_.pop_front();
  return true;
}

void Connection::write() {
  while (!broken_ && !closed_ && (frame_sent_ < frame_.size() || next_frame())) {
    const ssize_t sent = ::send(descriptor(), frame_.data() + frame_sent_, frame_.size() - frame_sent_, MSG_NOSIGNAL);
    if (sent > 0) {
      frame_sent_ += static_cast<size_t>(sent);
    } else if (errno != EINTR) {
      broken_ = errno != EAGAIN && errno != EWOULDBLOCK;
      return;
    }
  }
}

void Connection::finish_writing() { shutdown(descriptor(), SHUT_WR); }

void Connection::read(std::vector<Message>& messages) {
  for (int reads = 0; reads < kReadsPerPass && !closed_; ++reads) {
    const ssize_t got = recv(descriptor(), received_.data(), received_.size(), 0);
    const int error = errno;
    if (got > 0) {
      heard_s_ = monotonic_s();
      input_.insert(input_.end(), received_.begin(), received_.begin() + got);
      take_frames(messages);
    } else if (got < 0 && error == EINTR) {
      continue;
    } else {
      closed_ = got == 0 || (error != EAGAIN && error != EWOULDBLOCK);
      return;
    }
  }
}

void Connection::take_frames(std::vector<Message>& messages) {
  size_t position = 0;
  while (input_.size() - position >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, input_.data() + position, sizeof header);
    require(header.bytes <= kChunkBytes && header.type <= static_cast<uint16_t>(MessageType::farewell) && header.more <= 1,
            "what came is no message");
    if (input_.size() - position - sizeof header < header.bytes) break;
    const std::byte* body = input_.data() + position + sizeof header;
    const auto type = static_cast<MessageType>(header.type);
    position += sizeof header + header.bytes;
    if (type == MessageType::collective) {
      partial_.insert(partial_.end(), body, body + header.bytes);
      if (header.more == 0) messages.push_back({type, std::exchange(partial_, {})});
    } else {
      messages.push_back({type, Bytes(body, body + header.bytes)});
    }
  }
  input_.erase(input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(position));
}

}  // namespace speedrun
