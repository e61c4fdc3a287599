#pragma once
// A run's state as whole tensors in host memory, whatever part of it each rank has on its device.
#include <cstddef>
#include <functional>
#include <vector>

#include "src/core/device.h"
#include "src/core/state_tensor.h"
#include "src/dist/control.h"

namespace speedrun {

class CollectedState {
 public:
  // control: null with one rank
  CollectedState(Device& device, Control* control) : device_(device), control_(control) {}

  // What `read` gives on each rank, made whole on rank 0; nothing on the others. With several ranks all of them call it, in the
  // same order.
  std::vector<std::byte> whole(StateTensor::Held held, DType dtype, const std::function<std::vector<std::byte>()>& read);
  std::vector<std::byte> whole(const StateTensor& tensor);

  // This rank's share of a whole tensor, to the device; synchronous.
  void write(const StateTensor& tensor, const std::vector<std::byte>& whole);

 private:
  int rank() const { return control_ == nullptr ? 0 : control_->rank(); }

  Device& device_;
  Control* control_;
};

}  // namespace speedrun
