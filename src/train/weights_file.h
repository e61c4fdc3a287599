#pragma once
// Tensors in safetensors files (8 bytes of header size, JSON header, raw data), to exchange weights and gradients with other
// programs.
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "src/train/engine.h"

namespace speedrun {

// Sets every parameter ("parameter/NAME" of the state) from the tensor NAME, F32 or BF16. Throws InputError naming the file and the
// tensor that is missing, unknown, or of another shape.
void load_weights(const std::filesystem::path& path, const std::vector<StateEntry>& state);

// Writes entries as F32 tensors, named as they are but for kParameterPrefix, so that load_weights takes parameters back.
void save_tensors(const std::filesystem::path& path, const std::vector<StateEntry>& entries,
                  const std::map<std::string, std::string>& metadata);

}  // namespace speedrun
