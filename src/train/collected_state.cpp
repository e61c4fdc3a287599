#include "src/train/collected_state.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/error.h"
#include "src/dist/message.h"

namespace speedrun {
namespace {

using Held = StateTensor::Held;

// A rank sends without waiting for rank 0, which must not be flooded: after so many exchanges all wait for each other.
constexpr int64_t kExchangesAhead = 8;

// Calls body(first, n) for elements 0 … count−1, at most a piece at once.
template <class Body>
void for_pieces(int64_t count, DType dtype, const Body& body) {
  const auto at_once = static_cast<int64_t>(kPieceBytes / dtype_size(dtype));
  for (int64_t first = 0; first < count; first += at_once) body(first, std::min(at_once, count - first));
}

// In the order of the ranks, beginning with rank 0's, which lies in `sum`.
template <class A>
void add_ranks(const std::vector<Bytes>& of_ranks, int64_t n, std::byte* sum) {
  auto* total = reinterpret_cast<A*>(sum);
  for (int64_t i = 0; i < n; ++i) total[i] += A{0};  // a sum of zeros has no sign
  for (size_t r = 1; r < of_ranks.size(); ++r) {
    const auto* one = reinterpret_cast<const A*>(of_ranks[r].data());
    for (int64_t i = 0; i < n; ++i) total[i] += one[i];
  }
}

void add_ranks(const std::vector<Bytes>& of_ranks, DType dtype, int64_t n, std::byte* sum) {
  if (dtype == DType::f32) return add_ranks<float>(of_ranks, n, sum);
  require(dtype == DType::f64, "internal: a sum over ranks of ", dtype_name(dtype));
  add_ranks<double>(of_ranks, n, sum);
}

}  // namespace

std::vector<int64_t> CollectedState::counts_of_ranks(int64_t count) {
  MessageWriter all;
  for (const Bytes& one : control_->gather(MessageWriter().number(count).take())) all.number(MessageReader(one).number<int64_t>());
  const Bytes shared = control_->broadcast(all.take());
  MessageReader reader(shared);
  std::vector<int64_t> counts(static_cast<size_t>(control_->size()));
  for (int64_t& each : counts) each = reader.number<int64_t>();
  return counts;
}

// Elements first … first + n − 1 of the share of each rank but rank 0 that sends, by rank, on rank 0.
std::vector<Bytes> CollectedState::exchange(const Share& share, bool sends, int64_t first, int64_t n) {
  const size_t bytes = static_cast<size_t>(n) * dtype_size(share.dtype);
  message_.resize(sends && rank() != 0 ? bytes : 0);
  if (!message_.empty()) share.read(first, n, message_.data());
  std::vector<Bytes> pieces = control_->gather(message_);
  for (const Bytes& piece : pieces)
    require(piece.empty() || piece.size() == bytes, "internal: a piece of ", piece.size(), " bytes, expected ", bytes);
  if (++exchanges_ % kExchangesAhead == 0) control_->barrier();
  return pieces;
}

void CollectedState::read(const Share& share, PieceSink& sink) {
  const size_t element = dtype_size(share.dtype);
  const auto own_piece = [&](int64_t first, int64_t n) {
    share.read(first, n, sink.space(static_cast<size_t>(n) * element));
    sink.filled();
  };
  if (control_ == nullptr || share.held == Held::whole) {
    if (rank() == 0) for_pieces(share.count, share.dtype, own_piece);
    return;
  }
  const std::vector<int64_t> counts = counts_of_ranks(share.count);
  if (share.held == Held::sum) {
    for_pieces(counts[0], share.dtype, [&](int64_t first, int64_t n) {
      const std::vector<Bytes> pieces = exchange(share, true, first, n);
      if (rank() != 0) return;
      std::byte* to = sink.space(static_cast<size_t>(n) * element);
      share.read(first, n, to);
      add_ranks(pieces, share.dtype, n, to);
      sink.filled();
    });
    return;
  }
  if (rank() == 0) for_pieces(share.count, share.dtype, own_piece);
  for (int r = 1; r < control_->size(); ++r) {
    for_pieces(counts[static_cast<size_t>(r)], share.dtype, [&](int64_t first, int64_t n) {
      const std::vector<Bytes> pieces = exchange(share, r == rank(), first, n);
      if (rank() != 0) return;
      const Bytes& piece = pieces[static_cast<size_t>(r)];
      std::memcpy(sink.space(piece.size()), piece.data(), piece.size());
      sink.filled();
    });
  }
}

void CollectedState::read(const StateTensor& tensor, PieceSink& sink) {
  const auto* data = static_cast<const std::byte*>(tensor.data);
  const size_t element = dtype_size(tensor.dtype);
  const auto copy = [&](int64_t first, int64_t n, std::byte* to) {
    staging_.copy_out(to, data + static_cast<size_t>(first) * element, static_cast<size_t>(n) * element);
  };
  read({tensor.held, tensor.dtype, tensor.count, copy}, sink);
}

void CollectedState::write(const StateTensor& tensor, size_t begin, std::span<const std::byte> piece) {
  const size_t element = dtype_size(tensor.dtype);
  const size_t own_begin = tensor.held == Held::part ? static_cast<size_t>(tensor.begin) * element : 0;
  const size_t own_end = own_begin + static_cast<size_t>(tensor.count) * element;
  const size_t from = std::max(begin, own_begin), to = std::min(begin + piece.size(), own_end);
  if (from >= to) return;
  std::byte* device = static_cast<std::byte*>(tensor.data) + (from - own_begin);
  if (tensor.held == Held::sum && rank() != 0) {
    device_.zero(device, to - from);  // rank 0 alone keeps a sum
    device_.synchronize();
  } else {
    staging_.copy_in(device, piece.data() + (from - begin), to - from);
  }
}

}  // namespace speedrun
