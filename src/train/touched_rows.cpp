#include "src/train/touched_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "fmt/format.h"
#include "kernels/embedding/bigram_hash.h"

namespace speedrun {
namespace {

constexpr int64_t kBits = 64;  // of a word of marks
constexpr int64_t kCapacityMultiple = 128;
// Lists on their way: enough that the ring of batches is what the host waits for.
constexpr size_t kSlots = 4;

}  // namespace

// Measured on English text in GPT-2's tokens: n tokens have about n·(n / 4,500)^(−1/6) different bigrams, n from 32,768 to 393,216
// (0.72 n to 0.475 n in the worst of 60 batches, 10% above their mean); hashing lets some of them share a row.
int64_t touched_rows_capacity(const SparseRowsShape& shape, int64_t tokens) {
  constexpr double kAllDifferent = 4500, kExponent = -1.0 / 6, kMargin = 1.2;
  const auto n = static_cast<double>(tokens), rows = static_cast<double>(shape.V);
  const double bigrams = kMargin * n * std::pow(std::max(n / kAllDifferent, 1.0), kExponent);
  const double touched = rows * -std::expm1(-bigrams / rows);
  SparseRowsShape sparse = shape;
  sparse.rows_per_owner = static_cast<int64_t>(touched) / shape.ranks / kCapacityMultiple * kCapacityMultiple + kCapacityMultiple;
  return sparse_rows_bytes(sparse) < dense_rows_bytes(sparse) ? sparse.rows_per_owner : 0;
}

TouchedRows::TouchedRows(Device& device, Control& control, int64_t V, std::vector<int64_t> capacities)
    : device_(device),
      control_(control),
      V_(V),
      capacities_(std::move(capacities)),
      marks_(static_cast<size_t>((V + kBits - 1) / kBits)) {
  rows_.reserve(static_cast<size_t>(V));
}

void TouchedRows::allocate() {
  const auto count = static_cast<size_t>(1 + control_.size() * largest_capacity());
  for (size_t i = 0; i < kSlots; ++i) slots_.push_back({HostBuffer<int32_t>(device_, count), device_.make_event()});
}

int64_t TouchedRows::largest_capacity() const { return *std::max_element(capacities_.begin(), capacities_.end()); }

int64_t TouchedRows::submit(const StepRows& rows, int stage, bool updates, int32_t* list) {
  mark(rows);
  if (!updates) return 0;
  collect();
  const bool known = known_;
  known_ = true;
  if (capacity(stage) == 0) return 0;
  const bool fits = known && rows_per_owner_max(rows_, V_, control_.size()) <= capacity(stage);
  if (control_.any(!fits)) {
    ++dense_updates_;
    return 0;
  }
  send(list);
  ++sparse_updates_;
  return capacity(stage);
}

void TouchedRows::mark(const StepRows& rows) {
  const int32_t* inputs = rows.inputs.data();
  for (int64_t row = 0, t = 0; row < rows.num_rows; ++row) {
    for (int64_t position = 0; position < rows.row_tokens; ++position, ++t) {
      const int64_t index = kernels::bigram_rows(inputs, t, position, static_cast<int>(V_), 0).index;
      marks_[static_cast<size_t>(index / kBits)] |= uint64_t{1} << (index % kBits);
    }
  }
}

void TouchedRows::collect() {
  rows_.clear();
  for (size_t word = 0; word < marks_.size(); ++word) {
    for (uint64_t bits = std::exchange(marks_[word], 0); bits != 0; bits &= bits - 1)
      rows_.push_back(static_cast<int32_t>(static_cast<int64_t>(word) * kBits + std::countr_zero(bits)));
  }
}

void TouchedRows::send(int32_t* list) {
  Slot& slot = slots_[sent_++ % kSlots];
  slot.sent->wait();
  slot.list[0] = static_cast<int32_t>(rows_.size());
  std::copy(rows_.begin(), rows_.end(), slot.list.data() + 1);
  device_.copy_in(list, slot.list.data(), (1 + rows_.size()) * sizeof(int32_t));
  slot.sent->record();
}

std::string TouchedRows::note() const {
  std::string stages;
  for (const int64_t rows : capacities_) {
    if (!stages.empty()) stages += ", ";
    stages += rows == 0 ? std::string("all") : fmt::format("{}", rows);
  }
  return fmt::format(
      "gradient of the bigram table: touched rows alone, by stage up to {} from each rank to each other ({} rows each)", stages,
      V_ / control_.size());
}

}  // namespace speedrun
