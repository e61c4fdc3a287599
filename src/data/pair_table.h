#pragma once
// Hash table from a pair of token ids to the id of the token that their bytes form together.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace speedrun {

class PairTable {
 public:
  static constexpr uint16_t kNone = 0xffff;  // no token of GPT-2 has this id

  PairTable() = default;
  explicit PairTable(size_t max_pairs) {
    size_t capacity = 16;
    while (capacity < 2 * max_pairs) capacity *= 2;
    slots_.assign(capacity, Slot{});
  }

  void insert(uint16_t left, uint16_t right, uint16_t merged) {
    Slot& slot = slots_[index_of(left, right)];
    slot = {left, right, merged};
  }

  uint16_t find(uint16_t left, uint16_t right) const { return slots_[index_of(left, right)].merged; }

 private:
  struct Slot {
    uint16_t left = 0, right = 0;
    uint16_t merged = kNone;  // kNone marks an empty slot
  };

  // The pair's slot, or the empty one where it would go: at most half the slots are taken.
  size_t index_of(uint16_t left, uint16_t right) const {
    const uint64_t pair = static_cast<uint64_t>(left) << 16 | right;
    const size_t mask = slots_.size() - 1;
    size_t index = static_cast<size_t>((pair * 0x9e3779b97f4a7c15ull) >> 32) & mask;
    while (slots_[index].merged != kNone && (slots_[index].left != left || slots_[index].right != right))
      index = (index + 1) & mask;
    return index;
  }

  std::vector<Slot> slots_;
};

}  // namespace speedrun
