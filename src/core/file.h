#pragma once
// Files that are whole or absent: written beside, flushed to the disk, renamed.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace speedrun {

std::string read_file(const std::string& path);  // throws InputError naming the path

// Writes to `path`.tmp and renames on commit(); an AtomicFile that dies without commit leaves nothing behind. Throws Error naming
// path and reason (a full disk included).
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void write_at(uint64_t offset, const void* data, size_t bytes);
  void commit();  // fsync, rename, fsync of the folder

 private:
  [[noreturn]] void fail(const char* action) const;
  std::string path_, temporary_;
  int descriptor_ = -1;
};

// Text that grows, each piece on its way to the disk when write() returns: logs and metrics. Throws Error naming path and reason.
class AppendedFile {
 public:
  enum class Mode { append, replace };
  AppendedFile(const std::string& path, Mode mode);
  ~AppendedFile();
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  void write(const std::string& text);

 private:
  [[noreturn]] void fail() const;
  std::string path_;
  std::FILE* file_;
};

void write_file_atomically(const std::string& path, const std::string& content);

// 64-bit non-cryptographic hash (multiply and rotate over 8-byte words), for checksums and comparisons of state.
uint64_t hash_bytes(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace speedrun
