#include "src/core/log.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {

Log::Log(Terminal terminal)
    : stream_(terminal == Terminal::standard_output ? stdout : stderr), terminal_(isatty(fileno(stream_)) != 0) {}

Log::~Log() {
  end_progress();
  if (file_ != nullptr) std::fclose(file_);
}

void Log::open(const std::string& path, bool append) {
  file_ = std::fopen(path.c_str(), append ? "a" : "w");
  if (file_ == nullptr) throw Error(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
  path_ = path;
  to_file(backlog_);
  backlog_.clear();
}

void Log::to_file(const std::string& text) {
  if (file_ == nullptr) {
    backlog_ += text;
    return;
  }
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0) {
    throw Error(fmt::format("{}: cannot be written: {}", path_, std::strerror(errno)));
  }
}

void Log::end_progress() {
  if (progress_width_ == 0) return;
  std::fputc('\n', stream_);
  progress_width_ = 0;
}

void Log::line(const std::string& text) {
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
