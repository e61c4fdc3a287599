// speedrun: trains GPT-2-scale language models to a target validation loss and times it.
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/commands.h"
#include "src/cli/data_command.h"
#include "src/core/device.h"

namespace {

using speedrun::ExitCode;

struct Command {
  const char* name;
  const char* what;
  int (*run)(int argc, char** argv);
};

constexpr std::array<Command, 6> kCommands = {
    {{"train", "train a model, or go on with a run", speedrun::train_command},
     {"eval", "validation loss or multiple-choice accuracy of a trained model", speedrun::eval_command},
     {"sample", "let a trained model write", speedrun::sample_command},
     {"export", "write a trained model's weights as safetensors", speedrun::export_command},
     {"data", "inspect, make and decode token shards", speedrun::data_command},
     {"bench", "time the CUDA kernels", speedrun::bench_command}}};

void print_help() {
  fmt::print(
      "speedrun: train GPT-2-scale language models to a target loss, against the clock\n\nUsage: speedrun COMMAND ... (speedrun "
      "COMMAND --help for more)\n");
  for (const Command& command : kCommands) fmt::print("  {:<8} {}\n", command.name, command.what);
  fmt::print("  --version\n");
}

void print_version() {
  const speedrun::BuildInfo build = speedrun::build_info();
  fmt::print("speedrun {}\ncommit        {}\nCUDA          {}\ncuBLASLt      {}\nNCCL          {}\narchitectures {}\n",
             build.version, build.commit, build.cuda, build.cublas, build.nccl, build.architectures);
}

int run(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "--help";
  if (name == "--help" || name == "-h" || name == "help") {
    print_help();
    return argc > 1 ? 0 : static_cast<int>(ExitCode::bad_input);
  }
  if (name == "--version") {
    print_version();
    return 0;
  }
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run(argc - 1, argv + 1);
  }
  throw speedrun::InputError(fmt::format("unknown command {} (speedrun --help lists them)", name));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    if (std::fflush(stdout) != 0) throw speedrun::Error(fmt::format("standard output cannot be written: {}", std::strerror(errno)));
    return code;
  } catch (const speedrun::Error& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "speedrun: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "speedrun: %s\n", error.what());
    return static_cast<int>(ExitCode::failure);
  }
}
