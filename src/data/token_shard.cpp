#include "src/data/token_shard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string_view>
#include <utility>

#include "kernels/base/error.h"
#include "src/core/text.h"

namespace speedrun {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are read in place");

constexpr const char* kHowToGetShards = "make shards with `speedrun data tokenize` or fetch GPT-2 shards (see data/README.md)";

// A file descriptor that closes itself.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string error_text(int error) { return std::strerror(error); }

// Which kind of open() failure it is: a wrong path is the user's, a full descriptor table the machine's.
[[noreturn]] void throw_open_error(const std::string& path, int error) {
  const std::string message = fmt::format("shard {}: cannot open: {}", quoted_path(path), error_text(error));
  constexpr std::array kUserErrors = {ENOENT, EACCES, EPERM, ENOTDIR, ELOOP, ENAMETOOLONG, ENXIO, EISDIR};
  if (std::find(kUserErrors.begin(), kUserErrors.end(), error) != kUserErrors.end()) throw InputError(message);
  throw Error(message);
}

struct KnownMagic {
  uint32_t value;
  const char* what;
};
// The other binary files of llm.c: same header shape, other magic.
constexpr std::array kOtherMagics = {
    KnownMagic{20240801, "a shard of 32-bit Llama-3 tokens; this program reads 16-bit GPT-2 tokens"},
    KnownMagic{20240522, "llm.c's multiple-choice evaluation file (HellaSwag), not a token shard"},
    KnownMagic{20240326, "an llm.c model checkpoint, not a token shard"},
    KnownMagic{20240803, "an llm.c Llama-3 model checkpoint, not a token shard"},
    KnownMagic{20240327, "an llm.c debug state, not a token shard"},
    KnownMagic{20240527, "an llm.c training state, not a token shard"},
    KnownMagic{20240328, "an llm.c tokenizer file, not a token shard"},
};

struct KnownStart {
  std::string_view bytes;
  const char* what;
};
constexpr std::array kOtherStarts = {
    KnownStart{"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded"},
    KnownStart{"<!DOCTYPE", "an HTML page: the download went wrong"},
    KnownStart{"<!doctype", "an HTML page: the download went wrong"},
    KnownStart{"<html", "an HTML page: the download went wrong"},
    KnownStart{"\x1f\x8b", "a gzip file: unpack it"},
    KnownStart{"\x28\xb5\x2f\xfd", "a zstd file: unpack it"},
    KnownStart{"PK\x03\x04", "a zip file: unpack it"},
    KnownStart{"PAR1", "a Parquet file: it holds text, not tokens"},
    KnownStart{"\x93NUMPY", "a NumPy file"},
    KnownStart{"{", "a JSON or JSONL file: it holds text, not tokens"},
};

// What a file without the right magic is, as far as its first bytes tell.
std::string foreign_format(uint32_t magic, std::string_view start) {
  for (const KnownMagic& known : kOtherMagics) {
    if (magic == known.value) return known.what;
  }
  const uint32_t swapped = __builtin_bswap32(magic);
  if (swapped == static_cast<uint32_t>(kShardMagic))
    return "the right magic in big-endian byte order: the file was written byte-swapped";
  for (const KnownMagic& known : kOtherMagics) {
    if (swapped == known.value) return fmt::format("magic {} in big-endian byte order: {}", swapped, known.what);
  }
  for (const KnownStart& known : kOtherStarts) {
    if (start.starts_with(known.bytes)) return known.what;
  }
  return "an unknown format, or raw tokens without a header as nanoGPT writes them";
}

void write_all(int fd, const void* data, int64_t size, const std::string& path) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(fd, next, static_cast<size_t>(std::min<int64_t>(size, int64_t{1} << 30)));
    if (written < 0) {
      if (errno == EINTR) continue;
      throw Error(fmt::format("shard {}: cannot write: {}", quoted_path(path), error_text(errno)));
    }
    next += written;
    size -= written;
  }
}

// Removes a half-written file unless it was renamed.
struct TemporaryFile {
  std::string path;
  bool renamed = false;
  explicit TemporaryFile(std::string file) : path(std::move(file)) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!renamed) ::unlink(path.c_str());
  }
};

}  // namespace

std::string quoted_path(const std::string& path) {
  std::string text = "'";
  for (const char c : path) {
    if (is_control(c)) {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      text += c;
    }
  }
  return text + "'";
}

int64_t check_shard_header(std::span<const std::byte> file_start, int64_t file_bytes, const std::string& path) {
  const auto refuse = [&](const std::string& fault) -> void {
    throw InputError(fmt::format("shard {}: {}; {}", quoted_path(path), fault, kHowToGetShards));
  };
  if (file_bytes == 0) refuse("the file is empty (0 bytes), expected a header of 1024 bytes and tokens");
  const std::string_view start(reinterpret_cast<const char*>(file_start.data()), file_start.size());
  uint32_t magic = 0;
  std::memcpy(&magic, start.data(), std::min(sizeof magic, start.size()));
  if (magic != static_cast<uint32_t>(kShardMagic)) {
    refuse(fmt::format("expected magic {}, found {} (0x{:08x}): {}", kShardMagic, static_cast<int32_t>(magic), magic,
                       foreign_format(magic, start)));
  }
  if (file_bytes < kShardHeaderBytes) {
    refuse(fmt::format("expected a header of {} bytes, the file holds {} bytes in all: it was cut short", kShardHeaderBytes,
                       file_bytes));
  }
  int32_t header[3];
  require(file_start.size() >= sizeof header, "check_shard_header: ", file_start.size(), " bytes given of a file of ", file_bytes);
  std::memcpy(header, start.data(), sizeof header);
  const int32_t version = header[1];
  const int64_t count = header[2];
  if (version != kShardVersion) {
    refuse(fmt::format("expected version {}, found {}{}", kShardVersion, version,
                       version == 7 ? " (llm.c's mark of 32-bit tokens; this program reads 16-bit tokens)" : ""));
  }
  if (count < 1) refuse(fmt::format("expected at least 1 token, the header says {} tokens", count));
  const int64_t body_bytes = file_bytes - kShardHeaderBytes;
  if (body_bytes == count * kTokenBytes) return count;
  if (body_bytes == count * int64_t{sizeof(uint32_t)}) {
    refuse(fmt::format("the file holds 4 bytes for each of the header's {} tokens: 32-bit tokens; this program reads 16-bit tokens",
                       count));
  }
  const int64_t present = body_bytes / kTokenBytes;
  refuse(fmt::format(
      "the header says {} tokens ({} bytes in all), the file holds {} tokens{} ({} bytes in all): it {}", count,
      kShardHeaderBytes + count * kTokenBytes, present, body_bytes % kTokenBytes != 0 ? " and a half" : "", file_bytes,
      present < count ? "was cut short, fetch or make it again" : "is longer than its header says, it was not closed properly"));
  return 0;
}

TokenShard TokenShard::open(const std::string& path) {
  // Non-blocking, so that a named pipe is refused below instead of waited for.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) throw_open_error(path, errno);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) throw Error(fmt::format("shard {}: cannot stat: {}", quoted_path(path), error_text(errno)));
  if (S_ISDIR(info.st_mode)) {
    throw InputError(fmt::format("shard {}: expected a file, found a folder; name the shards in it, for example {}",
                                 quoted_path(path), quoted_path((std::filesystem::path(path) / "*.bin").string())));
  }
  if (!S_ISREG(info.st_mode)) {
    throw InputError(fmt::format("shard {}: expected a regular file, found a pipe, socket or device", quoted_path(path)));
  }
  const int64_t file_bytes = info.st_size;

  std::array<std::byte, kShardHeaderBytes> start{};
  int64_t num_read = 0;
  const int64_t wanted = std::min(file_bytes, kShardHeaderBytes);
  while (num_read < wanted) {
    const ssize_t got = ::pread(file.get(), start.data() + num_read, static_cast<size_t>(wanted - num_read), num_read);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(fmt::format("shard {}: cannot read: {}", quoted_path(path), error_text(errno)));
    if (got == 0) throw InputError(fmt::format("shard {}: the file became shorter while it was opened", quoted_path(path)));
    num_read += got;
  }

  TokenShard shard;
  shard.path_ = path;
  shard.num_tokens_ = check_shard_header(std::span(start).first(static_cast<size_t>(wanted)), file_bytes, path);
  void* mapping = ::mmap(nullptr, static_cast<size_t>(file_bytes), PROT_READ, MAP_SHARED, file.get(), 0);
  if (mapping == MAP_FAILED) {
    throw Error(fmt::format("shard {}: cannot map {} bytes: {}", quoted_path(path), file_bytes, error_text(errno)));
  }
  shard.mapping_ = mapping;
  shard.file_bytes_ = file_bytes;
  return shard;
}

TokenShard::TokenShard(TokenShard&& other) noexcept { *this = std::move(other); }

TokenShard& TokenShard::operator=(TokenShard&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(mapping_, other.mapping_);
  std::swap(file_bytes_, other.file_bytes_);
  std::swap(num_tokens_, other.num_tokens_);
  return *this;
}

TokenShard::~TokenShard() {
  if (mapping_ != nullptr) ::munmap(mapping_, static_cast<size_t>(file_bytes_));
}

std::span<const uint16_t> TokenShard::tokens() const {
  const auto* first = reinterpret_cast<const uint16_t*>(static_cast<const std::byte*>(mapping_) + kShardHeaderBytes);
  return {first, static_cast<size_t>(num_tokens_)};
}

void TokenShard::read_ahead() const { ::madvise(mapping_, static_cast<size_t>(file_bytes_), MADV_WILLNEED); }

void check_token_range(const TokenShard& shard, int64_t vocab_size, int64_t num_tokens) {
  constexpr size_t kBlock = 4096;  // small enough to be searched again, large enough for the maximum to vectorise
  const std::span<const uint16_t> tokens = shard.tokens().first(static_cast<size_t>(num_tokens));
  for (size_t begin = 0; begin < tokens.size(); begin += kBlock) {
    const std::span<const uint16_t> block = tokens.subspan(begin, std::min(kBlock, tokens.size() - begin));
    uint16_t largest = 0;
    for (const uint16_t token : block) largest = std::max(largest, token);
    if (largest < vocab_size) continue;
    const auto bad = std::find_if(block.begin(), block.end(), [&](uint16_t token) { return token >= vocab_size; });
    throw InputError(fmt::format(
        "shard {}: expected token ids 0 ... {} (vocabulary of {}), found id {} at token offset {}; the shard was made with "
        "another vocabulary, or is damaged (`speedrun data inspect` counts such ids)",
        quoted_path(shard.path()), vocab_size - 1, vocab_size, *bad, static_cast<int64_t>(begin) + (bad - block.begin())));
  }
}

void check_token_range(const TokenShard& shard, int64_t vocab_size) { check_token_range(shard, vocab_size, shard.num_tokens()); }

void write_shard(const std::string& path, std::span<const uint16_t> tokens) {
  if (tokens.empty() || tokens.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    throw InputError(fmt::format("shard {}: expected 1 ... {} tokens, got {}", quoted_path(path),
                                 std::numeric_limits<int32_t>::max(), tokens.size()));
  }
  std::array<int32_t, 256> header{};
  header[0] = kShardMagic;
  header[1] = kShardVersion;
  header[2] = static_cast<int32_t>(tokens.size());
  static_assert(sizeof header == kShardHeaderBytes);

  TemporaryFile temporary(fmt::format("{}.{}.tmp", path, ::getpid()));
  {
    const FileDescriptor file(::open(temporary.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file.get() < 0) throw Error(fmt::format("shard {}: cannot create: {}", quoted_path(temporary.path), error_text(errno)));
    write_all(file.get(), header.data(), kShardHeaderBytes, temporary.path);
    write_all(file.get(), tokens.data(), static_cast<int64_t>(tokens.size_bytes()), temporary.path);
    if (::fsync(file.get()) != 0)
      throw Error(fmt::format("shard {}: cannot write: {}", quoted_path(temporary.path), error_text(errno)));
  }
  if (::rename(temporary.path.c_str(), path.c_str()) != 0) {
    throw Error(
        fmt::format("shard {}: cannot rename {} to it: {}", quoted_path(path), quoted_path(temporary.path), error_text(errno)));
  }
  temporary.renamed = true;
  // The new name must be on disk too; some file systems cannot sync a folder, and there it is as good as it gets.
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const FileDescriptor parent(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.get() >= 0) ::fsync(parent.get());
}

}  // namespace speedrun
