#include "src/train/collected_state.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

using Bytes = std::vector<std::byte>;
using Held = StateTensor::Held;

// Of a tensor that is collected from the ranks, at once.
constexpr size_t kGatherBytes = size_t{64} << 20;

template <class A>
Bytes sum_of(const std::vector<Bytes>& of_ranks) {
  std::vector<A> sum(of_ranks.front().size() / sizeof(A)), one(sum.size());
  for (const Bytes& bytes : of_ranks) {
    std::memcpy(one.data(), bytes.data(), bytes.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
  }
  Bytes result(of_ranks.front().size());
  std::memcpy(result.data(), sum.data(), result.size());
  return result;
}

Bytes sum_of(const std::vector<Bytes>& of_ranks, DType dtype) {
  if (dtype == DType::f32) return sum_of<float>(of_ranks);
  require(dtype == DType::f64, "internal: a sum over ranks of ", dtype_name(dtype));
  return sum_of<double>(of_ranks);
}

}  // namespace

Bytes CollectedState::whole(Held held, DType dtype, const std::function<Bytes()>& read) {
  if (control_ == nullptr || held == Held::whole) return rank() == 0 ? read() : Bytes();
  const Bytes mine = read();
  std::vector<Bytes> of_ranks(static_cast<size_t>(control_->size()));
  // All ranks make as many turns, in which each may have something left or nothing.
  for (size_t first = 0; control_->any(first < mine.size()); first += kGatherBytes) {
    const auto begin = static_cast<ptrdiff_t>(std::min(first, mine.size())),
               end = static_cast<ptrdiff_t>(std::min(first + kGatherBytes, mine.size()));
    const std::vector<Bytes> pieces = control_->gather(Bytes(mine.begin() + begin, mine.begin() + end));
    for (size_t r = 0; r < pieces.size(); ++r) of_ranks[r].insert(of_ranks[r].end(), pieces[r].begin(), pieces[r].end());
  }
  if (rank() != 0) return {};
  if (held == Held::sum) return sum_of(of_ranks, dtype);
  Bytes result;
  for (const Bytes& part : of_ranks) result.insert(result.end(), part.begin(), part.end());
  return result;
}

Bytes CollectedState::whole(const StateTensor& tensor) {
  return whole(tensor.held, tensor.dtype, [&] {
    Bytes bytes(static_cast<size_t>(tensor.count) * dtype_size(tensor.dtype));
    device_.copy_out(bytes.data(), tensor.data, bytes.size());
    device_.synchronize();
    return bytes;
  });
}

void CollectedState::write(const StateTensor& tensor, const Bytes& whole) {
  const size_t size = static_cast<size_t>(tensor.count) * dtype_size(tensor.dtype);
  const size_t begin = tensor.held == Held::part ? static_cast<size_t>(tensor.begin) * dtype_size(tensor.dtype) : 0;
  if (tensor.held == Held::sum && rank() != 0) {
    device_.zero(tensor.data, size);  // rank 0 alone keeps a sum
  } else {
    device_.copy_in(tensor.data, whole.data() + begin, size);
  }
  device_.synchronize();
}

}  // namespace speedrun
