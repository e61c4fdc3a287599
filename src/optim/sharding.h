#pragma once
// Which parameters travel together between ranks, and what each rank updates (src/core/sharding.h).
#include <functional>
#include <vector>

#include "src/config/config.h"
#include "src/core/parameter.h"
#include "src/core/sharding.h"
#include "src/dist/communicator.h"

namespace speedrun {

// Matrices under Muon: one unit for each shape, whole matrices to a rank, as Newton-Schulz needs them. Tables under Adam: one unit
// each, cut by elements. Everything small: one unit for each interval of updates (optim.*.every), summed everywhere and updated by
// every rank, because a collective of a few kilobytes costs as much as the update. With one rank: no units.
Sharding make_sharding(const std::vector<ParameterSpec>& specs, const Config::Optim& config, int rank, int world);

// Every rank gets the values of these units from the ranks that update them. The communicator may be null with one rank;
// asynchronous, capturable.
template <class T>
void spread_values(Parameters<T>& parameters, Communicator* communicator, const std::function<bool(const ParameterUnit&)>& chosen);

}  // namespace speedrun
