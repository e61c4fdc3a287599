#pragma once
// Kernels as a reader wants to see them: from the linker's symbol to a short name and to the kind of work it is.
#include <string>
#include <string_view>

namespace speedrun {

struct KernelName {
  std::string text;            // "norm_forward_kernel<32, 1>": neither namespaces nor parameters, template arguments shortened
  std::string kind;            // "matrix products", "attention", "NCCL", else the source file or library: "gate_net", "cub"
  bool communication = false;  // a collective of NCCL
};

// `symbol` as the driver gives it: mangled, or plain for kernels with C linkage.
KernelName kernel_name(const std::string& symbol);

// Of demangled names: without return type, parameters and namespaces, template arguments likewise; long ones end in "…".
std::string short_function_name(std::string_view demangled);

}  // namespace speedrun
