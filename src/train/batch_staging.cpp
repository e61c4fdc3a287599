#include "src/train/batch_staging.h"

#include <algorithm>

namespace speedrun {
namespace {

// Buffers in flight: the host prepares this many micro-batches ahead of the device.
constexpr size_t kSlots = 4;

}  // namespace

template <class T>
BatchStaging<T>::BatchStaging(Device& device, Model<T>& model, int64_t max_tokens) : device_(device), model_(model) {
  const size_t n = static_cast<size_t>(max_tokens);
  for (size_t i = 0; i < kSlots; ++i)
    slots_.push_back({HostBuffer<int32_t>(device_, 3 * n), HostBuffer<StepInputs<T>>(device_, 1), device_.make_event()});
}

template <class T>
typename BatchStaging<T>::Slot& BatchStaging<T>::stage(const StepRows& rows, int64_t first, int64_t n) {
  Slot& slot = slots_[staged_++ % kSlots];
  slot.sent->wait();
  int32_t* inputs = slot.batch.data();
  int32_t* targets = inputs + n;
  int32_t* doc_start = targets + n;
  const int64_t total = rows.num_rows * rows.row_tokens, row = rows.row_tokens;
  const int64_t valid = std::clamp<int64_t>(total - first, 0, n);
  std::copy_n(rows.inputs.begin() + first, valid, inputs);
  std::copy_n(rows.targets.begin() + first, valid, targets);
  std::fill(inputs + valid, inputs + n, 0);
  std::fill(targets + valid, targets + n, 0);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t row_start = t / row * row;
    doc_start[t] = static_cast<int32_t>(row_start + (t < valid ? rows.doc_start[static_cast<size_t>(first + t)] : 0));
  }
  const size_t bytes = static_cast<size_t>(n) * sizeof(int32_t);
  device_.copy_in(model_.tokens(), inputs, bytes);
  device_.copy_in(model_.targets(), targets, bytes);
  device_.copy_in(model_.doc_start(), doc_start, bytes);
  return slot;
}

template class BatchStaging<float>;
#if SPEEDRUN_HAS_CUDA
template class BatchStaging<bf16>;
#endif

}  // namespace speedrun
