#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "src/core/device.h"
#include "src/core/file.h"
#include "src/core/host_staging.h"
#include "src/core/memory_plan.h"
#include "src/core/parameter.h"
#include "src/core/random.h"
#include "src/core/test_folder.h"

namespace speedrun {
namespace {

TEST(Philox, MatchesThePublishedVectors) {
  // Known answers of Random123's kat_vectors for philox4x32-10.
  EXPECT_EQ(philox(0, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(Random, NormalHasMeanZeroAndUnitVariance) {
  double sum = 0, squares = 0, fourth = 0;
  constexpr int n = 200000;
  for (int i = 0; i < n; ++i) {
    const double x = random_normal(7, 3, i);
    sum += x, squares += x * x, fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(squares / n, 1, 0.015);
  EXPECT_NEAR(fourth / n, 3, 0.1);
}

TEST(MemoryPlan, HandsOutAlignedZeroedDisjointViews) {
  auto device = make_cpu_device(1);
  MemoryPlan plan;
  float* a = nullptr;
  int64_t* b = nullptr;
  char* empty = nullptr;
  plan.add("a", &a, 3);
  plan.add("b", &b, 100);
  plan.add("none", &empty, 0);
  Arena arena(*device, plan);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b) % 256, 0u);
  EXPECT_GE(reinterpret_cast<char*>(b) - reinterpret_cast<char*>(a), 12);
  EXPECT_EQ(empty, nullptr);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(b[i], 0);
  EXPECT_NE(plan.table().find("in all"), std::string::npos);
}

TEST(MemoryPlan, RefusesWhatDoesNotFitWithThePlanAndTheWayOut) {
  auto device = make_cpu_device(1);
  MemoryPlan plan;
  char* huge = nullptr;
  plan.add("logits", &huge, int64_t{1} << 50);
  try {
    plan.check(*device, "lower train.micro_batch_tokens");
    FAIL() << "a petabyte was accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("logits"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("train.micro_batch_tokens"), std::string::npos);
  }
}

TEST(AtomicFile, LeavesTheOldFileUnlessCommitted) {
  TestFolder folder;
  const std::string path = (folder.path() / "x").string();
  write_file_atomically(path, "old");
  {
    AtomicFile file(path);
    file.write("new", 3);
  }
  EXPECT_EQ(read_file(path), "old");
  write_file_atomically(path, "new");
  EXPECT_EQ(read_file(path), "new");
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
}

TEST(HashBytes, DependsOnEveryByteAndTheLength) {
  std::vector<unsigned char> data(100);
  const uint64_t base = hash_bytes(data.data(), data.size());
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = 1;
    EXPECT_NE(hash_bytes(data.data(), data.size()), base) << i;
    data[i] = 0;
  }
  EXPECT_NE(hash_bytes(data.data(), 99), base);
}

TEST(HashBytes, IsTheSameHoweverTheDataIsCut) {
  std::vector<unsigned char> data(200);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * i + 7);
  // The number itself is in every checkpoint.
  EXPECT_EQ(hash_bytes(data.data(), data.size()), 0xb5d31377d43dc072u);
  EXPECT_EQ(hash_bytes(data.data(), 37, 5), 0x7b04e16bb3902e1du);
  EXPECT_EQ(hash_bytes(nullptr, 0), 0x24cefd312355a955u);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{31}, size_t{32}, size_t{33}, size_t{64}, size_t{200}}) {
    const uint64_t whole = hash_bytes(data.data(), size, 9);
    for (size_t a = 0; a <= size; ++a) {
      for (size_t b = a; b <= size; b += 1 + b / 40) {
        HashBytes hash(9);
        hash.add(data.data(), a);
        hash.add(data.data() + a, b - a);
        hash.add(data.data() + b, size - b);
        ASSERT_EQ(hash.value(), whole) << size << ": " << a << ", " << b;
      }
    }
    HashBytes bytewise(9);
    for (size_t i = 0; i < size; ++i) {
      EXPECT_EQ(bytewise.value(), hash_bytes(data.data(), i, 9));
      bytewise.add(data.data() + i, 1);
    }
    EXPECT_EQ(bytewise.value(), whole);
  }
}

TEST(RandomAccessFile, ReadsAnyPlaceAndNothingBeyondTheEnd) {
  TestFolder folder;
  const std::string path = (folder.path() / "x").string();
  EXPECT_FALSE(RandomAccessFile(path).is_open());
  write_file_atomically(path, "0123456789");
  const RandomAccessFile file(path);
  ASSERT_TRUE(file.is_open());
  std::string three(3, ' ');
  EXPECT_TRUE(file.read_at(7, three.data(), 3));
  EXPECT_EQ(three, "789");
  EXPECT_FALSE(file.read_at(8, three.data(), 3));
}

TEST(HostStaging, PassesEveryChunkOnceInBothDirections) {
  auto device = make_cpu_device(1);
  HostStaging staging(*device);
  for (const size_t count : {0, 1, 7, 8, 9, 16, 50}) {
    // The "device" is a vector; odd values mark what passed through the buffers.
    std::vector<uint32_t> there(count), back(count), expected(count);
    for (size_t i = 0; i < count; ++i) expected[i] = static_cast<uint32_t>(2 * i + 1);
    staging.in(
        count, 8, [&](std::byte* buffer, size_t first, size_t n) { std::memcpy(buffer, expected.data() + first, n * 4); },
        [&](std::byte* buffer, size_t first, size_t n) { device->copy_in(there.data() + first, buffer, n * 4); });
    EXPECT_EQ(there, expected);
    staging.out(
        count, 8, [&](std::byte* buffer, size_t first, size_t n) { device->copy_out(buffer, there.data() + first, n * 4); },
        [&](std::byte* buffer, size_t first, size_t n) { std::memcpy(back.data() + first, buffer, n * 4); });
    EXPECT_EQ(back, expected);
  }
}

// Masters of every kind against the definition of a single one, ranges across the staging's buffers and odd bit patterns included.
TEST(Parameters, MastersAreSplitAndJoinedElementByElement) {
  using kernels::MasterSplit;
  auto device = make_cpu_device(1);
  constexpr int64_t n = (int64_t{1} << 21) + 12345;
  std::vector<ParameterSpec> specs;
  for (const MasterSplit split : {MasterSplit::nearest, MasterSplit::truncated, MasterSplit::none})
    specs.push_back({.name = std::to_string(specs.size()), .shape = {n}, .split = split});
  Parameters<bf16> parameters(specs);
  MemoryPlan plan;
  parameters.plan(plan);
  Arena arena(*device, plan);
  std::vector<float> masters(n);
  for (int64_t i = 0; i < n; ++i) masters[static_cast<size_t>(i)] = std::bit_cast<float>(static_cast<uint32_t>(i) * 2654435761u);
  for (int p = 0; p < parameters.size(); ++p) {
    const MasterSplit split = parameters.spec(p).split;
    HostStaging staging(*device);
    const std::vector<int64_t> cuts = {0, 1, 1000, (1 << 20) + 3, n};
    for (size_t c = 0; c + 1 < cuts.size(); ++c)
      parameters.write_master(*device, staging, p, {cuts[c], cuts[c + 1] - cuts[c]}, masters.data() + cuts[c]);
    const std::vector<float> whole = parameters.read_master(*device, p);
    std::vector<float> part(n - 777);
    parameters.read_master(*device, staging, p, {777, n - 777}, part.data());
    const kernels::WeightRef<bf16> ref = parameters.weight(p);
    ASSERT_EQ(ref.low == nullptr, split == MasterSplit::none);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float master = masters[static_cast<size_t>(i)];
      bf16 value;
      uint16_t low;
      kernels::split_master(master, split, value, low);
      wrong += ref.value[i].bits != value.bits;
      if (ref.low != nullptr) wrong += ref.low[i] != low;
      const auto joined = std::bit_cast<uint32_t>(kernels::join_master(value, low, split));
      wrong += std::bit_cast<uint32_t>(whole[static_cast<size_t>(i)]) != joined;
      if (i >= 777) wrong += std::bit_cast<uint32_t>(part[static_cast<size_t>(i - 777)]) != joined;
      if (split != MasterSplit::none) wrong += joined != std::bit_cast<uint32_t>(master);
    }
    EXPECT_EQ(wrong, 0) << "split " << p;
  }
}

TEST(Parameters, InitialValuesDependOnSeedAndNameAlone) {
  auto device = make_cpu_device(1);
  const auto make = [&](std::vector<ParameterSpec> specs, uint64_t seed, const std::string& name) {
    Parameters<float> parameters(std::move(specs));
    MemoryPlan plan;
    parameters.plan(plan);
    Arena arena(*device, plan);
    parameters.initialize(*device, seed);
    return parameters.read_master(*device, parameters.index(name));
  };
  ParameterSpec a{.name = "a", .shape = {7, 3}, .init_std = 0.5, .init_mean = 0};
  ParameterSpec b{.name = "b", .shape = {5}, .init_std = 0, .init_mean = 1};
  EXPECT_EQ(make({a, b}, 1, "a"), make({b, a}, 1, "a"));
  EXPECT_NE(make({a, b}, 1, "a"), make({a, b}, 2, "a"));
  EXPECT_EQ(make({a, b}, 1, "b"), std::vector<float>(5, 1.0f));
}

}  // namespace
}  // namespace speedrun
