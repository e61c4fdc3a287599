#pragma once
// NCCL's functions, found at run time: the program needs no NCCL to start, and one GPU needs none at all. The only file that
// includes nccl.h; the types are those of its declarations, so a change there does not compile here.
#include <nccl.h>

#include <string>

namespace speedrun {

struct NcclLibrary {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;

  std::string version() const;  // "2.28.3"
};

// Throws InputError with the way out if `file` cannot be opened or lacks a function. It stays open until the process ends: NCCL's
// threads may outlive its communicators.
NcclLibrary open_nccl(const char* file = "libnccl.so.2");

}  // namespace speedrun
