#include "src/data/document_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "kernels/base/error.h"
#include "src/data/token_shard.h"

namespace speedrun {
namespace {

constexpr size_t kReadBytes = size_t{4} << 20;

}  // namespace

bool DocumentSource::next(SourceDocument& document) {
  while (true) {
    size_t searched = begin_;
    while (true) {
      const size_t found = separator_.empty() ? std::string::npos : buffer_.find(separator_, searched);
      const bool last = found == std::string::npos && at_end_;
      if (last && begin_ == buffer_.size()) break;
      if (last || found != std::string::npos) {
        const size_t end = last ? buffer_.size() : found;
        document.bytes.assign(buffer_, begin_, end - begin_);
        document.file = files_opened_ - 1;
        document.number = ++number_;
        begin_ = last ? end : end + separator_.size();
        return true;
      }
      // A separator may lie across the border of what is read next.
      const size_t unsearched = std::min(separator_.empty() ? 0 : separator_.size() - 1, buffer_.size() - begin_);
      searched = buffer_.size() - unsearched - begin_;
      read_more();
    }
    if (files_opened_ == paths_.size()) return false;
    open_next_file();
  }
}

void DocumentSource::open_next_file() {
  const std::string& path = paths_[files_opened_];
  if (std::filesystem::is_directory(path))
    throw InputError(fmt::format("{}: is a folder; expected a text file", quoted_path(path)));
  file_ = std::ifstream(path, std::ios::binary);
  if (!file_) throw InputError(fmt::format("{}: cannot be read: {}", quoted_path(path), std::strerror(errno)));
  ++files_opened_;
  buffer_.clear();
  begin_ = 0;
  number_ = 0;
  at_end_ = false;
  read_more();
  if (buffer_.starts_with("\xff\xfe") || buffer_.starts_with("\xfe\xff")) {
    throw InputError(fmt::format("{}: is UTF-16 text; expected UTF-8 (convert it: iconv -f UTF-16 -t UTF-8)", quoted_path(path)));
  }
  if (buffer_.starts_with("\xef\xbb\xbf")) begin_ = 3;
}

// Appends the next part of the file, and drops what was given out already.
void DocumentSource::read_more() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const size_t held = buffer_.size();
  buffer_.resize(held + kReadBytes);
  file_.read(buffer_.data() + held, static_cast<std::streamsize>(kReadBytes));
  buffer_.resize(held + static_cast<size_t>(file_.gcount()));
  if (file_.bad()) throw Error(fmt::format("{}: reading failed: {}", quoted_path(paths_[files_opened_ - 1]), std::strerror(errno)));
  at_end_ = file_.eof();
}

}  // namespace speedrun
