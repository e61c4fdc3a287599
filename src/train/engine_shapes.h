#pragma once
// Sizes and stages that the engine derives from a config.
#include <cstdint>
#include <vector>

#include "src/config/config.h"
#include "src/model/model.h"
#include "src/optim/schedule.h"

namespace speedrun {

// Tokens whose logits are held at once: enough to fill the GPU (the product's rows), small against the activations.
int64_t choose_logits_chunk(const Config& config, bool cuda, int64_t micro_batch);

// The largest part of a step of `batch` tokens that is made of whole rows, divides it and has at most `limit` tokens; at least a
// row.
int64_t micro_batch_of(int64_t batch, int64_t row, int64_t limit);

// Every stage of the schedule, then what the last validation uses.
std::vector<ModelStage> model_stages(const Config& config);

}  // namespace speedrun
