#include "src/core/memory_plan.h"

#include <algorithm>
#include <map>

#include "fmt/format.h"

namespace speedrun {
namespace {

constexpr size_t kAlignment = 256;

std::string size_text(size_t bytes) {
  const double mb = static_cast<double>(bytes) * 1e-6;
  return mb >= 1000 ? fmt::format("{:.2f} GB", mb * 1e-3) : fmt::format("{:.2f} MB", mb);
}

}  // namespace

void MemoryPlan::add_bytes(const std::string& category, void** slot, size_t bytes) {
  entries_.push_back({category, slot, bytes, total_});
  total_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<std::pair<std::string, size_t>> MemoryPlan::by_category() const {
  std::map<std::string, size_t> sums;
  for (const Entry& entry : entries_) sums[entry.category] += entry.bytes;
  std::vector<std::pair<std::string, size_t>> rows(sums.begin(), sums.end());
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return rows;
}

std::string MemoryPlan::table() const {
  std::string text;
  for (const auto& [category, bytes] : by_category()) text += fmt::format("  {:>10}  {}\n", size_text(bytes), category);
  return text + fmt::format("  {:>10}  in all", size_text(total_));
}

void MemoryPlan::check(const Device& device, const std::string& advice) const {
  const MemoryInfo memory = device.memory();
  if (total_ <= memory.free_bytes) return;
  std::string parts;
  for (const auto& [category, bytes] : by_category())
    parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", category, size_text(bytes));
  throw InputError(fmt::format("not enough memory on {}: {} needed, {} free of {}; {} (the plan: {})", device.name(),
                               size_text(total_), size_text(memory.free_bytes), size_text(memory.total_bytes), advice, parts));
}

Arena::Arena(Device& device, const MemoryPlan& plan) : device_(device) {
  memory_ = device.allocate(std::max<size_t>(plan.total_, 1));
  for (const MemoryPlan::Entry& entry : plan.entries_) {
    *entry.slot = entry.bytes == 0 ? nullptr : static_cast<char*>(memory_) + entry.offset;
  }
}

Arena::~Arena() { device_.free(memory_); }

}  // namespace speedrun
