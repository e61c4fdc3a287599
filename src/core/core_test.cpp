#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "src/core/device.h"
#include "src/core/file.h"
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
