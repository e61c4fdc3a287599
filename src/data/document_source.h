#pragma once
// Cuts text files into documents or lines without holding a whole file in memory.
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace speedrun {

struct SourceDocument {
  std::string bytes;
  size_t file = 0;     // index in the list of files
  int64_t number = 0;  // in its file, from 1: the line if the separator is a line end
};

// The pieces between separators of one file after the other; what follows the last separator is a document unless it is empty. An
// empty separator makes each file one document. A UTF-8 byte order mark at a file's start is no text.
class DocumentSource {
 public:
  DocumentSource(std::vector<std::string> paths, std::string separator)
      : paths_(std::move(paths)), separator_(std::move(separator)) {}

  // False when all files are read. Throws InputError for a file that cannot be read or is UTF-16.
  bool next(SourceDocument& document);
  const std::string& path(size_t file) const { return paths_[file]; }

 private:
  void open_next_file();
  void read_more();

  std::vector<std::string> paths_;
  std::string separator_;
  std::ifstream file_;
  size_t files_opened_ = 0;
  bool at_end_ = true;  // the current file is read to its end
  std::string buffer_;  // read and not yet given out: from begin_ on
  size_t begin_ = 0;
  int64_t number_ = 0;
};

}  // namespace speedrun
