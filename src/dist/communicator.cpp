#include "src/dist/communicator.h"

#include "fmt/format.h"
#include "src/dist/shared_memory_communicator.h"
#if SPEEDRUN_HAS_NCCL
#include "src/dist/nccl_communicator.h"
#endif

namespace speedrun {
namespace {

class OneRank : public Communicator {
 public:
  explicit OneRank(Device& device) : device_(device) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string describe() const override { return "one rank"; }
  std::string error() override { return {}; }

 protected:
  void do_all_reduce(void*, int64_t, CommType, ReduceOp) override {}
  void do_reduce_scatter(void*, int64_t, CommType) override {}
  void do_all_gather(void*, int64_t, CommType) override {}
  void do_broadcast(void*, int64_t, CommType, int) override {}
  void do_all_to_all(const void* send, void* recv, int64_t count, CommType type) override {
    device_.copy(recv, send, static_cast<size_t>(count) * comm_type_size(type));
  }

 private:
  Device& device_;
};

bool sums(CommType type) { return type == CommType::f32 || type == CommType::f64 || type == CommType::bf16; }

}  // namespace

size_t comm_type_size(CommType type) {
  switch (type) {
    case CommType::f64:
      return 8;
    case CommType::bf16:
      return 2;
    case CommType::bytes:
      return 1;
    case CommType::f32:
    case CommType::u32:
      break;
  }
  return 4;
}

const char* comm_type_name(CommType type) {
  switch (type) {
    case CommType::f32:
      return "f32";
    case CommType::f64:
      return "f64";
    case CommType::bf16:
      return "bf16";
    case CommType::u32:
      return "u32";
    case CommType::bytes:
      break;
  }
  return "bytes";
}

// False: nothing to do.
bool Communicator::checked(const char* what, int64_t count) const {
  require(forked_, what, ": called outside fork() and join()");
  require(count >= 0, what, ": count = ", count);
  return count > 0;
}

void Communicator::all_reduce(void* data, int64_t count, CommType type, ReduceOp op) {
  require(op == ReduceOp::sum ? sums(type) : type == CommType::u32, "all_reduce: no ", op == ReduceOp::sum ? "sum" : "maximum",
          " of ", comm_type_name(type), " (sums: f32, f64, bf16; maxima: u32)");
  if (checked("all_reduce", count)) do_all_reduce(data, count, type, op);
}

void Communicator::reduce_scatter(void* data, int64_t count, CommType type) {
  require(sums(type), "reduce_scatter: no sum of ", comm_type_name(type), " (sums: f32, f64, bf16)");
  if (checked("reduce_scatter", count)) do_reduce_scatter(data, count, type);
}

void Communicator::all_gather(void* data, int64_t count, CommType type) {
  if (checked("all_gather", count)) do_all_gather(data, count, type);
}

void Communicator::broadcast(void* data, int64_t count, CommType type, int root) {
  require(root >= 0 && root < size(), "broadcast: root = ", root, " of ", size(), " ranks");
  if (checked("broadcast", count)) do_broadcast(data, count, type, root);
}

void Communicator::all_to_all(const void* send, void* recv, int64_t count, CommType type) {
  if (checked("all_to_all", count)) do_all_to_all(send, recv, count, type);
}

void Communicator::group_start() {
  require(forked_ && !grouped_, "group_start: called ", grouped_ ? "in a group" : "outside fork() and join()");
  grouped_ = true;
  do_group_start();
}

void Communicator::group_end() {
  require(grouped_, "group_end: there was no group_start");
  grouped_ = false;
  do_group_end();
}

void Communicator::fork() {
  require(!grouped_, "fork: called in a group");
  forked_ = true;
  do_fork();
}

void Communicator::join() {
  require(forked_ && !grouped_, "join: called ", grouped_ ? "in a group" : "without fork()");
  forked_ = false;
  do_join();
}

std::unique_ptr<Communicator> make_communicator(Control& control, Device& device, [[maybe_unused]] bool ranks_share_gpu) {
  if (control.size() == 1) return std::make_unique<OneRank>(device);
#if SPEEDRUN_HAS_NCCL
  if (device.is_cuda()) return make_nccl_communicator(control, device, ranks_share_gpu);
#endif
  if (device.is_cuda())
    throw InputError(
        "this program was built without NCCL and runs on one GPU: install libnccl-dev and build again, or leave out --gpus");
  return make_shared_memory_communicator(control);
}

}  // namespace speedrun
