#pragma once
// The parameter table of a model description: names, shapes, initial values, optimizer groups.
#include <vector>

#include "src/config/config.h"
#include "src/core/parameter.h"

namespace speedrun {

int64_t padded_vocabulary(const Config::Model& model);

// Rows in the order of the forward pass. How a weight shares its bits with its master comes from its group in `optim`.
std::vector<ParameterSpec> parameter_table(const Config::Model& model, const Config::Optim& optim);

// FLOPs of forward and backward for one token whose query sees `attended` keys on average in each layer: 6 for each weight of a
// product (the embedding look-up is none) and 12·D for each attended pair and head.
double flops_per_token(const Config::Model& model, const std::vector<double>& attended);

}  // namespace speedrun
