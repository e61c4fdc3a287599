#pragma once
// JSON files and --set overrides -> Config, and back. All errors are InputErrors of one line that name the file and line (or the
// --set argument), the key, what was expected and what was found.
//
// A file is one JSON object, comments allowed. Objects merge, lists replace. "extends": "other.json" (at the top, relative to the
// file) loads another file first. A key may also be written as a path: {"optim.matrix.lr": 0.02}. A number with a point or an
// exponent is never an integer: 1e3 is refused for a key of type int. File paths (data.train, data.val, data.vocabulary,
// train.init_weights) are relative to the file that sets them, on the command line to the working directory; in a loaded Config
// they are absolute.
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "src/config/config.h"

namespace speedrun {

// Loads `path` and what it extends, then applies the overrides ("optim.matrix.lr=0.02"; strings need no quotes; of two for the same
// key the later one counts), then validates.
Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});

// The same for a text that comes from elsewhere (a checkpoint): `name` stands for the file in messages, relative paths start at
// `base`.
Config parse_config(std::string_view text, const std::string& name, const std::filesystem::path& base,
                    const std::vector<std::string>& overrides = {});

// Every key with its value as JSON, without "extends"; load_config of it gives an equal Config, wherever the text is stored.
std::string dump_config(const Config& config);

struct KeyChange {
  std::string key, before, after;  // values as JSON
};

// The keys whose values differ, in the order of the table.
std::vector<KeyChange> changed_keys(const Config& before, const Config& after);

// Throws InputError on the first impossible combination of keys. `source` names the config in the message. What depends on the
// run's ranks or data (a batch that the ranks cannot share, missing shards) is checked where it is known.
void validate(const Config& config, const std::string& source);

// Throws InputError if the CUDA device cannot run the model: for the caller that has chosen the device.
void validate_for_cuda(const Config& config, const std::string& source);

// Every key with type, default, range and meaning: a table in Markdown, aligned for the terminal.
std::string describe_keys();

}  // namespace speedrun
