#pragma once
// Flags and arguments of a subcommand, over cxxopts (the only users of it are in this folder).
#include <cxxopts.hpp>
#include <string>
#include <vector>

namespace speedrun {

struct Arguments {
  cxxopts::ParseResult flags;
  std::vector<std::string> positional;

  bool has(const std::string& flag) const { return flags.count(flag) > 0; }
  // Every value of a flag that may be repeated; cxxopts' own lists split at commas.
  std::vector<std::string> all(const std::string& flag) const;
};

// `command` is "train" or "data inspect"; `arguments` what follows it in the usage line.
cxxopts::Options command_options(const std::string& command, const std::string& arguments, const std::string& help);
void add_set_flag(cxxopts::Options& options);  // --set key=value, repeatable

// argv[0] is the subcommand's last word. False: help was asked for and shown. Throws InputError on unknown or malformed flags.
bool parse_arguments(const std::string& command, cxxopts::Options& options, int argc, char** argv, Arguments& arguments);

// The one positional argument; throws InputError naming `what` otherwise.
std::string only_argument(const std::string& command, const Arguments& arguments, const std::string& what);

}  // namespace speedrun
