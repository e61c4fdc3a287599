// Fuzzes the header check: whatever the bytes of a file are, it is accepted with the right number of tokens or refused by an
// InputError of one line. The input's first 8 bytes choose the size of the file, the rest is its start.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "kernels/base/error.h"
#include "src/data/token_shard.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace speedrun;
  uint64_t chosen = 0;
  if (size < sizeof chosen) return 0;
  std::memcpy(&chosen, data, sizeof chosen);
  const std::span<const std::byte> start(reinterpret_cast<const std::byte*>(data) + sizeof chosen, size - sizeof chosen);
  // A small file as it is, or the header of one of any size.
  const auto given = static_cast<int64_t>(start.size());
  const int64_t file_bytes = given < kShardHeaderBytes ? given : std::max(given, static_cast<int64_t>(chosen >> 1));
  const auto header = start.first(static_cast<size_t>(std::min(given, kShardHeaderBytes)));
  try {
    const int64_t count = check_shard_header(header, file_bytes, "fuzz.bin");
    if (count < 1 || kShardHeaderBytes + count * kTokenBytes != file_bytes) std::abort();
  } catch (const InputError& error) {
    if (std::string(error.what()).find('\n') != std::string::npos) std::abort();
  }
  return 0;
}
