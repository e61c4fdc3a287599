#include "src/dist/nccl_communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "fmt/format.h"
#include "kernels/base/cuda_check.h"
#include "src/dist/nccl_library.h"

namespace speedrun {
namespace {

using kernels::cuda_check;

// NCCL reads its environment when it is first used.
void set_environment(int rank, bool ranks_share_gpu) {
  // NVLink's multicast (NVLS) is off unless the user asks for it: where drivers and fabric manager are not set up for it connecting
  // the ranks fails, and measured times are without it.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (!ranks_share_gpu) return;
  // NCCL refuses two ranks on one GPU of one host. Ranks that name different hosts are not compared, and talk over the network.
  setenv("NCCL_HOSTID", fmt::format("speedrun-rank-{}", rank).c_str(), 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
}

ncclDataType_t nccl_type(CommType type) {
  switch (type) {
    case CommType::f32:
      return ncclFloat32;
    case CommType::f64:
      return ncclFloat64;
    case CommType::bf16:
      return ncclBfloat16;
    case CommType::u32:
      return ncclUint32;
    case CommType::bytes:
      break;
  }
  return ncclUint8;
}

struct StreamDeleter {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
struct EventDeleter {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using StreamOwner = std::unique_ptr<CUstream_st, StreamDeleter>;
using EventOwner = std::unique_ptr<CUevent_st, EventDeleter>;

// High priority: a collective that waits for free multiprocessors makes all ranks wait.
StreamOwner make_stream() {
  int lowest = 0, highest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "NCCL: stream priorities");
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "NCCL: stream creation");
  return StreamOwner(stream);
}

EventOwner make_event() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "NCCL: event creation");
  return EventOwner(event);
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(Control& control, Device& device, bool ranks_share_gpu)
      : rank_(control.rank()),
        size_(control.size()),
        ranks_share_gpu_(ranks_share_gpu),
        device_stream_(device.cuda_exec().stream),
        stream_(make_stream()),
        fork_event_(make_event()),
        join_event_(make_event()),
        exceptions_(std::uncaught_exceptions()) {
    set_environment(rank_, ranks_share_gpu);
    nccl_ = open_nccl();
    ncclUniqueId id{};
    std::vector<std::byte> message(sizeof id);
    if (rank_ == 0) {
      check(nccl_.get_unique_id(&id), "making the ranks' id");
      std::memcpy(message.data(), &id, sizeof id);
    }
    message = control.broadcast(std::move(message));
    require(message.size() == sizeof id, "NCCL: the ranks' id has ", message.size(), " bytes, expected ", sizeof id);
    std::memcpy(&id, message.data(), sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    check(nccl_.comm_init_rank_config(&comm_, size_, id, rank_, &config), "connecting the ranks");
  }

  // After an error the other ranks may never make the calls that those still on the stream wait for, and every call that waits for
  // the GPU would wait with them: then nothing is torn down, as the process is about to end.
  ~NcclCommunicator() override {
    const bool good = std::uncaught_exceptions() <= exceptions_ && error().empty();
    if (good && cudaStreamSynchronize(stream_.get()) == cudaSuccess) {
      nccl_.comm_destroy(comm_);
    } else {
      stream_.release();
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string describe() const override {
    return fmt::format("NCCL {}, {} ranks{}", nccl_.version(), size_,
                       ranks_share_gpu_ ? " (they share a GPU and talk over loopback, for tests: times mean nothing)" : "");
  }

  std::string error() override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &state);
    if (asked != ncclSuccess) state = asked;
    return state == ncclSuccess || state == ncclInProgress ? "" : "NCCL: " + text(state);
  }

 protected:
  void do_all_reduce(void* data, int64_t count, CommType type, ReduceOp op) override {
    const ncclRedOp_t nccl_op = op == ReduceOp::sum ? ncclSum : ncclMax;
    check(nccl_.all_reduce(data, data, static_cast<size_t>(count), nccl_type(type), nccl_op, comm_, stream_.get()), "all_reduce",
          count, type);
  }
  void do_reduce_scatter(void* data, int64_t count, CommType type) override {
    check(nccl_.reduce_scatter(data, slice(data, rank_, count, type), static_cast<size_t>(count), nccl_type(type), ncclSum, comm_,
                               stream_.get()),
          "reduce_scatter", count, type);
  }
  void do_all_gather(void* data, int64_t count, CommType type) override {
    check(
        nccl_.all_gather(slice(data, rank_, count, type), data, static_cast<size_t>(count), nccl_type(type), comm_, stream_.get()),
        "all_gather", count, type);
  }
  void do_broadcast(void* data, int64_t count, CommType type, int root) override {
    check(nccl_.broadcast(data, data, static_cast<size_t>(count), nccl_type(type), root, comm_, stream_.get()), "broadcast", count,
          type);
  }
  void do_all_to_all(const void* send, void* recv, int64_t count, CommType type) override {
    const auto from = static_cast<const std::byte*>(send);
    const size_t bytes = static_cast<size_t>(count) * comm_type_size(type);
    check(nccl_.group_start(), "all_to_all", count, type);
    for (int r = 0; r < size_; ++r) {
      check(nccl_.send(from + r * bytes, bytes, ncclUint8, r, comm_, stream_.get()), "all_to_all", count, type);
      check(nccl_.recv(slice(recv, r, count, type), bytes, ncclUint8, r, comm_, stream_.get()), "all_to_all", count, type);
    }
    check(nccl_.group_end(), "all_to_all", count, type);
  }
  void do_group_start() override { check(nccl_.group_start(), "beginning a group"); }
  void do_group_end() override { check(nccl_.group_end(), "ending a group"); }

  // In a capture of the device's stream these become edges of the graph, and the collectives its nodes.
  void do_fork() override {
    cuda_check(cudaEventRecord(fork_event_.get(), device_stream_), "NCCL: fork");
    cuda_check(cudaStreamWaitEvent(stream_.get(), fork_event_.get(), 0), "NCCL: fork");
  }
  void do_join() override {
    cuda_check(cudaEventRecord(join_event_.get(), stream_.get()), "NCCL: join");
    cuda_check(cudaStreamWaitEvent(device_stream_, join_event_.get(), 0), "NCCL: join");
  }

 private:
  static void* slice(void* data, int rank, int64_t count, CommType type) {
    return static_cast<std::byte*>(data) + static_cast<size_t>(rank * count) * comm_type_size(type);
  }

  // NCCL's words for a status and, where it has them, for its cause; one line.
  std::string text(ncclResult_t status) const {
    std::string line = nccl_.get_error_string(status);
    if (const char* cause = nccl_.get_last_error(comm_); cause != nullptr && *cause != '\0') line += std::string(": ") + cause;
    while (!line.empty() && line.back() == '\n') line.pop_back();
    std::replace(line.begin(), line.end(), '\n', ' ');
    return line;
  }
  void check(ncclResult_t status, const char* what) const {
    if (status != ncclSuccess) throw Error(fmt::format("NCCL: {} failed on rank {} of {}: {}", what, rank_, size_, text(status)));
  }
  void check(ncclResult_t status, const char* op, int64_t count, CommType type) const {
    if (status != ncclSuccess) check(status, fmt::format("{} of {} {}", op, count, comm_type_name(type)).c_str());
  }

  int rank_, size_;
  bool ranks_share_gpu_;
  cudaStream_t device_stream_;
  StreamOwner stream_;
  EventOwner fork_event_, join_event_;
  int exceptions_;  // in flight when this was made
  NcclLibrary nccl_{};
  ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Control& control, Device& device, bool ranks_share_gpu) {
  return std::make_unique<NcclCommunicator>(control, device, ranks_share_gpu);
}

}  // namespace speedrun
