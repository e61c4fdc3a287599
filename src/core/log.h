#pragma once
// What the terminal shows, kept in a file too. One Log per run, passed down; nothing below src/train prints.
#include <cstdio>
#include <optional>
#include <string>

#include "src/core/file.h"

namespace speedrun {

class Log {
 public:
  enum class Terminal { standard_output, standard_error, none };  // none: of the ranks but one
  explicit Log(Terminal terminal = Terminal::standard_output);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  void open(const std::string& path,
            bool append);                  // into this file too, with all lines so far; throws Error, as line and progress may then
  void line(const std::string& text);      // to the terminal and the file
  void progress(const std::string& text);  // a line that the next progress line replaces on a terminal; plain lines elsewhere
  double progress_interval_s() const { return terminal_ ? 0.1 : 5; }  // the least time between two progress lines
  void warn(const std::string& text) { line("warning: " + text); }

 private:
  void end_progress();
  void to_file(const std::string& text);
  std::FILE* stream_;
  std::optional<AppendedFile> file_;
  std::string backlog_;  // lines from before the file was opened
  bool terminal_ = false;
  size_t progress_width_ = 0;
};

}  // namespace speedrun
