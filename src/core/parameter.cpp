#include "src/core/parameter.h"

#include <algorithm>

#include "kernels/base/error.h"
#include "kernels/base/host_parallel.h"
#include "src/core/file.h"
#include "src/core/random.h"

namespace speedrun {
namespace {

// Offsets are multiples of this many elements, so that every parameter is 128-byte aligned in BF16.
constexpr int64_t kOffsetAlignment = 64;
constexpr int64_t kDrawsAtOnce = 1 << 16;
// Values, then lower halves, in one buffer of the staging.
constexpr size_t kMastersAtOnce = HostStaging::kBufferBytes / (sizeof(bf16) + sizeof(uint16_t));

bf16* values_in(std::byte* buffer) { return reinterpret_cast<bf16*>(buffer); }
uint16_t* lows_in(std::byte* buffer) { return reinterpret_cast<uint16_t*>(buffer + kMastersAtOnce * sizeof(bf16)); }

// Calls body with the split as a constant: a loop that does not decide anew for every element is vectorised.
template <class Body>
void with_split(kernels::MasterSplit split, const Body& body) {
  using kernels::MasterSplit;
  switch (split) {
    case MasterSplit::nearest:
      return body(std::integral_constant<MasterSplit, MasterSplit::nearest>());
    case MasterSplit::truncated:
      return body(std::integral_constant<MasterSplit, MasterSplit::truncated>());
    case MasterSplit::none:
      return body(std::integral_constant<MasterSplit, MasterSplit::none>());
  }
}

template <kernels::MasterSplit kSplit>
void join_all(const bf16* values, const uint16_t* lows, size_t n, float* masters) {
  for (size_t i = 0; i < n; ++i) masters[i] = kernels::join_master(values[i], lows[i], kSplit);
}

template <kernels::MasterSplit kSplit>
void split_all(const float* masters, size_t n, bf16* values, uint16_t* lows) {
  for (size_t i = 0; i < n; ++i) kernels::split_master(masters[i], kSplit, values[i], lows[i]);
}

double initial_draw(const ParameterSpec& row, uint64_t seed, uint64_t stream, uint64_t index) {
  if (row.init_bound != 0) return row.init_bound * (2 * random_uniform(seed, stream, index) - 1);
  const double normal = random_normal(seed, stream, index);
  if (row.init_sign) return normal < 0 ? -1 : 1;
  return row.init_std * normal;
}

}  // namespace

const char* group_name(ParameterGroup group) {
  static constexpr const char* kNames[kNumParameterGroups] = {
      "embedding", "position", "head",       "matrix",       "vector",      "down", "bigram",   "value_embedding",
      "scalar",    "smear",    "value_gate", "resid_lambda", "post_lambda", "mudd", "mudd_gate"};
  return kNames[static_cast<int>(group)];
}

template <class T>
Parameters<T>::Parameters(std::vector<ParameterSpec> specs, bool with_gradients, Sharding sharding)
    : specs_(std::move(specs)), sharding_(std::move(sharding)), with_gradients_(with_gradients) {
  for (const ParameterSpec& spec : specs_) total_ += spec.count();
  place();
}

template <class T>
void Parameters<T>::place() {
  const auto aligned = [](int64_t count) { return (count + kOffsetAlignment - 1) / kOffsetAlignment * kOffsetAlignment; };
  offsets_.assign(specs_.size(), -1);
  replicated_.assign(specs_.size(), true);
  for (const ParameterSpec& spec : specs_) own_.push_back({0, spec.count()});
  if (sharding_.units.empty()) {
    for (size_t p = 0; p < specs_.size(); ++p) {
      offsets_[p] = buffer_;
      buffer_ += aligned(specs_[p].count());
    }
    return;
  }
  const int64_t world = sharding_.world;
  for (ParameterUnit& unit : sharding_.units) {
    unit.offset = buffer_;
    for (const int p : unit.parameters) {
      offsets_[static_cast<size_t>(p)] = buffer_;
      buffer_ += aligned(spec(p).count());
    }
    const int64_t extent = buffer_ - unit.offset;
    if (unit.kind == ParameterUnit::Kind::replicated) {
      unit.slice = extent;
      continue;
    }
    const int64_t piece = unit.kind == ParameterUnit::Kind::matrices ? unit.piece : kOffsetAlignment;
    require(piece % kOffsetAlignment == 0 && extent % piece == 0, "internal: a unit of ", extent, " elements in pieces of ", piece);
    unit.slice = (extent / piece + world - 1) / world * piece;
    buffer_ = unit.offset + world * unit.slice;
    const int64_t own_begin = unit.offset + sharding_.rank * unit.slice, own_end = own_begin + unit.slice;
    for (const int p : unit.parameters) {
      const int64_t begin = offset(p), end = begin + spec(p).count();
      const int64_t from = std::clamp(own_begin, begin, end), to = std::clamp(own_end, begin, end);
      own_[static_cast<size_t>(p)] = {from - begin, to - from};
      replicated_[static_cast<size_t>(p)] = false;
    }
  }
  for (size_t p = 0; p < specs_.size(); ++p) require(offsets_[p] >= 0, "internal: ", specs_[p].name, " is in no unit");
}

template <class T>
void Parameters<T>::plan(MemoryPlan& memory) {
  memory.add("parameters", &values_, buffer_);
  if constexpr (std::is_same_v<T, bf16>) memory.add("parameters: lower halves of the FP32 masters", &lows_, buffer_);
  if (with_gradients_) memory.add("gradients", &grads_, buffer_);
}

template <class T>
int Parameters<T>::index(const std::string& name) const {
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

template <class T>
kernels::WeightRef<T> Parameters<T>::weight(int index) {
  const kernels::MasterSplit split = spec(index).split;
  const bool has_low = lows_ != nullptr && split != kernels::MasterSplit::none;
  return {value(index), has_low ? lows_ + offset(index) : nullptr, split};
}

template <class T>
std::vector<kernels::GradSegment> Parameters<T>::segments() const {
  std::vector<kernels::GradSegment> result;
  for (int p = 0; p < size(); ++p) {
    ParameterRange mine = own(p);
    if (replicated(p) && sharding_.rank != 0) mine.count = 0;
    result.push_back({.offset = offset(p) + mine.begin, .count = mine.count, .group = static_cast<int32_t>(spec(p).group)});
  }
  return result;
}

template <class T>
void Parameters<T>::read_master(Device& device, HostStaging& staging, int index, ParameterRange range, Acc<T>* to) {
  if constexpr (std::is_same_v<T, bf16>) {
    const kernels::WeightRef<T> ref = weight(index);
    staging.out(
        static_cast<size_t>(range.count), kMastersAtOnce,
        [&](std::byte* buffer, size_t first, size_t n) {
          const size_t at = static_cast<size_t>(range.begin) + first;
          device.copy_out(values_in(buffer), ref.value + at, n * sizeof(bf16));
          if (ref.low != nullptr) device.copy_out(lows_in(buffer), ref.low + at, n * sizeof(uint16_t));
        },
        [&](std::byte* buffer, size_t first, size_t n) {
          with_split(ref.split, [&](auto split) { join_all<split.value>(values_in(buffer), lows_in(buffer), n, to + first); });
        });
  } else {
    staging.copy_out(to, value(index) + range.begin, static_cast<size_t>(range.count) * sizeof(T));
  }
}

template <class T>
void Parameters<T>::write_master(Device& device, HostStaging& staging, int index, ParameterRange range, const Acc<T>* from) {
  if constexpr (std::is_same_v<T, bf16>) {
    const kernels::WeightRef<T> ref = weight(index);
    staging.in(
        static_cast<size_t>(range.count), kMastersAtOnce,
        [&](std::byte* buffer, size_t first, size_t n) {
          with_split(ref.split, [&](auto split) { split_all<split.value>(from + first, n, values_in(buffer), lows_in(buffer)); });
        },
        [&](std::byte* buffer, size_t first, size_t n) {
          const size_t at = static_cast<size_t>(range.begin) + first;
          device.copy_in(ref.value + at, values_in(buffer), n * sizeof(bf16));
          if (ref.low != nullptr) device.copy_in(ref.low + at, lows_in(buffer), n * sizeof(uint16_t));
        });
  } else {
    staging.copy_in(value(index) + range.begin, from, static_cast<size_t>(range.count) * sizeof(T));
  }
}

template <class T>
std::vector<Acc<T>> Parameters<T>::read_master(Device& device, int index) {
  std::vector<Acc<T>> master(static_cast<size_t>(spec(index).count()));
  HostStaging staging(device);
  read_master(device, staging, index, {0, spec(index).count()}, master.data());
  return master;
}

template <class T>
void Parameters<T>::write_master(Device& device, int index, const std::vector<Acc<T>>& master) {
  const int64_t n = spec(index).count();
  require(master.size() == static_cast<size_t>(n), spec(index).name, ": ", master.size(), " values for ", n, " elements");
  HostStaging staging(device);
  write_master(device, staging, index, {0, n}, master.data());
}

template <class T>
std::vector<Acc<T>> Parameters<T>::read_grad(Device& device, int index) {
  std::vector<Acc<T>> result(static_cast<size_t>(spec(index).count()));
  device.copy_out(result.data(), grad(index), result.size() * sizeof(Acc<T>));
  device.synchronize();
  return result;
}

template <class T>
void Parameters<T>::initialize(Device& device, uint64_t seed) {
  HostStaging staging(device);
  ThreadPool pool(0);  // every value depends on its index alone
  const kernels::HostExec exec{.pool = &pool};
  for (int p = 0; p < size(); ++p) {
    const ParameterSpec& row = spec(p);
    const bool drawn = row.init_std != 0 || row.init_bound != 0 || row.init_sign;
    if (!drawn && row.init_mean == 0 && row.init_values.empty()) {  // large tables start at zero: nothing to make on the host
      const kernels::WeightRef<T> ref = weight(p);
      device.zero(ref.value, static_cast<size_t>(row.count()) * sizeof(T));
      if (ref.low != nullptr) device.zero(ref.low, static_cast<size_t>(row.count()) * sizeof(uint16_t));
      continue;
    }
    std::vector<Acc<T>> master(static_cast<size_t>(row.count()), static_cast<Acc<T>>(row.init_mean));
    if (!row.init_values.empty()) {
      require(row.init_values.size() == master.size(), "internal: ", row.name, " has ", row.init_values.size(), " initial values");
      std::copy(row.init_values.begin(), row.init_values.end(), master.begin());
    } else if (drawn) {
      // The stream is the name's hash: adding a parameter elsewhere leaves the others' values alone.
      const uint64_t stream = hash_bytes(row.name.data(), row.name.size());
      kernels::parallel_ranges(exec, row.count(), kDrawsAtOnce, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          master[static_cast<size_t>(i)] =
              static_cast<Acc<T>>(row.init_mean + initial_draw(row, seed, stream, static_cast<uint64_t>(i)));
        }
      });
    }
    write_master(device, staging, p, {0, row.count()}, master.data());
  }
}

template class Parameters<float>;
template class Parameters<double>;
template class Parameters<bf16>;

}  // namespace speedrun
