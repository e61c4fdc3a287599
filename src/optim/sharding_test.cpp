#include "src/optim/sharding.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace speedrun {
namespace {

using Kind = ParameterUnit::Kind;

// Two layers of q, k, v, output and MLP, tables large and small, a table that is never trained, and matrices of an odd size.
std::vector<ParameterSpec> table() {
  std::vector<ParameterSpec> specs;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, ParameterGroup group) -> ParameterSpec& {
    return specs.emplace_back(ParameterSpec{.name = name, .shape = std::move(shape), .group = group});
  };
  add("wte", {5000, 64}, ParameterGroup::embedding);
  add("gain", {64}, ParameterGroup::vector);
  add("sign", {4000, 64}, ParameterGroup::bigram).frozen = true;
  for (const std::string layer : {"0.", "1.", "2."}) {
    ParameterSpec& qk = add(layer + "qk", {128, 64}, ParameterGroup::matrix);
    qk.matrices = 4;
    qk.with_next = true;
    add(layer + "v", {64, 64}, ParameterGroup::matrix);
    add(layer + "out", {64, 64}, ParameterGroup::matrix);
    add(layer + "up", {256, 64}, ParameterGroup::matrix);
    add(layer + "down", {256, 64}, ParameterGroup::down);
    add(layer + "gate", {6, 12}, ParameterGroup::value_gate);
  }
  add("odd", {9, 5}, ParameterGroup::matrix);
  return specs;
}

Config::Optim config() {
  Config::Optim optim;
  optim.matrix.optimizer = optim.down.optimizer = OptimizerKind::normuon;
  optim.embedding.every = optim.value_gate.every = 2;
  return optim;
}

const ParameterUnit& unit_of(const Sharding& sharding, const std::vector<ParameterSpec>& specs, const std::string& name) {
  for (const ParameterUnit& unit : sharding.units) {
    for (const int p : unit.parameters)
      if (specs[static_cast<size_t>(p)].name == name) return unit;
  }
  throw std::out_of_range(name);
}

TEST(Sharding, OneRankHasNoUnits) { EXPECT_TRUE(make_sharding(table(), config(), 0, 1).units.empty()); }

TEST(Sharding, EveryParameterIsInOneUnit) {
  const std::vector<ParameterSpec> specs = table();
  std::multiset<int> seen;
  for (const ParameterUnit& unit : make_sharding(specs, config(), 0, 2).units)
    seen.insert(unit.parameters.begin(), unit.parameters.end());
  ASSERT_EQ(seen.size(), specs.size());
  for (int p = 0; p < static_cast<int>(specs.size()); ++p) EXPECT_EQ(seen.count(p), 1u) << specs[static_cast<size_t>(p)].name;
}

TEST(Sharding, WhatTravelsTogether) {
  const std::vector<ParameterSpec> specs = table();
  const Sharding sharding = make_sharding(specs, config(), 0, 2);
  const auto unit = [&](const char* name) -> const ParameterUnit& { return unit_of(sharding, specs, name); };
  EXPECT_EQ(unit("wte").kind, Kind::elements);
  EXPECT_EQ(unit("wte").parameters.size(), 1u);
  EXPECT_EQ(unit("gain").kind, Kind::replicated);
  EXPECT_EQ(unit("odd").kind, Kind::replicated) << "45 elements would break the alignment of what follows";
  EXPECT_NE(&unit("gain"), &unit("0.gate")) << "they update in different steps";
  EXPECT_NE(&unit("sign"), &unit("gain")) << "what is never trained has no gradient to sum";
  EXPECT_EQ(&unit("0.qk"), &unit("2.v")) << "q, k and v of a layer are neighbours, and those of all layers one unit";
  EXPECT_EQ(unit("0.qk").piece, 3 * 64 * 64);
  EXPECT_EQ(&unit("0.up"), &unit("2.down"));
  EXPECT_EQ(unit("0.up").piece, 256 * 64);
  EXPECT_NE(&unit("0.out"), &unit("0.up"));
}

// Of every number of ranks: the ranks' ranges are each parameter's elements, each once and in the order of the ranks; matrices stay
// whole; neighbours stay neighbours; slices do not overlap.
TEST(Sharding, RangesOfTheRanksAreTheWhole) {
  const std::vector<ParameterSpec> specs = table();
  for (const int world : {2, 3, 4, 8}) {
    std::vector<int64_t> reached(specs.size(), 0);
    for (int rank = 0; rank < world; ++rank) {
      const Parameters<float> parameters(specs, true, make_sharding(specs, config(), rank, world));
      int64_t end = 0;
      for (const ParameterUnit& unit : parameters.sharding().units) {
        EXPECT_EQ(unit.offset, end);
        EXPECT_EQ(unit.offset % 64, 0);
        end = unit.offset + unit.slice * (unit.kind == Kind::replicated ? 1 : world);
      }
      EXPECT_EQ(parameters.buffer_count(), end);
      for (int p = 0; p < parameters.size(); ++p) {
        const ParameterSpec& spec = parameters.spec(p);
        const ParameterRange own = parameters.own(p);
        SCOPED_TRACE(spec.name + ", rank " + std::to_string(rank) + " of " + std::to_string(world));
        if (spec.with_next) {
          EXPECT_EQ(parameters.offset(p + 1), parameters.offset(p) + spec.count());
        }
        if (parameters.replicated(p)) {
          EXPECT_EQ(own.count, spec.count());
          reached[static_cast<size_t>(p)] = spec.count();
          continue;
        }
        EXPECT_EQ(own.begin, reached[static_cast<size_t>(p)]);
        reached[static_cast<size_t>(p)] += own.count;
        if (unit_of(parameters.sharding(), specs, spec.name).kind == Kind::matrices) {
          EXPECT_EQ(own.count % (spec.count() / spec.matrices), 0);
        }
      }
    }
    for (size_t p = 0; p < specs.size(); ++p) EXPECT_EQ(reached[p], specs[p].count()) << specs[p].name << ", " << world << " ranks";
  }
}

// Norms count everything once: what all ranks update, on rank 0 alone.
TEST(Sharding, SegmentsOfAllRanksCountEveryElementOnce) {
  const std::vector<ParameterSpec> specs = table();
  for (const int world : {1, 2, 8}) {
    std::vector<int64_t> counted(specs.size(), 0);
    for (int rank = 0; rank < world; ++rank) {
      const Parameters<float> parameters(specs, true, make_sharding(specs, config(), rank, world));
      const std::vector<kernels::GradSegment> segments = parameters.segments();
      for (size_t p = 0; p < specs.size(); ++p) {
        counted[p] += segments[p].count;
        EXPECT_EQ(segments[p].group, static_cast<int>(specs[p].group));
      }
    }
    for (size_t p = 0; p < specs.size(); ++p) EXPECT_EQ(counted[p], specs[p].count()) << specs[p].name << ", " << world << " ranks";
  }
}

}  // namespace
}  // namespace speedrun
