#pragma once
#include "src/data/validation_reader.h"
#include "src/train/engine.h"

namespace speedrun {

// Mean cross-entropy, nats per token, over exactly the predictions of the reader, whatever the micro-batch, of a model after
// `completed` steps. Synchronous. With several ranks (control not null) all of them call it, each takes a part of the rows, and all
// have the answer.
double evaluate(Engine& engine, const ValidationReader& reader, int completed, Control* control = nullptr);

}  // namespace speedrun
