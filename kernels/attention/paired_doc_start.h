#pragma once
// Document starts of the stream that paired heads make of N tokens: position 2t and 2t + 1 belong to token t (split_qkv.h).
//   out[2t] = out[2t+1] = 2·doc_start[t]
#include "kernels/base/exec.h"

namespace speedrun::kernels {

struct PairedDocStart {
  int32_t* out;              // (2N)
  const int32_t* doc_start;  // (N)
  int64_t N;
};

void paired_doc_start(const PairedDocStart& args, const HostExec& exec);
void paired_doc_start(const PairedDocStart& args, const CudaExec& exec);

}  // namespace speedrun::kernels
