#pragma once
// Errors of the whole program: thrown anywhere, caught once in main, printed as one line on stderr.
#include <sstream>
#include <stdexcept>
#include <string>

namespace speedrun {

// The process's exit code for each kind of failure.
enum class ExitCode : int {
  failure = 1,     // the machine's: file system, CUDA, memory
  bad_input = 2,   // the user's: config, flag, environment, data or checkpoint file
  non_finite = 3,  // training: a loss or gradient is not finite
};

// A failure with one line for the user: names the thing, what was expected, what was found and the way out.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitCode code = ExitCode::failure) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// Bad input from outside: exit code 2.
class InputError : public Error {
 public:
  explicit InputError(const std::string& message) : Error(message, ExitCode::bad_input) {}
};

// Throws Error(parts streamed one after the other) unless the condition holds. For what a caller may get wrong; never for checks
// whose message is costly to build in a hot loop (the parts are only streamed on failure, but their arguments are evaluated).
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace speedrun
