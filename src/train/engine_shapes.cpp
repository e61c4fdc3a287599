#include "src/train/engine_shapes.h"

#include <algorithm>

namespace speedrun {

int64_t choose_logits_chunk(const Config& config, bool cuda, int64_t micro_batch) {
  if (config.train.logits_chunk_tokens > 0) return std::min(config.train.logits_chunk_tokens, micro_batch);
  return std::min<int64_t>(micro_batch, cuda ? 16384 : 1024);
}

int64_t micro_batch_of(int64_t batch, int64_t row, int64_t limit) {
  const int64_t rows = batch / row;
  for (int64_t part = rows; part > 1; --part) {
    if (rows % part == 0 && part * row <= limit) return part * row;
  }
  return row;
}

namespace {

ModelStage model_stage(const StageValues& stage) {
  return {.window_short = stage.window_short,
          .window_long = stage.window_long,
          .attention_scale = stage.attention_scale,
          .rotary_frequencies = stage.rotary_frequencies,
          .loss_terms = stage.loss_terms,
          .prefix_loss = stage.prefix_loss};
}

}  // namespace

std::vector<ModelStage> model_stages(const Config& config) {
  std::vector<ModelStage> stages;
  for (const StageValues& stage : stages_of(config)) stages.push_back(model_stage(stage));
  stages.push_back(model_stage(final_evaluation_stage(config)));
  return stages;
}

}  // namespace speedrun
