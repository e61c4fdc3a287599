// Fuzzes reading a checkpoint: whatever the file holds, it is refused with an InputError of one line, or its sections have the
// sizes that their types and shapes say. A checksum guards the header, so the input is tried as it is, as the header of a file
// whose checksum is right, and as the sections of one.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "src/core/file.h"
#include "src/train/checkpoint.h"

namespace {

using namespace speedrun;

// A file in memory: it ends with the process, however that ends.
const std::filesystem::path& file_path() {
  static const std::filesystem::path path = "/proc/self/fd/" + std::to_string(memfd_create("checkpoint", MFD_CLOEXEC));
  return path;
}

std::vector<StateEntry> state() {
  const auto entry = [](const char* name, DType dtype, std::vector<int64_t> shape, size_t bytes) {
    return small_entry(
        name, dtype, std::move(shape), [bytes] { return std::vector<std::byte>(bytes); },
        [bytes](const std::vector<std::byte>& data) {
          if (data.size() != bytes) std::abort();
        });
  };
  return {entry("parameter/a", DType::f32, {2, 3}, 24), entry("adam.m/a", DType::bf16, {6}, 12)};
}

template <class Read>
void one_line_or_none(const Read& read) {
  try {
    read();
  } catch (const InputError& error) {
    if (std::string(error.what()).find('\n') != std::string::npos) std::abort();
  }
}

void read_everything(const std::string& content) {
  std::ofstream(file_path(), std::ios::binary) << content;
  one_line_or_none([] { read_checkpoint_meta(file_path()); });
  one_line_or_none([] { verify_checkpoint(file_path()); });
  one_line_or_none([] { load_checkpoint(file_path(), state(), true); });
  one_line_or_none([] { load_checkpoint(file_path(), state(), false); });
}

std::string with_prefix(const std::string& header, const std::string& rest) {
  const uint64_t numbers[2] = {header.size(), hash_bytes(header.data(), header.size())};
  return "speedrun ckpt 1\n" + std::string(reinterpret_cast<const char*>(numbers), sizeof numbers) + header + rest;
}

// A good checkpoint, which the damaged ones start from.
const std::string& good() {
  static const std::string content = [] {
    const auto path = std::filesystem::temp_directory_path() / ("checkpoint_fuzz_" + std::to_string(getpid()));
    write_checkpoint(path, CheckpointMeta{.step = 7, .reader = {1, 2, 3}, .config = "{}", .shards_hash = "0"}, state());
    std::string bytes = read_file(path.string());
    std::filesystem::remove(path);
    return bytes;
  }();
  return content;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::ofstream(file_path(), std::ios::binary) << good();
  load_checkpoint(file_path(), state(), false);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  read_everything(text);
  read_everything(with_prefix(text, std::string(256, 'x')));
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, good().data() + 16, sizeof header_bytes);
  const std::string header = good().substr(32, header_bytes);
  read_everything(with_prefix(header, text));
  // Bytes of the good header replaced: the first two of the input say where.
  if (size < 3) return 0;
  const size_t at = (data[0] + 256u * data[1]) % header.size();
  std::string changed = header;
  changed.replace(at, size - 2, text.substr(2));
  read_everything(with_prefix(changed, good().substr(32 + header_bytes)));
  return 0;
}
