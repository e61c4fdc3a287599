// The E4M3 instantiations of relu2_up_kernel.cuh.
#include "kernels/relu2_mlp/relu2_up_kernel.cuh"

namespace speedrun::kernels {

void relu2_up_sm90(const Relu2Up<e4m3>& args, const CudaExec& exec, const Relu2UpTesting& testing) {
  relu2_up::launch(args, exec, testing);
}

}  // namespace speedrun::kernels
