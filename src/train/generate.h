#pragma once
// Text from a trained model, token by token.
#include <cstdint>
#include <functional>
#include <vector>

#include "src/config/config.h"
#include "src/train/engine.h"

namespace speedrun {

struct GenerateOptions {
  int tokens = 120;          // at most this many new ones
  double temperature = 0.8;  // 0: the likeliest token always
  int top_k = 50;            // 0: all
  uint64_t seed = 1;         // same seed, same text
};

void check_options(const GenerateOptions& options);  // throws InputError naming the flag that is out of range

// One id out of `logits`, only ids below vocab_size; `index` counts the draws. A logit of −∞ is never chosen; throws Error
// (non_finite) for NaN, +∞, or if none is finite.
int32_t choose_token(const std::vector<float>& logits, int64_t vocab_size, const GenerateOptions& options, uint64_t index);

// Most tokens of context: a validation row, with the documents reader at most a document.
int64_t generation_row_tokens(const Config& config);

// Continues `context` (its last generation_row_tokens ids are what the model sees) and hands every new id to `emit` until that
// returns false. Throws InputError for options out of range.
void generate(Engine& engine, const Config& config, const GenerateOptions& options, std::vector<int32_t> context,
              const std::function<bool(int32_t)>& emit);

}  // namespace speedrun
