#include "src/train/checkpoint_io.h"

#include <algorithm>
#include <utility>

#include "src/train/state_entry.h"

namespace speedrun {
namespace {

// More gain nothing: file systems let one thread at a time write to a file, while another hashes. Many may read, until the hash,
// which goes through one thread at a time, is the limit.
constexpr int kMostWriters = 2, kMostReaders = 4;

int threads_for(uint64_t bytes, int most) {
  if (bytes <= kPieceBytes) return 0;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, most);
}

// Each thread has one, and there is one to be filled or used and one between.
size_t buffers_for(int threads) { return threads == 0 ? 1 : static_cast<size_t>(threads) + 2; }

std::unique_ptr<std::byte[]> make_buffer(size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

}  // namespace

int write_threads(uint64_t bytes) { return threads_for(bytes, kMostWriters); }
int read_threads(uint64_t bytes) { return threads_for(bytes, kMostReaders); }

PieceWriter::PieceWriter(AtomicFile& file, size_t largest_piece, int threads)
    : file_(file), largest_piece_(largest_piece), buffers_left_(buffers_for(threads)) {
  for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { work(); });
}

PieceWriter::~PieceWriter() {
  const std::lock_guard lock(mutex_);
  stop_ = true;
  turns_.let_go();
  changed_.notify_all();
}

std::byte* PieceWriter::space() {
  if (filling_) return filling_.get();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || !free_.empty() || buffers_left_ > 0; });
  if (failure_) wait_and_throw(lock);
  if (!free_.empty()) {
    filling_ = std::move(free_.back());
    free_.pop_back();
  } else {
    --buffers_left_;
    filling_ = make_buffer(largest_piece_);
  }
  return filling_.get();
}

void PieceWriter::put(const FilePiece& piece, const Check* check) {
  Job job{put_++, piece, check, std::move(filling_)};
  if (threads_.empty()) {
    handle(job);
    if (failure_) std::rethrow_exception(failure_);
    return;
  }
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  ++unfinished_;
  changed_.notify_all();
}

void PieceWriter::finish() {
  std::unique_lock lock(mutex_);
  wait_and_throw(lock);
}

void PieceWriter::wait_and_throw(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return unfinished_ == 0; });
  if (failure_) std::rethrow_exception(failure_);
}

// Jobs are taken in their order, so every piece before a failed one is being handled or has been.
void PieceWriter::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    const bool in_vain = failure_ != nullptr;
    lock.unlock();
    if (!in_vain) handle(job);
    lock.lock();
    if (job.buffer) free_.push_back(std::move(job.buffer));
    --unfinished_;
    changed_.notify_all();
  }
}

void PieceWriter::handle(Job& job) {
  const FilePiece& piece = job.piece;
  const std::byte* data = job.buffer.get();
  try {
    if (job.check != nullptr) (*job.check)({data, piece.bytes});
    file_.write_at(piece.offset, data, piece.bytes);
    file_.begin_flush(piece.offset, piece.bytes);
    turns_.take_turn(mutex_, job.number, [&] { piece.hash->add(data, piece.bytes); });
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_ || job.number < failed_) {
      failure_ = std::current_exception();
      failed_ = job.number;
    }
    turns_.let_go();
  }
  if (threads_.empty()) filling_ = std::move(job.buffer);
}

PieceReader::PieceReader(const RandomAccessFile& file, std::vector<FilePiece> pieces, int threads)
    : file_(file), pieces_(std::move(pieces)), slots_(buffers_for(threads)) {
  size_t largest = 1;
  for (const FilePiece& piece : pieces_) largest = std::max(largest, piece.bytes);
  for (Slot& slot : slots_) slot.buffer = make_buffer(largest);
  for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { work(); });
}

PieceReader::~PieceReader() {
  const std::lock_guard lock(mutex_);
  stop_ = true;
  turns_.let_go();
  changed_.notify_all();
}

std::span<const std::byte> PieceReader::next() {
  std::unique_lock lock(mutex_);
  const size_t number = used_++;
  changed_.notify_all();  // the buffer of the piece before is free
  if (threads_.empty()) {
    lock.unlock();
    read(number);
    lock.lock();
  }
  Slot& slot = slots_[number % slots_.size()];
  changed_.wait(lock, [&] { return slot.done; });
  slot.done = false;
  if (!slot.good) return {};
  return {slot.buffer.get(), pieces_[number].bytes};
}

void PieceReader::read(size_t number) {
  const FilePiece& piece = pieces_[number];
  Slot& slot = slots_[number % slots_.size()];
  slot.good = file_.read_at(piece.offset, slot.buffer.get(), piece.bytes);
  if (slot.good) turns_.take_turn(mutex_, number, [&] { piece.hash->add(slot.buffer.get(), piece.bytes); });
  const std::lock_guard lock(mutex_);
  if (!slot.good) turns_.let_go();
  slot.done = true;
  changed_.notify_all();
}

void PieceReader::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      const size_t in_use = used_ == 0 ? 0 : used_ - 1;  // the oldest piece whose buffer is not to be touched
      return stop_ || claimed_ == pieces_.size() || claimed_ < in_use + slots_.size();
    });
    if (stop_ || claimed_ == pieces_.size()) return;
    const size_t number = claimed_++;
    lock.unlock();
    read(number);
    lock.lock();
  }
}

}  // namespace speedrun
