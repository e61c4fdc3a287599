#pragma once
// Moves registers between the warp groups of a block (sm_90a); every warp of a warp group executes it. A kernel needs a register
// cap at entry (__launch_bounds__(threads, 1)) for the compiler to heed it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg

namespace speedrun::ptx {

// Gives registers back until kRegisters a thread are left; a multiple of 8 from 24 to 256.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until a thread can have kRegisters.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace speedrun::ptx
