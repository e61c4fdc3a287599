#pragma once
// From the config to the readers of a run.
#include <memory>
#include <vector>

#include "src/config/config.h"
#include "src/data/reader.h"
#include "src/data/validation_reader.h"

namespace speedrun {

ReaderOptions train_reader_options(const Config& config);  // opens and checks every train shard
std::unique_ptr<Reader> make_train_reader(const Config& config, ReaderOptions options);
ValidationReader make_validation_reader(const Config& config);

int64_t row_tokens(const Config& config);       // length of the longest training row
int64_t eval_row_tokens(const Config& config);  // length of a validation row: eval.row_tokens, or that of the first step's rows
StepShape step_shape(const Config& config, int step);
std::vector<StepRun> step_runs(const Config& config, int steps);  // the first steps of the schedule, stage by stage

}  // namespace speedrun
