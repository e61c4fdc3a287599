#pragma once
// Collectives between the processes of one host, in plain shared memory: every rank has a buffer there that all others read. Sums
// are made in the order of the ranks, each rank summing its share, so results have the same bits on every rank and in every run.
#include <memory>

#include "src/dist/communicator.h"

namespace speedrun {

// Bytes of a rank's buffer for one chunk of an operation; longer operations take several.
inline constexpr size_t kSharedMemoryChunk = size_t{1} << 20;

// Collective. Throws InputError if the ranks are on several hosts, Error if the memory cannot be had. All ranks throw Error when
// one makes another call than the others.
std::unique_ptr<Communicator> make_shared_memory_communicator(Control& control);

}  // namespace speedrun
