#include "src/core/log.h"

#include <unistd.h>

#include "fmt/format.h"

namespace speedrun {

Log::Log(Terminal terminal)
    : stream_(terminal == Terminal::standard_output  ? stdout
              : terminal == Terminal::standard_error ? stderr
                                                     : nullptr),
      terminal_(stream_ != nullptr && isatty(fileno(stream_)) != 0) {}

Log::~Log() { end_progress(); }

void Log::open(const std::string& path, bool append) {
  file_.emplace(path, append ? AppendedFile::Mode::append : AppendedFile::Mode::replace);
  file_->write(backlog_);
  backlog_.clear();
}

void Log::to_file(const std::string& text) {
  if (file_) {
    file_->write(text);
  } else {
    backlog_ += text;
  }
}

void Log::end_progress() {
  if (progress_width_ == 0) return;
  std::fputc('\n', stream_);
  progress_width_ = 0;
}

void Log::line(const std::string& text) {
  if (stream_ == nullptr) return;
  end_progress();
  fmt::print(stream_, "{}\n", text);
  std::fflush(stream_);
  to_file(text + "\n");
}

void Log::progress(const std::string& text) {
  if (!terminal_) {
    line(text);
    return;
  }
  fmt::print(stream_, "\r{:<{}}", text, progress_width_);
  std::fflush(stream_);
  progress_width_ = text.size();
  to_file(text + "\n");
}

}  // namespace speedrun
