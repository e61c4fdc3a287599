#pragma once
// Batches on their way from the reader to a model's batch buffers, through a ring of pinned buffers, so that the host prepares
// micro-batches while the device still works on earlier ones.
#include <cstdint>
#include <memory>
#include <vector>

#include "src/core/device.h"
#include "src/data/reader.h"
#include "src/model/model.h"
#include "src/optim/optimizer.h"

namespace speedrun {

template <class T>
class BatchStaging {
 public:
  struct Slot {
    HostBuffer<int32_t> batch;  // (3, N): inputs, targets, document starts
    HostBuffer<StepInputs<T>> inputs;
    std::unique_ptr<Event> sent;  // for the caller to record when everything of the slot has been sent
  };

  BatchStaging(Device& device, Model<T>& model, int64_t max_tokens);

  // Sends tokens first … first + n − 1 of the rows to the model. Past the rows' end the last row is padded with copies of token 0,
  // each row a document of its own, so that every value is defined.
  Slot& stage(const StepRows& rows, int64_t first, int64_t n);

 private:
  Device& device_;
  Model<T>& model_;
  std::vector<Slot> slots_;
  size_t staged_ = 0;
};

}  // namespace speedrun
