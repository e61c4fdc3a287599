#include "src/train/saved_model.h"

#include <algorithm>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/config/config_io.h"
#include "src/train/checkpoint.h"
#include "src/train/data_setup.h"
#include "src/train/device_choice.h"
#include "src/train/generate.h"
#include "src/train/start.h"

namespace speedrun {
namespace {

// Tokens of an evaluation micro-batch: whole rows, enough to keep the device busy, never more than the evaluation has.
int64_t evaluation_tokens(const Config& config, int64_t row, bool cuda) {
  const int64_t wanted = cuda ? 65536 : 4096;
  const int64_t rows = std::clamp<int64_t>(wanted / row, 1, std::max<int64_t>(config.eval.tokens / row, 1));
  return rows * row;
}

SavedModel make_model(const Config& config, SavedModelUse use, Log& log) {
  SavedModel model;
  model.config = config;
  model.device = choose_device(model.config, log);
  const int64_t row = use == SavedModelUse::evaluation ? eval_row_tokens(model.config) : generation_row_tokens(model.config);
  const int64_t tokens = use == SavedModelUse::generation ? row : evaluation_tokens(model.config, row, model.device->is_cuda());
  model.engine =
      make_engine(model.config, *model.device, {.micro_batch_tokens = tokens, .evaluation_row_tokens = row, .training = false});
  model.engine->warm_up();
  return model;
}

}  // namespace

SavedModel open_saved_model(const std::filesystem::path& path, const std::vector<std::string>& overrides, SavedModelUse use,
                            Log& log) {
  const std::filesystem::path file = find_checkpoint(path, [&](const std::string& text) { log.warn(text); });
  const CheckpointMeta meta = read_checkpoint_meta(file);
  SavedModel model = make_model(parse_config(meta.config, file.string(), std::filesystem::current_path(), overrides), use, log);
  model.step = meta.step;
  load_checkpoint(file, model.engine->state(), true);
  model.engine->begin_evaluation(model.step);
  return model;
}

SavedModel make_initial_model(const Config& config, SavedModelUse use, Log& log) {
  SavedModel model = make_model(config, use, log);
  set_initial_weights(config, *model.engine);
  return model;
}

}  // namespace speedrun
