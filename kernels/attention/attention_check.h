#pragma once
// What the launchers of the CUDA attention kernels check.
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/base/error.h"

namespace speedrun::kernels {

// `tensors`: the bf16 pointers of the call.
template <class Args>
void check_attention(const char* op, const Args& args, std::initializer_list<const bf16*> tensors) {
  require(args.D == 64 || args.D == 128, op, ": head size D must be 64 or 128 on CUDA, got ", args.D);
  require(args.H > 0, op, ": number of heads H must be positive, got ", args.H);
  // Half of int's range: tile arithmetic may step past N, and doc_start is 32 bits wide.
  require(args.N > 0 && args.N <= std::numeric_limits<int>::max() / 2, op, ": N must be between 1 and 2^30, got ", args.N);
  require(args.stride % 8 == 0 && args.stride >= static_cast<int64_t>(args.H) * args.D, op,
          ": row stride must be a multiple of 8 and at least H·D = ", static_cast<int64_t>(args.H) * args.D, ", got ", args.stride);
  require(args.scale > 0, op, ": scale must be positive, got ", args.scale);
  for (const bf16* tensor : tensors)
    require(tensor != nullptr && reinterpret_cast<uintptr_t>(tensor) % 16 == 0, op,
            ": tensors must be aligned to 16 bytes, got address ", tensor);
}

}  // namespace speedrun::kernels
