#pragma once
// The bytes of a checkpoint on their way to and from the file: several threads copy and hash them, in pieces and through buffers
// that are used again. One thread cannot keep up with a disk, let alone with the page cache.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "src/core/file.h"

namespace speedrun {

// Threads for so many bytes; 0: the caller's alone, for what one piece holds.
int write_threads(uint64_t bytes);
int read_threads(uint64_t bytes);

// A part of a section.
struct FilePiece {
  uint64_t offset = 0;        // in the file
  size_t bytes = 0;           // not 0
  HashBytes* hash = nullptr;  // of the section: pieces enter it in their order
};

// Lets pieces through in their order, whichever threads have them.
class Turnstile {
 public:
  // Calls pass() when it is number's turn, or not at all if all are let go.
  template <class Pass>
  void take_turn(std::mutex& mutex, uint64_t number, const Pass& pass) {
    {
      std::unique_lock lock(mutex);
      changed_.wait(lock, [&] { return next_ == number || let_go_; });
      if (let_go_) return;
    }
    pass();
    const std::lock_guard lock(mutex);
    ++next_;
    changed_.notify_all();
  }
  // With the mutex held: a piece has failed, or nobody wants the rest.
  void let_go() {
    let_go_ = true;
    changed_.notify_all();
  }

 private:
  std::condition_variable changed_;
  uint64_t next_ = 0;
  bool let_go_ = false;
};

// Writes pieces that one thread makes. What goes wrong in the others is thrown by space() or finish(): of the first piece, in
// their order, that something is wrong with.
class PieceWriter {
 public:
  using Check = std::function<void(std::span<const std::byte>)>;

  PieceWriter(AtomicFile& file, size_t largest_piece, int threads);
  ~PieceWriter();
  PieceWriter(const PieceWriter&) = delete;
  PieceWriter& operator=(const PieceWriter&) = delete;

  std::byte* space();  // for the largest piece; may wait until a buffer has been written
  // The bytes in the last space() are this piece. check, if any, throws what is wrong with them; it must live until finish().
  void put(const FilePiece& piece, const Check* check);
  void finish();  // all is written and hashed

 private:
  using Buffer = std::unique_ptr<std::byte[]>;
  struct Job {
    uint64_t number;
    FilePiece piece;
    const Check* check;
    Buffer buffer;
  };
  void work();
  void handle(Job& job);
  void wait_and_throw(std::unique_lock<std::mutex>& lock);

  AtomicFile& file_;
  size_t largest_piece_;
  size_t buffers_left_;  // to be allocated
  Buffer filling_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::vector<Buffer> free_;
  Turnstile turns_;
  uint64_t put_ = 0;
  size_t unfinished_ = 0;
  std::exception_ptr failure_;
  uint64_t failed_ = 0;  // number of its piece
  bool stop_ = false;
  std::vector<std::jthread> threads_;
};

// Reads pieces ahead of the one thread that uses them.
class PieceReader {
 public:
  PieceReader(const RandomAccessFile& file, std::vector<FilePiece> pieces, int threads);
  ~PieceReader();
  PieceReader(const PieceReader&) = delete;
  PieceReader& operator=(const PieceReader&) = delete;

  // The pieces in their order, each valid until the next call and in its section's hash; empty: it cannot be read.
  std::span<const std::byte> next();

 private:
  using Buffer = std::unique_ptr<std::byte[]>;
  struct Slot {
    Buffer buffer;
    bool done = false, good = false;
  };
  void read(size_t number);
  void work();

  const RandomAccessFile& file_;
  std::vector<FilePiece> pieces_;
  std::vector<Slot> slots_;  // of piece i: i modulo their number
  std::mutex mutex_;
  std::condition_variable changed_;
  Turnstile turns_;
  size_t claimed_ = 0, used_ = 0;  // pieces
  bool stop_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace speedrun
