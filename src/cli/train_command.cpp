#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/cli/commands.h"
#include "src/config/config_io.h"
#include "src/core/log.h"
#include "src/dist/launcher.h"
#include "src/dist/world.h"
#include "src/optim/schedule.h"
#include "src/train/checkpoint.h"
#include "src/train/trainer.h"

namespace speedrun {

namespace {

// The command line of a rank.
std::vector<std::string> without_gpus(int argc, char** argv) {
  std::vector<std::string> arguments = {"speedrun", "train"};
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--gpus") {
      ++i;
    } else if (!argument.starts_with("--gpus=")) {
      arguments.emplace_back(argument);
    }
  }
  return arguments;
}

// What is to be trained: the run's config, its name, and where it begins.
TrainOptions options_of(const Arguments& arguments, std::vector<std::string>& warnings) {
  const auto& words = arguments.positional;
  const std::vector<std::string> changes = arguments.all("set");
  TrainOptions run;
  std::filesystem::path config_path;
  if (arguments.has("resume")) {
    if (arguments.has("from"))
      throw InputError("train: --from begins a new run, --resume goes on with one that is there: give one");
    if (!words.empty()) throw InputError("train: --resume RUN takes its config from the run; give changes with --set");
    run.resume = arguments.flags["resume"].as<std::string>();
    config_path = *run.resume / "config.json";
    if (!std::filesystem::exists(config_path))
      throw InputError(fmt::format("--resume {}: not the folder of a run (it has no config.json)", run.resume->string()));
  } else {
    if (arguments.has("from")) {
      const std::filesystem::path given = arguments.flags["from"].as<std::string>();
      if (given.empty()) throw InputError("train: --from: expected a checkpoint's file or the folder of a run");
      const auto found = find_checkpoint(given, [&](const std::string& text) { warnings.push_back(text); });
      run.from = std::filesystem::absolute(found).lexically_normal();
    }
    if (run.from && words.empty()) {
      const std::string config = read_checkpoint_meta(*run.from).config;
      run.config = parse_config(config, run.from->string(), std::filesystem::current_path(), changes);
      run.config_name = "from_" + run.from->stem().string();
      return run;
    }
    config_path = only_argument("train", arguments, "CONFIG");
  }
  run.config = load_config(config_path, changes);
  run.config_name = config_path.stem().string();
  return run;
}

}  // namespace

int train_command(int argc, char** argv) {
  cxxopts::Options options =
      command_options("train", "CONFIG | --resume RUN | --from CHECKPOINT [CONFIG]",
                      "Train a model as a JSON config says, go on with a run, or branch a new one off a checkpoint.");
  add_set_flag(options);
  options.add_options()("resume", "folder of a run: go on from its newest good checkpoint", cxxopts::value<std::string>());
  options.add_options()(
      "from", "a checkpoint, or a run's folder (its newest good one): a new run goes on from there, with its config or CONFIG",
      cxxopts::value<std::string>());
  options.add_options()("print-config", "print the resolved config and stop");
  options.add_options()("print-schedule", "print what every step does, a line a step, and stop");
  options.add_options()("dry-run", "check data and memory plan, then stop");
  options.add_options()("dump-grads", "write the gradients of the first step's batch (safetensors) and stop",
                        cxxopts::value<std::string>());
  options.add_options()("timeline", "record what the GPU does in some steps: report in the log, Chrome trace in this file",
                        cxxopts::value<std::string>());
  options.add_options()("timeline-steps", "FIRST:COUNT, the steps to record (default: 4 in the middle of every stage)",
                        cxxopts::value<std::string>());
  options.add_options()("gpus", "ranks on this host, one process for each GPU (on the CPU, so many processes)",
                        cxxopts::value<int>());
  options.add_options()("help-config", "list every key of the config");
  Arguments arguments;
  if (!parse_arguments("train", options, argc, argv, arguments)) return 0;
  if (arguments.has("help-config")) {
    fmt::print("{}", describe_keys());
    return 0;
  }

  std::vector<std::string> warnings;
  TrainOptions run = options_of(arguments, warnings);
  if (arguments.has("print-config")) {
    fmt::print("{}", dump_config(run.config));
    return 0;
  }
  if (arguments.has("print-schedule")) {
    print_schedule(run.config, [](const std::string& lines) { fmt::print("{}", lines); });
    return 0;
  }
  run.world = world_from_environment();
  const int gpus = arguments.has("gpus") ? arguments.flags["gpus"].as<int>() : run.world.size;
  if (gpus < 1) throw InputError(fmt::format("train: --gpus {}: expected 1 or more", gpus));
  check_ranks(run.config, std::max(gpus, run.world.size));
  if (gpus != run.world.size && run.world.size > 1)
    throw InputError(fmt::format("train: --gpus {}: the launcher that started this process says {} ranks; leave out --gpus", gpus,
                                 run.world.size));
  run.dry_run = arguments.has("dry-run");
  if (arguments.has("dump-grads")) {
    run.gradients_file = arguments.flags["dump-grads"].as<std::string>();
    if (run.gradients_file.empty()) throw InputError("train: --dump-grads: expected the name of a file");
    if (gpus > 1) throw InputError("train: --dump-grads: for one rank; leave out --gpus");
  }
  if (arguments.has("timeline")) {
    run.timeline.file = arguments.flags["timeline"].as<std::string>();
    check_timeline_file(run.timeline.file);
    if (run.dry_run || !run.gradients_file.empty())
      throw InputError("train: --timeline records steps of a run; --dry-run and --dump-grads make none");
  }
  if (arguments.has("timeline-steps")) {
    if (run.timeline.file.empty()) throw InputError("train: --timeline-steps: --timeline FILE is missing");
    run.timeline.steps = parse_timeline_steps(arguments.flags["timeline-steps"].as<std::string>());
  }
  // Last, so that what is wrong with the flags is said once and not by every rank.
  if (gpus > run.world.size) return launch_ranks(gpus, without_gpus(argc, argv), run.config.dist.heartbeat_s);
  Log log;
  if (run.world.rank == 0) {
    for (const std::string& text : warnings) log.warn(text);
  }
  return train(run, log);
}

}  // namespace speedrun
