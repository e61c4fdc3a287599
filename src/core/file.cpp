#include "src/core/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {

std::string read_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw InputError(path + ": is a folder, expected a file");
  FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) throw InputError(fmt::format("{}: cannot be read: {}", path, std::strerror(errno)));
  std::string content;
  char block[1 << 16];
  for (size_t n = 0; (n = std::fread(block, 1, sizeof block, file)) > 0;) content.append(block, n);
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) throw InputError(path + ": cannot be read to its end");
  return content;
}

AtomicFile::AtomicFile(const std::string& path) : path_(path), temporary_(path + ".tmp") {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("be created");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* action) const {
  throw Error(fmt::format("{}: cannot {}: {}", path_, action, std::strerror(errno)));
}

void AtomicFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(descriptor_, from, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("be written");
    from += n;
    bytes -= static_cast<size_t>(n);
  }
}

void AtomicFile::write_at(uint64_t offset, const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(descriptor_, from, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("be written");
    from += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

void AtomicFile::begin_flush(uint64_t offset, size_t bytes) {
  // A file system that knows no such thing waits in commit() instead.
  static_cast<void>(::sync_file_range(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE));
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("be flushed to the disk");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("be renamed into place");
  ::close(descriptor_);
  descriptor_ = -1;
  const std::string folder = std::filesystem::absolute(path_).parent_path().string();
  if (const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); fd >= 0) {
    ::fsync(fd);  // makes the rename itself durable; a file system that cannot is no reason to stop
    ::close(fd);
  }
}

RandomAccessFile::RandomAccessFile(const std::string& path) : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

RandomAccessFile::~RandomAccessFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool RandomAccessFile::read_at(uint64_t offset, void* data, size_t bytes) const {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(descriptor_, to, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    to += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

AppendedFile::AppendedFile(const std::string& path, Mode mode)
    : path_(path), file_(std::fopen(path.c_str(), mode == Mode::append ? "a" : "w")) {
  if (file_ == nullptr) fail();
}

AppendedFile::~AppendedFile() { std::fclose(file_); }

void AppendedFile::fail() const { throw Error(fmt::format("{}: cannot be written: {}", path_, std::strerror(errno))); }

void AppendedFile::write(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0) fail();
}

void write_file_atomically(const std::string& path, const std::string& content) {
  AtomicFile file(path);
  file.write(content.data(), content.size());
  file.commit();
}

namespace {

constexpr uint64_t kMultiply = 0x9E3779B97F4A7C15u, kMix = 0xBF58476D1CE4E5B9u;

}  // namespace

HashBytes::HashBytes(uint64_t seed) : lanes_{seed + kMultiply, seed ^ kMix, seed * 3 + 1, ~seed} {}

void HashBytes::mix(const unsigned char* from, size_t blocks) {
  // Four lanes keep the multiplies independent: about 8 bytes a cycle.
  uint64_t lanes[4] = {lanes_[0], lanes_[1], lanes_[2], lanes_[3]};
  for (size_t block = 0; block < blocks; ++block, from += kBlock) {
    for (int lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, from + 8 * lane, 8);
      lanes[lane] = std::rotl((lanes[lane] ^ word) * kMultiply, 29);
    }
  }
  std::copy(lanes, lanes + 4, lanes_);
}

void HashBytes::add(const void* data, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  const size_t held = bytes_ % kBlock;
  bytes_ += bytes;
  if (held != 0) {
    const size_t missing = std::min(kBlock - held, bytes);
    std::copy(from, from + missing, rest_ + held);
    if (held + missing < kBlock) return;
    mix(rest_, 1);
    from += missing;
    bytes -= missing;
  }
  mix(from, bytes / kBlock);
  std::copy(from + bytes / kBlock * kBlock, from + bytes, rest_);
}

uint64_t HashBytes::value() const {
  uint64_t hash = bytes_;
  for (const uint64_t lane : lanes_) hash = std::rotl((hash ^ lane) * kMix, 31) + kMultiply;
  for (size_t i = 0; i < bytes_ % kBlock; ++i) hash = std::rotl((hash ^ rest_[i]) * kMultiply, 27);
  hash = (hash ^ (hash >> 30)) * kMix;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
  return hash ^ (hash >> 31);
}

uint64_t hash_bytes(const void* data, size_t bytes, uint64_t seed) {
  HashBytes hash(seed);
  hash.add(data, bytes);
  return hash.value();
}

}  // namespace speedrun
