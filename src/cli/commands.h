#pragma once
// The subcommands. argv[0] is the subcommand's name. Each returns the process's exit code and throws Error or InputError.

namespace speedrun {

int train_command(int argc, char** argv);
int eval_command(int argc, char** argv);
int sample_command(int argc, char** argv);
int export_command(int argc, char** argv);
int bench_command(int argc, char** argv);

}  // namespace speedrun
