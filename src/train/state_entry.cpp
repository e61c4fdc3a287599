#include "src/train/state_entry.h"

#include <algorithm>
#include <utility>

#include "kernels/base/error.h"

namespace speedrun {

size_t StateEntry::bytes() const {
  size_t bytes = dtype_size(dtype);
  for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
  return bytes;
}

std::vector<std::byte> StateEntry::read() const {
  std::vector<std::byte> whole;
  EachPiece sink([&](std::span<const std::byte> piece) {
    whole.reserve(bytes());
    whole.insert(whole.end(), piece.begin(), piece.end());
  });
  read_to(sink);
  return whole;
}

void StateEntry::write(std::span<const std::byte> whole) const {
  require(whole.size() == bytes(), "internal: ", whole.size(), " bytes for ", name, ", which has ", bytes());
  for (size_t begin = 0; begin < whole.size(); begin += kPieceBytes)
    write_piece(begin, whole.subspan(begin, std::min(kPieceBytes, whole.size() - begin)));
}

StateEntry small_entry(std::string name, DType dtype, std::vector<int64_t> shape, std::function<std::vector<std::byte>()> read,
                       std::function<void(const std::vector<std::byte>&)> write) {
  StateEntry entry{std::move(name), dtype, std::move(shape), nullptr, nullptr};
  entry.read_to = [read = std::move(read)](PieceSink& sink) {
    const std::vector<std::byte> whole = read();
    if (whole.empty()) return;
    std::copy(whole.begin(), whole.end(), sink.space(whole.size()));
    sink.filled();
  };
  entry.write_piece = [write = std::move(write), size = entry.bytes()](size_t begin, std::span<const std::byte> piece) {
    require(begin == 0 && piece.size() == size, "internal: a small entry comes in pieces");
    write({piece.begin(), piece.end()});
  };
  return entry;
}

}  // namespace speedrun
