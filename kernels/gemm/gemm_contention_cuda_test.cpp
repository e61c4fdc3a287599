// Products beside other work on the GPU: blocks then start and end in other orders than alone, and sums must not follow them.
#include <cstring>

#include "kernels/gemm/gemm_cuda.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

// As training has them: weight gradients add to FP32 (transpose_a), input gradients and Newton-Schulz products make BF16.
struct Product {
  int64_t M, N, K;
  bool transpose_a = false, transpose_b = false;
  int batch = 1;
};

std::ostream& operator<<(std::ostream& out, const Product& p) {
  return out << p.M << "x" << p.N << "x" << p.K << " " << (p.transpose_a ? "T" : "N") << (p.transpose_b ? "T" : "N") << " batch "
             << p.batch;
}

class GemmContentionCudaTest : public testing::CudaTest {
 protected:
  // A million numbers over and over, each round shifted.
  DeviceBuffer<bf16> operand(const char* name, int64_t count) {
    std::vector<bf16> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = numbers_[(i + i / numbers_.size()) % numbers_.size()];
    return uploaded(name, values);
  }

  Random random_ = testing::test_random();
  const std::vector<bf16> numbers_ = random_.normal_vector<bf16>(1000003);
};

TEST_F(GemmContentionCudaTest, SameBitsAsAlone) {
  constexpr int kRepeats = 40, kBeside = 3;
  constexpr int64_t kSide = 2048;
  cudaStream_t other = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "creating a second stream");
  {
    GemmPlans other_plans(other);
    const DeviceBuffer<bf16> beside_a = operand("a beside", kSide * kSide), beside_b = operand("b beside", kSide * kSide);
    const DeviceBuffer<bf16> beside_d = poisoned<bf16>("d beside", kSide * kSide);
    const auto work_beside = [&] {
      for (int i = 0; i < kBeside; ++i) {
        other_plans.run({.d = beside_d.get(), .a = beside_a.get(), .b = beside_b.get(), .M = kSide, .N = kSide, .K = kSide});
      }
    };
    for (const Product& p : {Product{384, 384, 65536, true}, Product{1152, 384, 65536, true}, Product{1536, 384, 65536, true},
                             Product{384, 1536, 65536, true}, Product{64, 768, 49152, true}, Product{768, 768, 65536, true},
                             Product{2304, 768, 65536, true}, Product{3072, 768, 49152, true}, Product{4096, 384, 50304},
                             Product{384, 384, 384, false, true, 24}, Product{384, 384, 1536, false, true, 6},
                             Product{768, 768, 3072, false, true, 22}}) {
      const DeviceBuffer<bf16> a = operand("a", p.M * p.K * p.batch), b = operand("b", p.K * p.N * p.batch);
      const DeviceBuffer<float> d = poisoned<float>("d", p.M * p.N * p.batch);  // BF16 uses half of it
      const size_t bytes = static_cast<size_t>(d.size()) * sizeof(float);
      const auto product = [&] {
        cuda_check(cudaMemsetAsync(d.get(), 0, bytes, exec().stream), "zeroing d");
        gemm({.d = d.get(),
              .a = a.get(),
              .b = b.get(),
              .c = p.transpose_a ? d.get() : nullptr,
              .M = p.M,
              .N = p.N,
              .K = p.K,
              .transpose_a = p.transpose_a,
              .transpose_b = p.transpose_b,
              .float_out = p.transpose_a,
              .beta = p.transpose_a ? 1.0f : 0.0f,
              .batch = p.batch,
              .stride_a = p.batch > 1 ? p.M * p.K : 0,
              .stride_b = p.batch > 1 ? p.K * p.N : 0,
              .stride_c = p.batch > 1 ? p.M * p.N : 0,
              .stride_d = p.batch > 1 ? p.M * p.N : 0},
             exec());
      };
      product();
      const std::vector<float> alone = d.download();
      int others = 0;
      for (int i = 0; i < kRepeats; ++i) {
        work_beside();
        product();
        work_beside();
        const std::vector<float> beside = d.download();
        others += std::memcmp(alone.data(), beside.data(), bytes) != 0 ? 1 : 0;
      }
      EXPECT_EQ(others, 0) << "of " << kRepeats << " results: " << p;
    }
    cuda_check(cudaStreamSynchronize(other), "work beside");
  }
  cuda_check(cudaStreamDestroy(other), "destroying a stream");
}

}  // namespace
}  // namespace speedrun::kernels
