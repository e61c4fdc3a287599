#pragma once

namespace speedrun {

// `speedrun data VERB ...`: inspect, tokenize, decode, rows. argv[0] is "data". Returns the exit code; throws Error and InputError.
int data_command(int argc, char** argv);

}  // namespace speedrun
