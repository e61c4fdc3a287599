#pragma once
// Starts the ranks of one host: this program again, once for each GPU, with the environment of World set.
#include <string>
#include <vector>

namespace speedrun {

// Runs `arguments` (argv of this program without the flag that asked for ranks) as `ranks` processes and waits for them. SIGINT and
// SIGTERM are passed on, each as often as it comes. When a rank has failed the others have `grace_s` to end by themselves, then
// they are killed, stopped ones too; a rank that stays stopped for so long has failed. Should this process end, so do all. Returns
// the exit code of the rank that failed first (128 + the number of a signal), 0 if none did. Prints one line for a rank that a
// signal ended or stopped, unless the ranks themselves have told a cause. Throws Error if a process cannot be started.
int launch_ranks(int ranks, const std::vector<std::string>& arguments, double grace_s);

}  // namespace speedrun
