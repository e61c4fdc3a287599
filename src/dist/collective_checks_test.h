#pragma once
// Processes with a control plane, and in them every collective against a serial result, bit for bit, on any device.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/testing/random.h"
#include "src/core/device.h"
#include "src/dist/communicator.h"
#include "src/dist/test_ranks.h"

namespace speedrun::testing {

// Runs body(control) in `ranks` processes, which end with what one of them throws. The caller must have no threads and no CUDA
// context.
inline ::testing::AssertionResult run_ranks(int ranks, double limit_s, const std::function<void(Control&)>& body) {
  (void)test_seed();  // before the fork: all ranks have the same
  TestRanks processes(ranks, [&](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, ControlOptions{});
    try {
      body(*control);
    } catch (const std::exception& error) {
      control->fail(error.what(), 1);
      return 1;
    }
    control->barrier();
    return 0;
  });
  const bool ended = processes.wait(limit_s);
  bool good = ended;
  for (int rank = 0; rank < ranks; ++rank) good = good && processes.code(rank) == 0;
  if (good) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << ranks << " ranks" << (ended ? "" : ", killed at the time limit") << ": "
                                       << processes.errors();
}

template <class T>
class DeviceVector {
 public:
  DeviceVector(Device& device, const std::vector<T>& values)
      : device_(device), count_(values.size()), data_(static_cast<T*>(device.allocate(count_ * sizeof(T)))) {
    upload(values);
  }
  ~DeviceVector() { device_.free(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  T* get() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void upload(const std::vector<T>& values) {
    device_.copy_in(data_, values.data(), bytes());
    device_.synchronize();
  }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    device_.copy_out(values.data(), data_, bytes());
    device_.synchronize();
    return values;
  }

 private:
  Device& device_;
  size_t count_;
  T* data_;
};

// What the ranks start from. Small integers add up exactly in any order (BF16: up to 32 ranks); reals show the order of a sum.
enum class Values { reals, small_integers };

// What `rank` has before the operation numbered `round`; every process can make that of all ranks.
template <class T>
std::vector<T> rank_values(Values kind, int rank, int round, int64_t count) {
  Random random(test_seed() + static_cast<uint64_t>(rank) * 1000003 + static_cast<uint64_t>(round));
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) {
    if constexpr (std::is_integral_v<T>) {
      value = static_cast<T>(random.bits());
    } else if (kind == Values::reals) {
      value = static_cast<T>(static_cast<float>(random.uniform(-1, 1)));
    } else {
      value = static_cast<T>(static_cast<float>(random.below(17) - 8));
    }
  }
  return values;
}

template <class T>
std::vector<std::vector<T>> all_values(Values kind, int ranks, int round, int64_t count) {
  std::vector<std::vector<T>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(rank_values<T>(kind, r, round, count));
  return all;
}

// Sums (u32: maxima) in the order of the ranks; bf16 in float with one rounding.
template <class T>
std::vector<T> serial_reduction(const std::vector<std::vector<T>>& all) {
  std::vector<T> result(all[0].size());
  for (size_t i = 0; i < result.size(); ++i) {
    if constexpr (std::is_same_v<T, uint32_t>) {
      for (const auto& values : all) result[i] = std::max(result[i], values[i]);
    } else {
      using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
      Sum sum = static_cast<Sum>(all[0][i]);
      for (size_t r = 1; r < all.size(); ++r) sum += static_cast<Sum>(all[r][i]);
      result[i] = static_cast<T>(sum);
    }
  }
  return result;
}

// Elements first … first + count of both.
template <class T>
void require_same(const std::vector<T>& got, const std::vector<T>& expected, int64_t first, int64_t count,
                  const std::string& what) {
  for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(first + count); ++i) {
    require(std::memcmp(&got[i], &expected[i], sizeof(T)) == 0, what, " of ", comm_type_name(comm_type<T>()), ", ", got.size(),
            " elements: the first difference is at ", i, ": got ", static_cast<double>(static_cast<float>(got[i])), ", expected ",
            static_cast<double>(static_cast<float>(expected[i])), " (SPEEDRUN_TEST_SEED=", test_seed(), ")");
  }
}
template <class T>
void require_same(const std::vector<T>& got, const std::vector<T>& expected, const std::string& what) {
  require(got.size() == expected.size(), what, ": sizes differ");
  require_same(got, expected, 0, static_cast<int64_t>(expected.size()), what);
}

// Each check issues copies to the device's queue before fork() and after join(), so that a missing order between the queues shows.
class CollectiveChecks {
 public:
  CollectiveChecks(Communicator& communicator, Device& device, Values kind)
      : communicator_(communicator), device_(device), kind_(kind), rank_(communicator.rank()), size_(communicator.size()) {}

  template <class T>
  void all_reduce(int64_t count, int round) {
    const auto all = all_values<T>(kind_, size_, round, count);
    const std::vector<T> got = issued(all[own()], [&](T* data) {
      communicator_.all_reduce(data, count, comm_type<T>(), comm_type<T>() == CommType::u32 ? ReduceOp::max : ReduceOp::sum);
    });
    require_same(got, serial_reduction(all), "all_reduce");
  }

  template <class T>
  void reduce_scatter(int64_t count, int round) {
    const auto all = all_values<T>(kind_, size_, round, count * size_);
    const std::vector<T> got = issued(all[own()], [&](T* data) { communicator_.reduce_scatter(data, count, comm_type<T>()); });
    require_same(got, serial_reduction(all), rank_ * count, count, "reduce_scatter");
  }

  // A rank's other slices are not what they should become before.
  template <class T>
  void all_gather(int64_t count, int round) {
    const std::vector<T> expected = rank_values<T>(kind_, 0, round, count * size_);
    std::vector<T> start = rank_values<T>(kind_, rank_, round + 1, count * size_);
    std::copy_n(expected.begin() + rank_ * count, count, start.begin() + rank_ * count);
    require_same(issued(start, [&](T* data) { communicator_.all_gather(data, count, comm_type<T>()); }), expected, "all_gather");
  }

  template <class T>
  void broadcast(int64_t count, int round) {
    const int root = round % size_;
    const auto all = all_values<T>(kind_, size_, round, count);
    const std::vector<T> got = issued(all[own()], [&](T* data) { communicator_.broadcast(data, count, comm_type<T>(), root); });
    require_same(got, all[static_cast<size_t>(root)], "broadcast");
  }

  template <class T>
  void all_to_all(int64_t count, int round) {
    const auto all = all_values<T>(kind_, size_, round, count * size_);
    std::vector<T> expected;
    for (const auto& values : all) {
      const auto slice = values.begin() + rank_ * count;
      expected.insert(expected.end(), slice, slice + count);
    }
    const DeviceVector<T> received(device_, std::vector<T>(expected.size()));
    issued(all[own()], [&](T* data) { communicator_.all_to_all(data, received.get(), count, comm_type<T>()); });
    require_same(received.download(), expected, "all_to_all");
  }

  // Operations of several types and sizes in one group, then one more in the same fork.
  void group(int round) {
    constexpr int64_t kSums = 77, kSlice = 5, kBytes = 1003;
    const auto sums = all_values<float>(kind_, size_, round, kSums);
    const auto maxima = all_values<uint32_t>(kind_, size_, round, 3);
    const auto slices = all_values<double>(kind_, size_, round, kSlice * size_);
    const auto bytes = all_values<uint8_t>(kind_, size_, round, kBytes);
    const DeviceVector<float> sum(device_, sums[own()]);
    const DeviceVector<uint32_t> maximum(device_, maxima[own()]);
    const DeviceVector<double> slice(device_, slices[own()]);
    const DeviceVector<uint8_t> byte(device_, bytes[own()]);
    communicator_.fork();
    communicator_.group_start();
    communicator_.all_reduce(sum.get(), kSums, CommType::f32, ReduceOp::sum);
    communicator_.all_reduce(maximum.get(), 3, CommType::u32, ReduceOp::max);
    communicator_.reduce_scatter(slice.get(), kSlice, CommType::f64);
    communicator_.group_end();
    communicator_.broadcast(byte.get(), kBytes, CommType::bytes, size_ - 1);
    communicator_.join();
    require_same(sum.download(), serial_reduction(sums), "all_reduce in a group");
    require_same(maximum.download(), serial_reduction(maxima), "all_reduce in a group");
    require_same(slice.download(), serial_reduction(slices), rank_ * kSlice, kSlice, "reduce_scatter in a group");
    require_same(byte.download(), bytes.back(), "broadcast after a group");
  }

  // Every operation with the elements it may have, on `count` elements of every rank (or a few more, to make equal slices).
  template <class T>
  void all_operations(int64_t count, int round) {
    const int64_t slice = (count + size_ - 1) / size_;
    if constexpr (!std::is_same_v<T, uint8_t>) all_reduce<T>(count, round);
    if constexpr (!std::is_integral_v<T>) reduce_scatter<T>(slice, round);
    all_gather<T>(count, round);
    broadcast<T>(count, round);
    broadcast<T>(count, round + 1);
    all_to_all<T>(slice, round);
  }

 private:
  size_t own() const { return static_cast<size_t>(rank_); }

  template <class T, class Operation>
  std::vector<T> issued(const std::vector<T>& start, const Operation& operation) {
    const DeviceVector<T> source(device_, start), data(device_, std::vector<T>(start.size())), result(device_, start);
    device_.copy(data.get(), source.get(), source.bytes());
    communicator_.fork();
    operation(data.get());
    communicator_.join();
    device_.copy(result.get(), data.get(), data.bytes());
    return result.download();
  }

  Communicator& communicator_;
  Device& device_;
  Values kind_;
  int rank_, size_;
};

}  // namespace speedrun::testing
