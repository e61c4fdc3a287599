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
  void write_at(uint64_t offset, const void* data, size_t bytes);  // from any thread
  // What was written there may go to the disk now, so that commit() has less to wait for; from any thread.
  void begin_flush(uint64_t offset, size_t bytes);
  void commit();  // fsync, rename, fsync of the folder

 private:
  [[noreturn]] void fail(const char* action) const;
  std::string path_, temporary_;
  int descriptor_ = -1;
};

// A file that is read at any place, by any number of threads.
class RandomAccessFile {
 public:
  explicit RandomAccessFile(const std::string& path);
  ~RandomAccessFile();
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  bool read_at(uint64_t offset, void* data, size_t bytes) const;  // false: the file ends before, or the disk fails

 private:
  int descriptor_;
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

// The same hash of data that comes in pieces, however it is cut.
class HashBytes {
 public:
  explicit HashBytes(uint64_t seed = 0);
  void add(const void* data, size_t bytes);
  uint64_t value() const;  // of all that was added

 private:
  static constexpr size_t kBlock = 32;
  void mix(const unsigned char* from, size_t blocks);

  uint64_t lanes_[4];
  uint64_t bytes_ = 0;
  unsigned char rest_[kBlock];  // bytes_ % kBlock bytes, of a block not yet whole
};

}  // namespace speedrun
