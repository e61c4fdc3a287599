#pragma once
// A run's state as whole tensors in host memory, whatever part of it each rank has on its device.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/core/device.h"
#include "src/core/host_staging.h"
#include "src/core/state_tensor.h"
#include "src/dist/control.h"
#include "src/train/state_entry.h"

namespace speedrun {

class CollectedState {
 public:
  // control: null with one rank
  CollectedState(Device& device, Control* control) : device_(device), control_(control), staging_(device) {}

  // What a rank has of a tensor: `count` elements, read by `read` from element `first` of them on.
  struct Share {
    StateTensor::Held held;
    DType dtype;
    int64_t count;
    std::function<void(int64_t first, int64_t n, std::byte* to)> read;
  };

  // Made whole on rank 0, for its sink, in pieces of at most kPieceBytes; nothing on the others. With several ranks all of them
  // call it, in the same order.
  void read(const Share& share, PieceSink& sink);
  void read(const StateTensor& tensor, PieceSink& sink);

  // This rank's share of a piece of the whole tensor, from byte `begin` on, to the device; synchronous.
  void write(const StateTensor& tensor, size_t begin, std::span<const std::byte> piece);

  HostStaging& staging() { return staging_; }

 private:
  int rank() const { return control_ == nullptr ? 0 : control_->rank(); }
  std::vector<int64_t> counts_of_ranks(int64_t count);
  std::vector<std::vector<std::byte>> exchange(const Share& share, bool sends, int64_t first, int64_t n);

  Device& device_;
  Control* control_;
  HostStaging staging_;
  std::vector<std::byte> message_;  // used again
  int64_t exchanges_ = 0;
};

}  // namespace speedrun
