#pragma once
// The rule of plain rows (Optimization Track): a step takes batch_tokens consecutive tokens, targets shifted by one.
#include <cstdint>

#include "src/data/reader.h"

namespace speedrun {

// Whether a step of `batch_tokens` starts at `position` of a shard; if not, the rest of the shard is dropped. The reference
// compares with ≥, so a shard of exactly batch_tokens + 1 tokens is passed over.
inline bool rows_fit(int64_t position, int64_t batch_tokens, int64_t shard_tokens) {
  return position + batch_tokens + 1 < shard_tokens;
}

// Throws InputError naming the keys unless batch_tokens is a positive multiple of row_tokens.
void check_row_shape(const StepShape& shape);

}  // namespace speedrun
