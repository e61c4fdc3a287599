#pragma once
// Model FLOPs of a training step, for utilisation: products with weights and attended pairs alone.
#include <cstdint>
#include <vector>

#include "src/config/config.h"

namespace speedrun {

// Keys that the average query of `n` tokens sees: from its document's start, at most `window` before it (0: no limit).
double mean_attended(const int32_t* doc_start, int64_t n, int64_t window);

// The same for each layer of a model (0 without attention; for paired heads over the stream of 2n tokens, whose heads are half as
// many: as many pairs a token and head), mean over rows of row_tokens whose doc_start counts from the row's first token.
std::vector<double> attended_keys(const Config::Model& model, const std::vector<int32_t>& doc_start, int64_t row_tokens,
                                  int64_t window_short, int64_t window_long);

// FLOPs of forward and backward for one token whose query sees `attended` keys on average in each layer: 6 for each weight of a
// product (embedding look-ups and nets of a few coefficients are none) and 12·D for each attended pair and head.
double flops_per_token(const Config::Model& model, const std::vector<double>& attended);

}  // namespace speedrun
