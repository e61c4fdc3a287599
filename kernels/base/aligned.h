#pragma once
// Checks of launchers: 16-byte vector accesses need 16-byte aligned pointers.
#include <cstdint>

#include "kernels/base/error.h"

namespace speedrun::kernels {

inline void require_aligned16(const char* op, const char* name, const void* pointer) {
  require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, op, ": ", name, " must be 16-byte aligned, is at ", pointer);
}

}  // namespace speedrun::kernels
