#pragma once
// The parameter table of a model description: names, shapes, initial values, optimizer groups.
#include <vector>

#include "src/config/config.h"
#include "src/core/parameter.h"

namespace speedrun {

// Rows in the order of the forward pass. How a weight shares its bits with its master comes from its group in `optim`.
std::vector<ParameterSpec> parameter_table(const Config::Model& model, const Config::Optim& optim);
std::vector<ParameterSpec> main_track_parameters(const Config::Model& model,
                                                 const Config::Optim& optim);  // architecture main_track

kernels::MasterSplit master_split(const Config::Group& group);

}  // namespace speedrun
