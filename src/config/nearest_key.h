#pragma once
// Suggestions for keys that do not exist.
#include <string>
#include <vector>

namespace speedrun {

// The most similar of `valid` (not empty): a misspelt last part counts most, so that the right name at the wrong level finds its
// place, and names other trainers use ("learning_rate", "n_layer") find ours.
std::string nearest_key(const std::string& key, const std::vector<std::string>& valid);

// Insertions, deletions, substitutions and swaps of neighbours that turn one text into the other.
size_t edit_distance(const std::string& a, const std::string& b);

}  // namespace speedrun
