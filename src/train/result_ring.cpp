#include "src/train/result_ring.h"

#include <chrono>
#include <thread>
#include <utility>

#include "kernels/base/error.h"

namespace speedrun {

ResultRing::ResultRing(Device& device, Control* control, Communicator* communicator, std::function<std::string(int32_t)> bad_tensor)
    : device_(device), control_(control), communicator_(communicator), bad_tensor_(std::move(bad_tensor)) {}

void ResultRing::allocate() {
  for (size_t i = 0; i < kResultSlots; ++i)
    slots_.push_back(
        {HostBuffer<kernels::StepVerdict>(device_, 1), HostBuffer<kernels::JumpReport>(device_, 1), device_.make_event()});
}

kernels::JumpReport* ResultRing::jump_slot() {
  require(submitted_ - taken_ < kResultSlots, "internal: results of steps were not taken");
  return slots_[submitted_ % kResultSlots].jump.data();
}

void ResultRing::submit(int step, int64_t tokens, const kernels::StepVerdict* verdict, bool jumped) {
  require(submitted_ - taken_ < kResultSlots, "internal: results of steps were not taken");
  Slot& slot = slots_[submitted_ % kResultSlots];
  device_.copy_out(slot.verdict.data(), verdict, sizeof(kernels::StepVerdict));
  slot.arrived->record();
  slot.step = step;
  slot.tokens = tokens;
  slot.jumped = jumped;
  ++submitted_;
}

std::optional<StepResult> ResultRing::poll() {
  if (taken_ == submitted_) return std::nullopt;
  // A full ring means the next step would overwrite a result: then its age is bounded by waiting here.
  if (submitted_ - taken_ < kResultSlots && !slots_[taken_ % kResultSlots].arrived->done()) return std::nullopt;
  return wait();
}

std::optional<StepResult> ResultRing::wait() {
  if (taken_ == submitted_) return std::nullopt;
  Slot& slot = slots_[taken_ % kResultSlots];
  // A transport that has failed would let a plain wait last for ever.
  if (communicator_ != nullptr) {
    const OutsideWait waiting(*control_);
    while (!slot.arrived->done()) {
      if (const std::string error = communicator_->error(); !error.empty()) throw Error(error);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  slot.arrived->wait();
  ++taken_;
  const kernels::StepVerdict& verdict = slot.verdict[0];
  StepResult out{.step = slot.step,
                 .loss = verdict.loss_sum / static_cast<double>(slot.tokens),
                 .grad_norm = verdict.grad_norm,
                 .finite = verdict.skip == 0,
                 .bad_tensor = {},
                 .jump = {}};
  if (!out.finite) out.bad_tensor = bad_tensor_(verdict.bad_parameter);
  if (slot.jumped) out.jump = slot.jump[0];
  return out;
}

}  // namespace speedrun
