#include <filesystem>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/cli/commands.h"
#include "src/config/config_io.h"
#include "src/core/log.h"
#include "src/optim/schedule.h"
#include "src/train/trainer.h"

namespace speedrun {

int train_command(int argc, char** argv) {
  cxxopts::Options options =
      command_options("train", "CONFIG | --resume RUN", "Train a model as a JSON config says, or go on with a run.");
  add_set_flag(options);
  options.add_options()("resume", "folder of a run: go on from its newest good checkpoint", cxxopts::value<std::string>());
  options.add_options()("print-config", "print the resolved config and stop");
  options.add_options()("print-schedule", "print what every step does, a line a step, and stop");
  options.add_options()("dry-run", "check data and memory plan, then stop");
  options.add_options()("dump-grads", "write the gradients of the first step's batch (safetensors) and stop",
                        cxxopts::value<std::string>());
  options.add_options()("help-config", "list every key of the config");
  Arguments arguments;
  if (!parse_arguments("train", options, argc, argv, arguments)) return 0;
  if (arguments.has("help-config")) {
    fmt::print("{}", describe_keys());
    return 0;
  }

  TrainOptions run;
  std::filesystem::path config_path;
  if (arguments.has("resume")) {
    if (!arguments.positional.empty())
      throw InputError("train: --resume RUN takes its config from the run; give changes with --set");
    run.resume = arguments.flags["resume"].as<std::string>();
    config_path = *run.resume / "config.json";
    if (!std::filesystem::exists(config_path))
      throw InputError(fmt::format("--resume {}: not the folder of a run (it has no config.json)", run.resume->string()));
  } else {
    config_path = only_argument("train", arguments, "CONFIG");
  }
  run.config = load_config(config_path, arguments.all("set"));
  run.config_name = config_path.stem().string();
  if (arguments.has("print-config")) {
    fmt::print("{}", dump_config(run.config));
    return 0;
  }
  if (arguments.has("print-schedule")) {
    print_schedule(run.config, [](const std::string& lines) { fmt::print("{}", lines); });
    return 0;
  }
  run.dry_run = arguments.has("dry-run");
  if (arguments.has("dump-grads")) {
    run.gradients_file = arguments.flags["dump-grads"].as<std::string>();
    if (run.gradients_file.empty()) throw InputError("train: --dump-grads: expected the name of a file");
  }
  Log log;
  return train(run, log);
}

}  // namespace speedrun
