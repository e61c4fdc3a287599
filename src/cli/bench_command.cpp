#include <iostream>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/cli/commands.h"
#if SPEEDRUN_HAS_CUDA
#include "kernels/bench/bench.h"
#include "src/core/device.h"
#endif

namespace speedrun {

int bench_command(int argc, char** argv) {
  cxxopts::Options options = command_options("bench", "OP...", "Sustained timings of the CUDA kernels, as ratios within one run.");
  options.add_options()("seconds", "of each case", cxxopts::value<double>()->default_value("2"));
  options.add_options()("tune", "gemm: search algorithms and print the rows of the tuning table");
  options.add_options()("list", "list the ops");
  Arguments arguments;
  if (!parse_arguments("bench", options, argc, argv, arguments)) return 0;
#if SPEEDRUN_HAS_CUDA
  if (arguments.has("list") || arguments.positional.empty()) {
    for (const kernels::Bench& bench : kernels::benches()) fmt::print("{:<12} {}\n", bench.name, bench.what);
    return 0;
  }
  std::string why_not;
  if (!cuda_available(&why_not)) throw InputError("bench: " + why_not);
  const kernels::BenchDevice device;
  const kernels::BenchOptions run{
      .exec = device.exec(), .seconds = arguments.flags["seconds"].as<double>(), .tune = arguments.has("tune")};
  for (const std::string& name : arguments.positional) {
    bool found = false;
    for (const kernels::Bench& bench : kernels::benches()) {
      if (name != bench.name && name != "all") continue;
      bench.run(run, std::cout);
      found = true;
    }
    if (!found) throw InputError(fmt::format("bench: no op {} (speedrun bench --list)", name));
  }
  return 0;
#else
  throw InputError("bench: this build has no CUDA device, and the CPU references are not for timing");
#endif
}

}  // namespace speedrun
