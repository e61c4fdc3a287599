#include "src/dist/cause.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "src/core/text.h"

namespace speedrun {
namespace {

int cause_pipe = -1;

}  // namespace

void open_cause_pipe(bool launched_here) {
  const char* text = std::getenv(kCauseVariable);
  if (!launched_here || text == nullptr || cause_pipe >= 0) return;
  int descriptor = -1;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), descriptor);
  struct stat status {};
  if (error != std::errc() || *end != '\0' || fstat(descriptor, &status) != 0 || !S_ISFIFO(status.st_mode)) return;
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  cause_pipe = descriptor;
}

bool may_tell_cause() {
  char token;
  return cause_pipe < 0 || read(cause_pipe, &token, 1) == 1;
}

void print_cause(const std::string& line) {
  const std::string text = "speedrun: " + line + "\n";
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;  // nobody to tell
}

std::string one_line(const std::string& text) {
  std::string line = text;
  for (char& c : line) {
    if (is_control(c)) c = ' ';
  }
  return line;
}

}  // namespace speedrun
