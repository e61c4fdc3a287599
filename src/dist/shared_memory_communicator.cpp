// Work      an operation goes in chunks: every rank copies its part into its buffer, a barrier, every rank reads the others'.
//           An all-reduce sums in between, a share of the chunk each, and has a second barrier.
// Buffers   two for each rank, used in turn: who writes a buffer again has passed the barrier of the chunk between, which nobody
//           enters before it has read the chunk before. So one barrier a chunk is enough.
// Waiting   spins shortly, then sleeps in the kernel (futex): there may be more ranks than cores.
#include "src/dist/shared_memory_communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <random>

#include "fmt/format.h"

namespace speedrun {
namespace {

constexpr size_t kCacheLine = 64;

// Lies in memory that several processes map, so its atomics must not be locks of one process.
class Barrier {
 public:
  void wait(int ranks) {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(ranks)) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
      futex(FUTEX_WAKE, INT_MAX);
      return;
    }
    constexpr int kSpins = 200;  // a few microseconds: less than it costs to sleep and be woken
    for (int i = 0; i < kSpins; ++i) {
      if (generation_.load(std::memory_order_acquire) != generation) return;
    }
    // Returns at once if the generation has changed; woken without a reason it looks again.
    while (generation_.load(std::memory_order_acquire) == generation) futex(FUTEX_WAIT, generation);
  }

 private:
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

  void futex(int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&generation_), operation, value, nullptr, nullptr, 0);
  }

  alignas(kCacheLine) std::atomic<uint32_t> arrived_ = 0;
  alignas(kCacheLine) std::atomic<uint32_t> generation_ = 0;
};

// What a rank is about to do; compared at the first barrier of every operation.
struct Call {
  enum class Kind : int32_t { all_reduce, reduce_scatter, all_gather, broadcast, all_to_all };
  Kind kind;
  CommType type;
  int64_t count;
  int64_t root;

  bool operator==(const Call&) const = default;
};

std::string describe(const Call& call) {
  static constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"};
  const std::string root = call.kind == Call::Kind::broadcast ? fmt::format(" from rank {}", call.root) : "";
  return fmt::format("{} of {} {}{}", kNames[static_cast<int>(call.kind)], call.count, comm_type_name(call.type), root);
}

// One rank's part of the segment; `calls` and `chunks` are used in turn.
struct Slot {
  alignas(kCacheLine) Call calls[2];
  alignas(kCacheLine) std::byte chunks[2][kSharedMemoryChunk];
};

// The slots of the ranks follow it.
struct Segment {
  Barrier barrier;

  Slot& slot(int rank) { return reinterpret_cast<Slot*>(this + 1)[rank]; }
  static size_t bytes(int ranks) { return sizeof(Segment) + sizeof(Slot) * static_cast<size_t>(ranks); }
};
static_assert(sizeof(Segment) % alignof(Slot) == 0);

// A named segment of shared memory, open in this process.
class SharedFile {
 public:
  SharedFile(const std::string& name, int flags) : name_(name), file_(shm_open(name.c_str(), flags, S_IRUSR | S_IWUSR)) {
    if (file_ < 0) fail("opening it", errno);
  }
  ~SharedFile() { close(file_); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  // Without it a full file system would show as a bus error at the first use of a page.
  void allocate(size_t bytes) {
    if (const int status = posix_fallocate(file_, 0, static_cast<off_t>(bytes)); status != 0)
      fail(fmt::format("{} bytes; make /dev/shm larger (docker: --shm-size)", bytes), status);
  }
  // The pages are zeros, which is a barrier that nobody has reached.
  Segment* map(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) fail(fmt::format("mapping {} bytes", bytes), errno);
    return static_cast<Segment*>(memory);
  }

 private:
  [[noreturn]] void fail(const std::string& what, int cause) const {
    throw Error(fmt::format("shared memory of the ranks, /dev/shm{}: {}: {}", name_, what, std::strerror(cause)));
  }

  std::string name_;
  int file_;
};

// Rank 0 makes the segment and tells the others its name, which is gone as soon as everybody has mapped it: nothing is left behind,
// however the processes end later.
Segment* share_segment(Control& control, size_t bytes) {
  if (control.rank() != 0) {
    const std::vector<std::byte> name = control.broadcast({});
    SharedFile file(std::string(reinterpret_cast<const char*>(name.data()), name.size()), O_RDWR);
    Segment* segment = file.map(bytes);
    control.barrier();
    return segment;
  }
  const std::string name = fmt::format("/speedrun-{}-{:08x}", getpid(), std::random_device{}());
  SharedFile file(name, O_CREAT | O_EXCL | O_RDWR);
  const struct Unlink {
    const std::string& name;
    ~Unlink() { shm_unlink(name.c_str()); }
  } unlink{name};
  file.allocate(bytes);
  Segment* segment = file.map(bytes);
  const auto text = reinterpret_cast<const std::byte*>(name.data());
  control.broadcast({text, text + name.size()});
  control.barrier();
  return segment;
}

class SharedMemoryCommunicator : public Communicator {
 public:
  explicit SharedMemoryCommunicator(Control& control)
      : control_(control),
        rank_(control.rank()),
        size_(control.size()),
        segment_(share_segment(control, Segment::bytes(control.size()))) {}
  ~SharedMemoryCommunicator() override { munmap(segment_, Segment::bytes(size_)); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string describe() const override { return fmt::format("shared memory, {} ranks", size_); }
  std::string error() override { return {}; }

 protected:
  void do_all_reduce(void* data, int64_t count, CommType type, ReduceOp) override {
    begin({Call::Kind::all_reduce, type, count, 0});
    const int64_t chunk = elements(type);
    for (int64_t done = 0; done < count; done += chunk) {
      const int64_t n = std::min(chunk, count - done);
      std::byte* part = at(data, done, type);
      std::memcpy(buffer(rank_), part, bytes(n, type));
      barrier();
      // The sum of this rank's share takes the share's place in its own buffer: nobody else reads it there before the barrier.
      const int64_t share_begin = share(n, rank_), share_end = share(n, rank_ + 1);
      reduce(at(buffer(rank_), share_begin, type), share_begin, share_end - share_begin, type);
      barrier();
      for (int r = 0; r < size_; ++r) {
        const int64_t begin = share(n, r);
        std::memcpy(at(part, begin, type), at(buffer(r), begin, type), bytes(share(n, r + 1) - begin, type));
      }
      next_chunk();
    }
  }

  void do_reduce_scatter(void* data, int64_t count, CommType type) override {
    begin({Call::Kind::reduce_scatter, type, count, 0});
    in_pieces(count, type, [&](int64_t done, int64_t piece, int64_t n) {
      for (int r = 0; r < size_; ++r)
        std::memcpy(at(buffer(rank_), r * piece, type), at(data, r * count + done, type), bytes(n, type));
      barrier();
      reduce(at(data, rank_ * count + done, type), rank_ * piece, n, type);
    });
  }

  void do_all_gather(void* data, int64_t count, CommType type) override {
    begin({Call::Kind::all_gather, type, count, 0});
    const int64_t chunk = elements(type);
    for (int64_t done = 0; done < count; done += chunk) {
      const size_t n = bytes(std::min(chunk, count - done), type);
      std::memcpy(buffer(rank_), at(data, rank_ * count + done, type), n);
      barrier();
      for (int r = 0; r < size_; ++r) {
        if (r != rank_) std::memcpy(at(data, r * count + done, type), buffer(r), n);
      }
      next_chunk();
    }
  }

  void do_broadcast(void* data, int64_t count, CommType type, int root) override {
    begin({Call::Kind::broadcast, type, count, root});
    const int64_t chunk = elements(type);
    for (int64_t done = 0; done < count; done += chunk) {
      const size_t n = bytes(std::min(chunk, count - done), type);
      if (rank_ == root) std::memcpy(buffer(root), at(data, done, type), n);
      barrier();
      if (rank_ != root) std::memcpy(at(data, done, type), buffer(root), n);
      next_chunk();
    }
  }

  void do_all_to_all(const void* send, void* recv, int64_t count, CommType type) override {
    begin({Call::Kind::all_to_all, type, count, 0});
    in_pieces(count, type, [&](int64_t done, int64_t piece, int64_t n) {
      for (int r = 0; r < size_; ++r)
        std::memcpy(at(buffer(rank_), r * piece, type), at(send, r * count + done, type), bytes(n, type));
      barrier();
      for (int r = 0; r < size_; ++r)
        std::memcpy(at(recv, r * count + done, type), at(buffer(r), rank_ * piece, type), bytes(n, type));
    });
  }

 private:
  static size_t bytes(int64_t count, CommType type) { return static_cast<size_t>(count) * comm_type_size(type); }
  static std::byte* at(void* data, int64_t index, CommType type) { return static_cast<std::byte*>(data) + bytes(index, type); }
  static const std::byte* at(const void* data, int64_t index, CommType type) {
    return static_cast<const std::byte*>(data) + bytes(index, type);
  }
  static int64_t elements(CommType type) { return static_cast<int64_t>(kSharedMemoryChunk / comm_type_size(type)); }
  int64_t share(int64_t n, int rank) const { return n * rank / size_; }

  std::byte* buffer(int rank) { return segment_->slot(rank).chunks[turn_]; }
  void next_chunk() { turn_ ^= 1; }

  void begin(const Call& call) {
    segment_->slot(rank_).calls[turn_] = call;
    compare_ = true;
  }

  void barrier() {
    {
      const OutsideWait waiting(control_);
      segment_->barrier.wait(size_);
    }
    if (!compare_) return;
    compare_ = false;
    // Every rank compares all with rank 0's, so that all come to the same verdict.
    const Call& first = segment_->slot(0).calls[turn_];
    for (int r = 1; r < size_; ++r) {
      if (const Call& other = segment_->slot(r).calls[turn_]; !(other == first))
        throw Error(fmt::format("ranks disagree: rank 0 calls {}, rank {} calls {}", speedrun::describe(first), r,
                                speedrun::describe(other)));
    }
  }

  // body(done, piece, n) for operations whose data are size() slices: elements done … done + n of every slice, slice r's in the
  // buffer from r·piece on.
  template <class Body>
  void in_pieces(int64_t count, CommType type, const Body& body) {
    const int64_t piece = elements(type) / size_;
    for (int64_t done = 0; done < count; done += piece) {
      body(done, piece, std::min(piece, count - done));
      next_chunk();
    }
  }

  // out[i] = the sum (u32: the maximum) over the ranks of their buffers' element begin + i.
  void reduce(std::byte* out, int64_t begin, int64_t n, CommType type) {
    const auto add = [](auto a, auto b) { return a + b; };
    if (type == CommType::f32) reduce_as<float, float>(out, begin, n, add);
    if (type == CommType::f64) reduce_as<double, double>(out, begin, n, add);
    if (type == CommType::bf16) reduce_as<bf16, float>(out, begin, n, add);
    if (type == CommType::u32) reduce_as<uint32_t, uint32_t>(out, begin, n, [](uint32_t a, uint32_t b) { return std::max(a, b); });
  }

  template <class T, class Sum, class Combine>
  void reduce_as(std::byte* out_bytes, int64_t begin, int64_t n, const Combine& combine) {
    constexpr int64_t kTile = 1024;
    Sum sums[kTile];
    for (int64_t first = 0; first < n; first += kTile) {
      const int64_t count = std::min(kTile, n - first);
      for (int r = 0; r < size_; ++r) {
        const T* values = reinterpret_cast<const T*>(buffer(r)) + begin + first;
        if (r == 0) {
          for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Sum>(values[i]);
        } else {
          for (int64_t i = 0; i < count; ++i) sums[i] = combine(sums[i], static_cast<Sum>(values[i]));
        }
      }
      T* out = reinterpret_cast<T*>(out_bytes) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(sums[i]);
    }
  }

  Control& control_;
  int rank_, size_;
  int turn_ = 0;  // which of the two buffers
  bool compare_ = false;
  Segment* segment_;
};

}  // namespace

std::unique_ptr<Communicator> make_shared_memory_communicator(Control& control) {
  const World& world = control.world();
  if (world.local_size != world.size) {
    throw InputError(
        fmt::format("CPU ranks talk through the shared memory of one host, but only {} of {} ranks are on rank {}'s: start "
                    "them all on one host, or use GPUs (train.device=cuda)",
                    world.local_size, world.size, world.rank));
  }
  return std::make_unique<SharedMemoryCommunicator>(control);
}

}  // namespace speedrun
