#pragma once
// Collective operations on device memory, issued in order to a queue and capturable like any other work of a step: NCCL between
// GPUs, shared memory between CPU processes. Sums are made in the order of the ranks (CPU) or as NCCL's algorithm orders them, the
// same in every run. All ranks make the same calls in the same order.
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "src/core/device.h"
#include "src/dist/control.h"

namespace speedrun {

enum class ReduceOp { sum, max };                    // sum: f32, f64, bf16; max: u32
enum class CommType { f32, f64, bf16, u32, bytes };  // u32 and bytes are not summed

template <class T>
constexpr CommType comm_type() {
  if constexpr (std::is_same_v<T, float>) return CommType::f32;
  if constexpr (std::is_same_v<T, double>) return CommType::f64;
  if constexpr (std::is_same_v<T, bf16>) return CommType::bf16;
  if constexpr (std::is_same_v<T, uint32_t>) return CommType::u32;
  if constexpr (std::is_same_v<T, uint8_t>) return CommType::bytes;
}
size_t comm_type_size(CommType type);  // bytes of one element
const char* comm_type_name(CommType type);

// A call that no rank could mean (an operation outside fork() … join(), a sum of u32) throws Error on every device and for any
// number of ranks, so that runs of one CPU process find it.
class Communicator {
 public:
  // Graphs that hold its operations go first (NCCL waits for that), their memory goes last: freeing it waits for operations under
  // way, which only this ends when another rank will never take part in them.
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string describe() const = 0;  // for the log: "NCCL 2.28.3, 2 ranks", "shared memory, 4 ranks"

  // In place. `data` holds size() slices of `count` elements; that of all_reduce and broadcast holds `count` in all.
  void all_reduce(void* data, int64_t count, CommType type, ReduceOp op);
  void reduce_scatter(void* data, int64_t count, CommType type);  // slice rank() becomes the sum; others undefined
  void all_gather(void* data, int64_t count, CommType type);      // every slice from its rank
  void broadcast(void* data, int64_t count, CommType type, int root);

  // Both hold size() slices of `count` elements and do not overlap: slice p of `send` goes to rank p, slice p of `recv` comes from
  // it.
  void all_to_all(const void* send, void* recv, int64_t count, CommType type);

  // Several of the calls above as one launch (NCCL's groups); may not nest.
  void group_start();
  void group_end();

  // The operations run on a queue beside the device's: after fork() they may start once everything issued to the device's queue so
  // far is done, and join() makes what is issued to the device's queue later wait for all of them. Both are asynchronous and
  // capturable; fork() may be called again before join(). On the CPU everything happens at once.
  void fork();
  void join();

  // An asynchronous error of the transport as one line; empty: none. Cheap; any thread.
  virtual std::string error() = 0;

 protected:
  // What the calls above come to once they are checked: count > 0, in a fork.
  virtual void do_all_reduce(void* data, int64_t count, CommType type, ReduceOp op) = 0;
  virtual void do_reduce_scatter(void* data, int64_t count, CommType type) = 0;
  virtual void do_all_gather(void* data, int64_t count, CommType type) = 0;
  virtual void do_broadcast(void* data, int64_t count, CommType type, int root) = 0;
  virtual void do_all_to_all(const void* send, void* recv, int64_t count, CommType type) = 0;
  virtual void do_group_start() {}
  virtual void do_group_end() {}
  virtual void do_fork() {}
  virtual void do_join() {}

 private:
  bool checked(const char* what, int64_t count) const;

  bool forked_ = false, grouped_ = false;
};

// One rank: operations that do nothing (all_to_all copies). CUDA device: NCCL (libnccl.so.2 is opened at run time; throws
// InputError with the way out if there is none). CPU device: shared memory of one host; throws InputError if the ranks are on
// several. `ranks_share_gpu`: several ranks on each GPU, for tests: NCCL is told that each is a host of its own and runs over the
// loopback interface.
std::unique_ptr<Communicator> make_communicator(Control& control, Device& device, bool ranks_share_gpu);

}  // namespace speedrun
