#include "src/optim/sharding.h"

#include "kernels/base/error.h"
#include "src/optim/optimizer.h"

namespace speedrun {
namespace {

using Kind = ParameterUnit::Kind;

// From here on a table is worth a collective of its own; below, all ranks update all of it.
constexpr int64_t kTableElements = 1 << 17;
constexpr int64_t kPieceMultiple = 64;  // elements: slices keep the buffers' alignment

}  // namespace

Sharding make_sharding(const std::vector<ParameterSpec>& specs, const Config::Optim& config, int rank, int world) {
  Sharding sharding{.rank = rank, .world = world};
  if (world == 1) return sharding;
  // What a unit's parameters have in common: how often they update, and of matrices the shape (of a run of tensors: 0 and how
  // many).
  struct Key {
    int every;
    int64_t rows, cols;
    bool operator==(const Key&) const = default;
  };
  std::vector<Key> keys;
  const auto unit = [&](Kind kind, const Key& key) -> ParameterUnit& {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (sharding.units[i].kind == kind && keys[i] == key) return sharding.units[i];
    }
    keys.push_back(key);
    sharding.units.push_back({.kind = kind});
    return sharding.units.back();
  };
  const int count = static_cast<int>(specs.size());
  for (int first = 0; first < count;) {
    // Tensors that are neighbours in memory stay together.
    int end = first + 1;
    while (specs[static_cast<size_t>(end) - 1].with_next && end < count) ++end;
    const ParameterSpec& spec = specs[static_cast<size_t>(first)];
    const Config::Group& group = group_config(config, spec.group);
    const bool muon = is_muon(group.optimizer), alone = end == first + 1;
    // A matrix, or the run of matrices that goes to one rank: tensors of one unit agree in it.
    const Key shape = alone ? Key{group.every, spec.shape[0] / spec.matrices, spec.shape.back()} : Key{group.every, 0, end - first};
    int64_t piece = alone ? spec.count() / spec.matrices : 0;
    for (int p = first; !alone && p < end; ++p) piece += specs[static_cast<size_t>(p)].count();
    ParameterUnit* chosen = nullptr;
    if (spec.frozen) {
      chosen = &unit(Kind::replicated, {0, 0, 0});  // nobody updates it: without gradients to sum
    } else if (muon && piece % kPieceMultiple == 0) {
      chosen = &unit(Kind::matrices, shape);
      require(chosen->piece == 0 || chosen->piece == piece, "internal: ", spec.name, " has other neighbours than those before");
      chosen->piece = piece;
    } else if (!muon && alone && spec.count() >= kTableElements) {
      chosen = &unit(Kind::elements, {group.every, first, 0});
    } else {
      chosen = &unit(Kind::replicated, {group.every, 0, 0});
    }
    for (; first < end; ++first) chosen->parameters.push_back(first);
  }
  return sharding;
}

template <class T>
void spread_values(Parameters<T>& parameters, Communicator* communicator, const std::function<bool(const ParameterUnit&)>& chosen) {
  if (communicator == nullptr) return;
  communicator->fork();
  communicator->group_start();
  for (const ParameterUnit& unit : parameters.sharding().units) {
    if (unit.kind != Kind::replicated && chosen(unit))
      communicator->all_gather(parameters.values() + unit.offset, unit.slice, comm_type<T>());
  }
  communicator->group_end();
  communicator->join();
}

template void spread_values(Parameters<float>&, Communicator*, const std::function<bool(const ParameterUnit&)>&);
template void spread_values(Parameters<double>&, Communicator*, const std::function<bool(const ParameterUnit&)>&);
template void spread_values(Parameters<bf16>&, Communicator*, const std::function<bool(const ParameterUnit&)>&);

}  // namespace speedrun
