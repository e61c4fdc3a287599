#pragma once
// A tensor of the run's state on its way to or from the host, for checkpoints. A large one is never whole in host memory: it goes
// piece by piece through buffers that are used again, since memory touched for the first time costs more than the copy into it.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"

namespace speedrun {

// Most bytes of one piece; a multiple of every element's size.
inline constexpr size_t kPieceBytes = size_t{4} << 20;

// Where the bytes of a tensor go, in their order.
class PieceSink {
 public:
  virtual ~PieceSink() = default;
  virtual std::byte* space(size_t bytes) = 0;  // for the next piece, aligned for any element, until filled() is called
  virtual void filled() = 0;                   // the piece is there
};

// Hands every piece to `use`.
class EachPiece : public PieceSink {
 public:
  explicit EachPiece(std::function<void(std::span<const std::byte>)> use) : use_(std::move(use)) {}
  std::byte* space(size_t bytes) override {
    piece_.resize(bytes);
    return piece_.data();
  }
  void filled() override { use_(piece_); }

 private:
  std::function<void(std::span<const std::byte>)> use_;
  std::vector<std::byte> piece_;  // used again
};

// Parameters appear as FP32 masters, whatever their form on the device, so that a checkpoint made on a GPU can be evaluated on a
// CPU.
struct StateEntry {
  std::string name;  // "parameter/wte", "adam.m/wte", …
  DType dtype;
  std::vector<int64_t> shape;
  // Both synchronous. read_to: with several ranks all of them call it, in the same order, and the sinks of all but rank 0 are left
  // alone.
  std::function<void(PieceSink&)> read_to;
  // One piece, whole elements, from byte `begin` of the tensor; on every rank.
  std::function<void(size_t begin, std::span<const std::byte> piece)> write_piece;

  size_t bytes() const;
  // All at once, for small states and tests: read as read_to (nothing on other ranks); write checks the size.
  std::vector<std::byte> read() const;
  void write(std::span<const std::byte> whole) const;
};

// For a tensor that host memory has anyway: read gives it whole, nothing on ranks that do not have it; write gets it in one piece.
StateEntry small_entry(std::string name, DType dtype, std::vector<int64_t> shape, std::function<std::vector<std::byte>()> read,
                       std::function<void(const std::vector<std::byte>&)> write);

}  // namespace speedrun
