#pragma once
// Collectives between GPUs over NCCL, on a stream of their own with high priority.
#include <memory>

#include "src/dist/communicator.h"

namespace speedrun {

// Collective, on the thread that made `device`. Throws InputError if NCCL is missing, Error if it cannot connect the ranks. NCCL is
// set by its own environment variables; those that this sets are named in nccl_communicator.cpp and shown by describe() where they
// matter.
std::unique_ptr<Communicator> make_nccl_communicator(Control& control, Device& device, bool ranks_share_gpu);

}  // namespace speedrun
