#pragma once
// All device memory of a run, planned before any of it is taken: parts announce what they need, the plan prints itself, refuses
// what does not fit, and then makes one allocation and hands out the views.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/core/device.h"

namespace speedrun {

class MemoryPlan {
 public:
  // Asks for `count` elements; *slot points to them (zeroed, 256-byte aligned) after allocate(). The slot must not move until then.
  template <class T>
  void add(const std::string& category, T** slot, int64_t count) {
    add_bytes(category, reinterpret_cast<void**>(slot), static_cast<size_t>(count) * sizeof(T));
  }
  void add_bytes(const std::string& category, void** slot, size_t bytes);

  size_t total_bytes() const { return total_; }
  std::string table() const;  // one line a category, largest first, then the sum

  // Throws InputError, one line with every part and `advice` (which keys to change), if the device has less free memory than the
  // plan needs.
  void check(const Device& device, const std::string& advice) const;

 private:
  friend class Arena;
  std::vector<std::pair<std::string, size_t>> by_category() const;  // bytes, largest first
  struct Entry {
    std::string category;
    void** slot;
    size_t bytes, offset;
  };
  std::vector<Entry> entries_;
  size_t total_ = 0;
};

// The one allocation behind a plan. The views die with it.
class Arena {
 public:
  Arena(Device& device, const MemoryPlan& plan);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

 private:
  Device& device_;
  void* memory_ = nullptr;
};

}  // namespace speedrun
