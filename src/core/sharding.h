#pragma once
// How the ranks of a run share the parameters. Values and gradients exist whole on every rank; what belongs to one rank is the
// update: the sum of the ranks' gradients, the masters' lower halves and the optimizer's state. Parameters that travel together are
// a unit, one piece of the buffers: `world` slices of equal length, of which each rank updates one.
#include <cstdint>
#include <vector>

namespace speedrun {

struct ParameterUnit {
  enum class Kind {
    replicated,  // small: summed on every rank, updated by each of them
    elements,    // one table, cut anywhere
    matrices     // equal matrices, or equal runs of them, each updated whole by one rank; one after the other without gaps
  };
  Kind kind = Kind::replicated;
  std::vector<int> parameters = {};  // indices, in the order of the buffer
  int64_t piece = 0;                 // matrices: elements of one, or of one run
  int64_t offset = 0;                // in elements of the buffers; set by Parameters, as slice
  int64_t slice = 0;                 // of one rank; replicated: of the whole unit
};

struct Sharding {
  int rank = 0, world = 1;
  std::vector<ParameterUnit> units = {};  // every parameter is in one of them; empty with one rank
};

// Elements begin … begin + count − 1 of a parameter.
struct ParameterRange {
  int64_t begin = 0, count = 0;
};

}  // namespace speedrun
