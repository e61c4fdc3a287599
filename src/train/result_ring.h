#pragma once
// Results of steps on their way back from the device: the host asks for one some steps after it submitted the step.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/extrapolation/extrapolation.h"
#include "src/core/device.h"
#include "src/dist/communicator.h"
#include "src/dist/control.h"
#include "src/train/engine.h"

namespace speedrun {

class ResultRing {
 public:
  // control, communicator: null with one rank. bad_tensor: the name behind StepVerdict::bad_parameter.
  ResultRing(Device& device, Control* control, Communicator* communicator, std::function<std::string(int32_t)> bad_tensor);

  void allocate();

  // Where the report of a jump after the step that is submitted next is to arrive.
  kernels::JumpReport* jump_slot();
  // A step of `tokens` tokens whose verdict, in device memory, is what has been issued to the queue so far; jumped: so is the
  // report.
  void submit(int step, int64_t tokens, const kernels::StepVerdict* verdict, bool jumped);

  // In the order of the steps, see Engine::poll_result.
  std::optional<StepResult> poll();
  std::optional<StepResult> wait();

 private:
  struct Slot {
    HostBuffer<kernels::StepVerdict> verdict;
    HostBuffer<kernels::JumpReport> jump;
    std::unique_ptr<Event> arrived;
    int step = 0;
    int64_t tokens = 0;
    bool jumped = false;
  };

  Device& device_;
  Control* control_;
  Communicator* communicator_;
  std::function<std::string(int32_t)> bad_tensor_;
  std::vector<Slot> slots_;
  size_t submitted_ = 0, taken_ = 0;
};

}  // namespace speedrun
