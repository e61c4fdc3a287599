#include "src/dist/nccl_library.h"

#include <dlfcn.h>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {

std::string NcclLibrary::version() const {
  int version = 0;
  get_version(&version);
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

NcclLibrary open_nccl(const char* file) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw InputError(
        fmt::format("several GPUs need NCCL, which cannot be opened ({}): install the package libnccl2, or name its folder "
                    "in LD_LIBRARY_PATH, or train on one GPU",
                    dlerror()));
  }
  NcclLibrary nccl{};
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) throw InputError(fmt::format("{} has no {}: NCCL 2.14 or newer is needed", file, name));
  };
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.get_unique_id, "ncclGetUniqueId");
  find(nccl.get_error_string, "ncclGetErrorString");
  find(nccl.get_last_error, "ncclGetLastError");
  find(nccl.comm_init_rank_config, "ncclCommInitRankConfig");
  find(nccl.comm_get_async_error, "ncclCommGetAsyncError");
  find(nccl.comm_destroy, "ncclCommDestroy");
  find(nccl.all_reduce, "ncclAllReduce");
  find(nccl.reduce_scatter, "ncclReduceScatter");
  find(nccl.all_gather, "ncclAllGather");
  find(nccl.broadcast, "ncclBroadcast");
  find(nccl.send, "ncclSend");
  find(nccl.recv, "ncclRecv");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  return nccl;
}

}  // namespace speedrun
