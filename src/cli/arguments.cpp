#include "src/cli/arguments.h"

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {

std::vector<std::string> Arguments::all(const std::string& flag) const {
  std::vector<std::string> values;
  for (const auto& argument : flags.arguments()) {
    if (argument.key() == flag) values.push_back(argument.value());
  }
  return values;
}

cxxopts::Options command_options(const std::string& command, const std::string& arguments, const std::string& help) {
  cxxopts::Options options("speedrun " + command, help);
  options.custom_help(arguments + " [FLAG...]");
  options.set_width(120);
  options.add_options()("h,help", "show this");
  return options;
}

void add_set_flag(cxxopts::Options& options) {
  options.add_options()("set", "KEY=VALUE, a key of the config (repeatable; speedrun train --help-config lists them)",
                        cxxopts::value<std::string>());
}

bool parse_arguments(const std::string& command, cxxopts::Options& options, int argc, char** argv, Arguments& arguments) {
  try {
    arguments.flags = options.parse(argc, argv);
  } catch (const cxxopts::exceptions::exception& fault) {
    throw InputError(fmt::format("{}: {} (speedrun {} --help shows the flags)", command, fault.what(), command));
  }
  if (arguments.has("help")) {
    fmt::print("{}", options.help());
    return false;
  }
  arguments.positional = arguments.flags.unmatched();
  return true;
}

std::string only_argument(const std::string& command, const Arguments& arguments, const std::string& what) {
  if (arguments.positional.size() != 1) {
    throw InputError(fmt::format("{}: expected one {}, found {} arguments (speedrun {} --help)", command, what,
                                 arguments.positional.size(), command));
  }
  return arguments.positional[0];
}

}  // namespace speedrun
