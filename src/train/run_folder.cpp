#include "src/train/run_folder.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fmt/chrono.h"
#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/config/config_io.h"
#include "src/core/file.h"

namespace speedrun {
namespace {

void make_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || !std::filesystem::is_directory(path)) {
    throw InputError(
        fmt::format("run.dir: {}: cannot be made a folder: {}", path.string(), error ? error.message() : "a file is in the way"));
  }
}

}  // namespace

RunFolder RunFolder::create(const Config& config, const std::string& config_name) {
  const std::filesystem::path parent = std::filesystem::absolute(config.run.dir).lexically_normal();
  make_folder(parent);
  std::string name = config.run.name;
  if (name.empty()) name = fmt::format("{:%Y%m%d-%H%M%S}-{}", fmt::localtime(std::time(nullptr)), config_name);
  // create_directory is atomic: of two runs that start in the same second one gets the next number.
  for (int attempt = 1; attempt < 1000; ++attempt) {
    const std::filesystem::path path = parent / (attempt == 1 ? name : fmt::format("{}-{}", name, attempt));
    std::error_code error;
    if (std::filesystem::create_directory(path, error)) {
      make_folder(path / "checkpoints");
      return RunFolder(path);
    }
    if (error) throw InputError(fmt::format("run.dir: {}: cannot be made: {}", path.string(), error.message()));
  }
  throw InputError(fmt::format("run.name: {} and 999 numbered forms of it exist in {}", name, parent.string()));
}

RunFolder RunFolder::open(const std::filesystem::path& path) {
  const std::filesystem::path absolute = std::filesystem::absolute(path).lexically_normal();
  const std::filesystem::path folder = absolute.has_filename() ? absolute : absolute.parent_path();
  if (!std::filesystem::is_regular_file(folder / "config.json"))
    throw InputError(folder.string() + ": not the folder of a run (it has no config.json)");
  return RunFolder(folder);
}

void RunFolder::write_config(const Config& config) const {
  write_file_atomically((path_ / "config.json").string(), dump_config(config));
}

void RunFolder::write_result(const nlohmann::ordered_json& result) const {
  // A path that is no UTF-8 must not cost a finished run its result: such bytes become U+FFFD.
  const std::string text = result.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  write_file_atomically((path_ / "result.json").string(), text + "\n");
}

void RunFolder::trim_metrics(int first_step) const {
  const std::filesystem::path file = path_ / "metrics.jsonl";
  if (!std::filesystem::exists(file)) return;
  std::istringstream lines(read_file(file.string()));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) continue;  // a line cut short by a kill
    const int step = json["step"].get<int>();
    const bool counts_updates = json.contains("val_loss") || json.contains("jump");
    if (counts_updates ? step <= first_step : step < first_step) kept += line + "\n";
  }
  write_file_atomically(file.string(), kept);
}

void MetricsFile::write(nlohmann::ordered_json line) {
  bool finite = true;
  for (auto& value : line) {
    if (!value.is_number_float() || std::isfinite(value.get<double>())) continue;
    value = nullptr;
    finite = false;
  }
  if (!finite) line["non_finite"] = true;
  file_.write(line.dump() + "\n");
}

}  // namespace speedrun
