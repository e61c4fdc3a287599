#pragma once
// The first cause of a failed run, on standard error, once. Ranks that this program started itself share a pipe with their launcher
// that holds a single byte: who takes it may speak. Other ranks follow the rule that the hub speaks, or rank 1 of a lost hub.
#include <string>

namespace speedrun {

constexpr const char* kCauseVariable = "SPEEDRUN_CAUSE_PIPE";  // the descriptor of the pipe's reading end

// Call before anything of this process can fail: the pipe must not reach programs that this process starts.
void open_cause_pipe(bool launched_here);

// True for the first process of the run that asks; always true without a pipe.
bool may_tell_cause();

void print_cause(const std::string& line);  // "speedrun: " and the line in one write

std::string one_line(const std::string& text);

}  // namespace speedrun
