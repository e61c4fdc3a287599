#pragma once
// The folder of a run: config.json (resolved), metrics.jsonl, log.txt, result.json, checkpoints/.
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "src/config/config.h"
#include "src/core/file.h"

namespace speedrun {

class RunFolder {
 public:
  // A new folder DIR/NAME (numbered if it exists); throws Error naming what cannot be made.
  static RunFolder create(const Config& config, const std::string& config_name);
  // An existing run; throws InputError if `path` is none.
  static RunFolder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::string id() const { return path_.filename().string(); }

  void write_config(const Config& config) const;
  void write_result(const nlohmann::ordered_json& result) const;

  // Drops metrics of updates from `first_step` on, and of validations and jumps after more than `first_step` updates: a resumed run
  // makes them again.
  void trim_metrics(int first_step) const;

 private:
  explicit RunFolder(std::filesystem::path path) : path_(std::move(path)) {}
  std::filesystem::path path_;
};

// Appends JSON objects, one a line; NaN and infinities become null with "non_finite": true.
class MetricsFile {
 public:
  explicit MetricsFile(const std::filesystem::path& path) : file_(path.string(), AppendedFile::Mode::append) {}
  void write(nlohmann::ordered_json line);

 private:
  AppendedFile file_;
};

}  // namespace speedrun
