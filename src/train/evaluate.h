#pragma once
#include "src/data/validation_reader.h"
#include "src/train/engine.h"

namespace speedrun {

// Mean cross-entropy, nats per token, over exactly the predictions of the reader, whatever the micro-batch, of a model after
// `completed` steps. Synchronous.
double evaluate(Engine& engine, const ValidationReader& reader, int completed);

}  // namespace speedrun
