// CUDA scaled weights against the reference: sizes around the cut into parts, the Main Track's matrices, items without gradient.
#include "kernels/scaled_weight/scaled_weight.h"

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

using Buffer = testing::DeviceBuffer<bf16>;
using GradBuffer = testing::DeviceBuffer<float>;

struct Inputs {
  std::vector<int64_t> sizes;
  std::vector<std::vector<bf16>> weight;
  std::vector<std::vector<float>> grad;
  std::vector<bf16> scalars;
  std::vector<float> dscalars;
  int without_grad = -1;  // the item that has none
};

Inputs make_inputs(const std::vector<int64_t>& sizes, int without_grad, testing::Random& random) {
  const int64_t items = static_cast<int64_t>(sizes.size());
  Inputs in{.sizes = sizes,
            .weight = {},
            .grad = {},
            .scalars = random.normal_vector<bf16>(items),
            .dscalars = random.normal_vector<float>(items),
            .without_grad = without_grad};
  for (const int64_t n : sizes) {
    in.weight.push_back(random.uniform_vector<bf16>(n, 0.05));
    in.grad.push_back(random.uniform_vector<float>(n, 0.01));
  }
  return in;
}

template <class T>
struct Results {
  std::vector<std::vector<T>> out;
  std::vector<std::vector<Acc<T>>> grad;
  std::vector<Acc<T>> dscalars;
};

template <class T>
Results<T> reference(const Inputs& in, const HostExec& exec) {
  const std::vector<T> scalars = widen<T>(in.scalars);
  std::vector<std::vector<T>> weight;
  Results<T> r{.out = {}, .grad = {}, .dscalars = {in.dscalars.begin(), in.dscalars.end()}};
  for (size_t i = 0; i < in.sizes.size(); ++i) {
    weight.push_back(widen<T>(in.weight[i]));
    r.out.emplace_back(in.weight[i].size());
    r.grad.emplace_back(in.grad[i].begin(), in.grad[i].end());
  }
  std::vector<ScaledWeightItem<T>> items;
  for (size_t i = 0; i < in.sizes.size(); ++i) {
    items.push_back({.out = r.out[i].data(),
                     .weight = weight[i].data(),
                     .scalar = &scalars[i],
                     .grad = static_cast<int>(i) == in.without_grad ? nullptr : r.grad[i].data(),
                     .dscalar = &r.dscalars[i],
                     .n = in.sizes[i]});
  }
  const int num_items = static_cast<int>(items.size());
  std::vector<double> scratch(static_cast<size_t>(scaled_weights_scratch(num_items)));
  const ScaledWeights<T> args{items.data(), scratch.data(), num_items};
  scaled_weights_forward(args, exec);
  scaled_weights_backward(args, exec);
  return r;
}

class ScaledWeightCudaTest : public CudaTest {
 protected:
  Results<bf16> device(const Inputs& in, Launch launch) {
    auto scalars = uploaded("scalars", in.scalars);
    auto dscalars = uploaded("dscalars", in.dscalars);
    std::vector<std::unique_ptr<Buffer>> weight, out;
    std::vector<std::unique_ptr<GradBuffer>> grad;
    std::vector<ScaledWeightItem<bf16>> items;
    for (size_t i = 0; i < in.sizes.size(); ++i) {
      const std::string name = " of item " + std::to_string(i);
      weight.push_back(std::make_unique<Buffer>(uploaded("weight" + name, in.weight[i])));
      out.push_back(std::make_unique<Buffer>(poisoned<bf16>("out" + name, in.sizes[i])));
      grad.push_back(std::make_unique<GradBuffer>(uploaded("grad" + name, in.grad[i])));
      items.push_back({.out = out[i]->get(),
                       .weight = weight[i]->get(),
                       .scalar = scalars.get() + i,
                       .grad = static_cast<int>(i) == in.without_grad ? nullptr : grad[i]->get(),
                       .dscalar = dscalars.get() + i,
                       .n = in.sizes[i]});
    }
    const int num_items = static_cast<int>(items.size());
    auto table = uploaded("items", items);
    auto scratch = poisoned<double>("scratch", scaled_weights_scratch(num_items));
    const ScaledWeights<bf16> args{table.get(), scratch.get(), num_items};
    run(launch, [&] {
      scaled_weights_forward(args, exec());
      scaled_weights_backward(args, exec());
    });
    Results<bf16> r{.out = {}, .grad = {}, .dscalars = dscalars.download()};
    for (const auto& buffer : out) r.out.push_back(buffer->download());
    for (const auto& buffer : grad) r.grad.push_back(buffer->download());
    return r;
  }

  void check(const std::vector<int64_t>& sizes, int without_grad = -1) {
    testing::Random random = testing::test_random();
    const Inputs in = make_inputs(sizes, without_grad, random);
    const Results<bf16> got = device(in, Launch::direct), again = device(in, Launch::captured);
    const Results<double> truth = reference<double>(in, truth_exec());
    const Results<float> baseline = reference<float>(in, baseline_exec());
    for (size_t i = 0; i < sizes.size(); ++i) {
      SCOPED_TRACE("item " + std::to_string(i) + " of " + std::to_string(sizes[i]) + " elements");
      // One product each: exact.
      EXPECT_TRUE(same_bits(widen<float>(got.out[i]), baseline.out[i])) << "out";
      EXPECT_TRUE(same_bits(got.grad[i], baseline.grad[i])) << "grad";
      EXPECT_TRUE(within_rule(std::vector{got.dscalars[i]}, std::vector{truth.dscalars[i]}, std::vector{baseline.dscalars[i]},
                              Ulp::float32))
          << "dscalar";
      EXPECT_TRUE(same_bits(got.out[i], again.out[i])) << "out, second run";
      EXPECT_TRUE(same_bits(got.grad[i], again.grad[i])) << "grad, second run";
    }
    EXPECT_TRUE(same_bits(got.dscalars, again.dscalars)) << "dscalars, second run";
  }
};

TEST_F(ScaledWeightCudaTest, SizesAroundTheCut) {
  check({8});
  check({8, 16, 504, 512, 520, 1024, 1032, 2048, 4096, 4104, 64 * 2048, 64 * 2048 + 8, 64 * 4096 - 8, 1'000'008}, 5);
}

TEST_F(ScaledWeightCudaTest, ManySmallItems) {
  std::vector<int64_t> sizes;
  for (int64_t i = 1; i <= 133; ++i) sizes.push_back(8 * i);
  check(sizes, 132);
}

TEST_F(ScaledWeightCudaTest, MatricesOfTheMainTrack) {
  std::vector<int64_t> sizes;
  for (int layer = 0; layer < 10; ++layer) {
    sizes.push_back(3 * 768 * 768);
    sizes.push_back(768 * 768);
  }
  check(sizes, 7);
}

TEST_F(ScaledWeightCudaTest, RefusesNothingToDo) {
  EXPECT_THROW(scaled_weights_forward(ScaledWeights<bf16>{nullptr, nullptr, 1}, exec()), Error);
  EXPECT_THROW(scaled_weights_backward(ScaledWeights<bf16>{nullptr, nullptr, 0}, exec()), Error);
}

}  // namespace
}  // namespace speedrun::kernels
