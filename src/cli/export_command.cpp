#include <filesystem>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/cli/commands.h"
#include "src/config/config_io.h"
#include "src/core/log.h"
#include "src/train/saved_model.h"
#include "src/train/weights_file.h"

namespace speedrun {

int export_command(int argc, char** argv) {
  cxxopts::Options options = command_options(
      "export", "RUN | CHECKPOINT | CONFIG.json FILE",
      "Write weights as FP32 tensors (safetensors): a trained model's, or those that a run of a config begins with; "
      "train.init_weights takes them back. The config is in the metadata.");
  add_set_flag(options);
  Arguments arguments;
  if (!parse_arguments("export", options, argc, argv, arguments)) return 0;
  if (arguments.positional.size() != 2) {
    throw InputError(fmt::format(
        "export: expected RUN, CHECKPOINT or CONFIG.json and the FILE to write, found {} arguments (speedrun export --help)",
        arguments.positional.size()));
  }
  const std::filesystem::path file = arguments.positional[1];
  if (std::filesystem::exists(file)) throw InputError(fmt::format("{}: exists; name another file or remove it", file.string()));
  if (const std::filesystem::path folder = file.parent_path(); !folder.empty() && !std::filesystem::is_directory(folder))
    throw InputError(fmt::format("{}: there is no folder {}; make it first", file.string(), folder.string()));
  Log log;
  // The weights alone are wanted: on the CPU, whose memory holds them, and with the shortest rows there are.
  std::vector<std::string> changes = arguments.all("set");
  changes.emplace_back("train.device=cpu");
  const std::filesystem::path from = arguments.positional[0];
  const SavedModel model = from.extension() == ".json"
                               ? make_initial_model(load_config(from, changes), SavedModelUse::generation, log)
                               : open_saved_model(from, changes, SavedModelUse::generation, log);
  save_tensors(file, model.engine->state(), {{"config", dump_config(model.config)}, {"step", std::to_string(model.step)}});
  fmt::print("{}: {:.1f} M parameters after {} steps\n", file.string(), static_cast<double>(model.engine->parameter_count()) * 1e-6,
             model.step);
  return 0;
}

}  // namespace speedrun
