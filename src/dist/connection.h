#pragma once
// Messages over one TCP connection. Long messages travel in chunks, and what cannot wait (heartbeats, failures) goes between two
// chunks. For one thread.
#include <deque>
#include <memory>
#include <vector>

#include "src/dist/message.h"
#include "src/dist/socket.h"

namespace speedrun {

class Connection {
 public:
  explicit Connection(Socket socket);

  void send(MessageType type, Bytes body = {});  // before what still waits of send_in_order()'s; at most kChunkBytes
  void send_in_order(MessageType type, std::shared_ptr<const Bytes> body);

  // As much as the socket takes now. A connection that breaks is not closed(): what the other side said before is still read.
  void write();
  bool has_unsent() const;

  // What has come, up to a few megabytes; whole messages are appended.
  void read(std::vector<Message>& messages);
  bool closed() const { return closed_; }      // the other side's end is gone, and all it said has been read
  double heard_s() const { return heard_s_; }  // monotonic_s() of the last sign of life
  void forgive_silence() { heard_s_ = monotonic_s(); }

  int descriptor() const { return socket_.descriptor(); }
  void finish_writing();  // the other side will read the end after what was sent

  static constexpr size_t kChunkBytes = 64 * 1024;

 private:
  struct InOrder {
    MessageType type;
    std::shared_ptr<const Bytes> body;
    size_t sent;  // bytes of the body already in frames
  };
  bool next_frame();
  void take_frames(std::vector<Message>& messages);

  Socket socket_;
  double heard_s_;
  bool closed_ = false, broken_ = false;
  std::deque<Bytes> urgent_;  // frames
  std::deque<InOrder> in_order_;
  Bytes frame_;  // on its way, up to frame_sent_
  size_t frame_sent_ = 0;
  Bytes received_;  // by one recv()
  Bytes input_;     // of frames not yet whole
  Bytes partial_;   // of a long message not yet whole
};

}  // namespace speedrun
