// CUDA Muon and NorMuon against the reference: wide, tall and square batches, odd sizes, several steps.
#include "kernels/muon/muon.h"

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::within_rule;

// Quintic coefficients of the usual Newton-Schulz iteration.
const std::vector<MuonCoefficients> kCoefficients(5, {3.4445, -4.7750, 2.0315});

struct Case {
  int batch, rows, cols, iterations;
  bool nesterov = true;
  MasterSplit split = MasterSplit::nearest;
  int steps = 2;
  double norm_margin = 1, eps = 1e-7;
  int zero_grad = -1;  // this matrix of the batch gets no gradient
  bool skip = false;
  MuonForm form = MuonForm::muon;
  bool decays = true;

  int statistics() const { return std::max(rows, cols); }
  int64_t elements() const { return int64_t{rows} * cols; }
  int64_t gram_elements() const { return int64_t{std::min(rows, cols)} * std::min(rows, cols); }
};

constexpr MuonStep kStep{.lr = 0.3f, .decay = 0.01f, .momentum = 0.9f};
constexpr float kGradScale = 0.6f;
constexpr double kBeta2 = 0.9;

// One vector per matrix of the batch.
template <class T>
using Batch = std::vector<std::vector<T>>;

struct Inputs {
  Batch<float> masters;
  std::vector<Batch<float>> grads;  // of each step
};

Inputs make_inputs(const Case& c, testing::Random& random) {
  Inputs in;
  for (int i = 0; i < c.batch; ++i) {
    in.masters.push_back(random.normal_vector<float>(c.elements(), 0.02));
    if (c.split != MasterSplit::none) continue;
    for (float& master : in.masters.back()) master = static_cast<float>(bf16(master));
  }
  for (int step = 0; step < c.steps; ++step) {
    Batch<float> grads;
    for (int i = 0; i < c.batch; ++i) {
      grads.push_back(i == c.zero_grad ? std::vector<float>(static_cast<size_t>(c.elements()))
                                       : random.normal_vector<float>(c.elements(), 0.01 * (i + 1)));
    }
    in.grads.push_back(grads);
  }
  return in;
}

template <class T>
struct Results {
  Batch<T> masters, momentum, second;
  std::vector<T> direction;  // (batch, elements) X of the last step, transposed or not
};

template <class T>
Results<T> reference(const Case& c, const Inputs& in, const HostExec& exec) {
  Results<T> r;
  for (const auto& masters : in.masters) {
    r.masters.emplace_back(masters.begin(), masters.end());
    r.momentum.emplace_back(masters.size());
    r.second.emplace_back(static_cast<size_t>(c.statistics()));
  }
  std::vector<T> x(static_cast<size_t>(2 * c.batch * c.elements())), gram(static_cast<size_t>(2 * c.batch * c.gram_elements()));
  std::vector<T> sums(static_cast<size_t>(c.batch * muon_sums(c.rows, c.cols)));
  const StepVerdict verdict{.skip = c.skip, .grad_scale = kGradScale};
  for (const Batch<float>& floats : in.grads) {
    Batch<T> grads;
    std::vector<MuonMatrix<T>> matrices;
    for (const auto& grad : floats) grads.emplace_back(grad.begin(), grad.end());
    for (size_t i = 0; i < grads.size(); ++i) {
      matrices.push_back({.weight = {.value = r.masters[i].data(), .low = nullptr, .split = c.split},
                          .momentum = r.momentum[i].data(),
                          .second = r.second[i].data(),
                          .grad = grads[i].data(),
                          .step = &kStep,
                          .decays = c.decays});
    }
    muon_update(Muon<T>{.matrices = matrices.data(),
                        .coefficients = kCoefficients.data(),
                        .x = x.data(),
                        .gram = gram.data(),
                        .sums = sums.data(),
                        .verdict = &verdict,
                        .batch = c.batch,
                        .rows = c.rows,
                        .cols = c.cols,
                        .iterations = c.iterations,
                        .nesterov = c.nesterov,
                        .norm_margin = c.norm_margin,
                        .eps = c.eps,
                        .form = c.form,
                        .beta2 = kBeta2},
                exec);
  }
  return r;
}

template <class T>
std::vector<T> flatten(const Batch<T>& batch) {
  std::vector<T> all;
  for (const auto& values : batch) all.insert(all.end(), values.begin(), values.end());
  return all;
}

class MuonCudaTest : public CudaTest {
 protected:
  Results<float> device(const Case& c, const Inputs& in, Launch launch) {
    using testing::DeviceBuffer;
    std::vector<DeviceBuffer<bf16>> values;
    std::vector<DeviceBuffer<uint16_t>> lows;
    std::vector<DeviceBuffer<float>> momenta, seconds, grads;
    std::vector<MuonMatrix<bf16>> table;
    auto step = uploaded("step", std::vector<MuonStep>{kStep});
    for (int i = 0; i < c.batch; ++i) {
      const std::vector<float>& masters = in.masters[static_cast<size_t>(i)];
      std::vector<bf16> value(masters.size());
      std::vector<uint16_t> low(masters.size());
      for (size_t j = 0; j < masters.size(); ++j) split_master(masters[j], c.split, value[j], low[j]);
      values.push_back(uploaded("weight " + std::to_string(i), value));
      lows.push_back(uploaded("low half " + std::to_string(i), low));
      momenta.push_back(poisoned<float>("momentum " + std::to_string(i), c.elements()));
      momenta.back().zero();
      seconds.push_back(poisoned<float>("second " + std::to_string(i), c.statistics()));
      seconds.back().zero();
      grads.push_back(poisoned<float>("grad " + std::to_string(i), c.elements()));
      table.push_back({.weight = {.value = values.back().get(),
                                  .low = c.split == MasterSplit::none ? nullptr : lows.back().get(),
                                  .split = c.split},
                       .momentum = momenta.back().get(),
                       .second = c.form == MuonForm::normuon ? seconds.back().get() : nullptr,
                       .grad = grads.back().get(),
                       .step = step.get(),
                       .decays = c.decays});
    }
    auto matrices = uploaded("matrices", table);
    auto x = poisoned<bf16>("x", 2 * c.batch * c.elements()), gram = poisoned<bf16>("gram", 2 * c.batch * c.gram_elements());
    auto sums = poisoned<float>("sums", int64_t{c.batch} * muon_sums(c.rows, c.cols));
    auto verdict = uploaded("verdict", std::vector<StepVerdict>{StepVerdict{.skip = c.skip, .grad_scale = kGradScale}});
    for (const Batch<float>& step_grads : in.grads) {
      for (size_t i = 0; i < grads.size(); ++i) grads[i].upload(step_grads[i]);
      run(launch, [&] {
        muon_update(Muon<bf16>{.matrices = matrices.get(),
                               .coefficients = kCoefficients.data(),
                               .x = x.get(),
                               .gram = gram.get(),
                               .sums = sums.get(),
                               .verdict = verdict.get(),
                               .batch = c.batch,
                               .rows = c.rows,
                               .cols = c.cols,
                               .iterations = c.iterations,
                               .nesterov = c.nesterov,
                               .norm_margin = c.norm_margin,
                               .eps = c.eps,
                               .form = c.form,
                               .beta2 = kBeta2},
                    exec());
      });
    }
    Results<float> r;
    for (size_t i = 0; i < values.size(); ++i) {
      const std::vector<bf16> value = values[i].download();
      const std::vector<uint16_t> low = lows[i].download();
      std::vector<float> masters(value.size());
      for (size_t j = 0; j < value.size(); ++j)
        masters[j] = join_master(value[j], c.split == MasterSplit::none ? uint16_t{0} : low[j], c.split);
      r.masters.push_back(masters);
      r.momentum.push_back(momenta[i].download());
      r.second.push_back(seconds[i].download());
    }
    const std::vector<bf16> both = x.download();
    const int64_t first = c.iterations % 2 * c.batch * c.elements();
    for (int64_t i = first; i < first + c.batch * c.elements(); ++i)
      r.direction.push_back(static_cast<float>(both[static_cast<size_t>(i)]));
    return r;
  }

  void check(const Case& c) {
    SCOPED_TRACE("batch=" + std::to_string(c.batch) + " rows=" + std::to_string(c.rows) + " cols=" + std::to_string(c.cols) +
                 " iterations=" + std::to_string(c.iterations) + " nesterov=" + std::to_string(c.nesterov) +
                 " split=" + std::to_string(static_cast<int>(c.split)) + " form=" + std::to_string(static_cast<int>(c.form)) +
                 " decays=" + std::to_string(c.decays));
    testing::Random random = testing::test_random();
    const Inputs in = make_inputs(c, random);
    const Results<float> got = device(c, in, Launch::direct);
    const Results<double> truth = reference<double>(c, in, truth_exec());
    const Results<float> baseline = reference<float>(c, in, baseline_exec());
    for (size_t i = 0; i < got.masters.size(); ++i) {
      EXPECT_TRUE(within_rule(got.momentum[i], truth.momentum[i], baseline.momentum[i], Ulp::float32))
          << "momentum of matrix " << i;
      EXPECT_TRUE(within_rule(got.second[i], truth.second[i], baseline.second[i], Ulp::accumulated))
          << "statistics of matrix " << i;
      // What moved the weights is compared, so that their own size hides nothing.
      auto moved = [&](const auto& masters) {
        std::vector<double> change(masters.size());
        for (size_t j = 0; j < masters.size(); ++j)
          change[j] = static_cast<double>(masters[j]) - static_cast<double>(in.masters[i][j]);
        return change;
      };
      EXPECT_TRUE(within_rule(moved(got.masters[i]), moved(truth.masters[i]), moved(baseline.masters[i])))
          << "update of matrix " << i;
    }
    const Results<float> again = device(c, in, Launch::captured);
    EXPECT_TRUE(same_bits(flatten(got.masters), flatten(again.masters))) << "masters, second run";
    EXPECT_TRUE(same_bits(flatten(got.momentum), flatten(again.momentum))) << "momentum, second run";
    EXPECT_TRUE(same_bits(flatten(got.second), flatten(again.second))) << "statistics, second run";
  }
};

// Without iterations the update is the normalised momentum: checks the element-wise passes and the transposition alone.
TEST_F(MuonCudaTest, NormalisedMomentum) {
  for (const bool nesterov : {false, true}) {
    check({.batch = 2, .rows = 64, .cols = 64, .iterations = 0, .nesterov = nesterov});
    check({.batch = 2, .rows = 136, .cols = 72, .iterations = 0, .nesterov = nesterov});
    check({.batch = 2, .rows = 72, .cols = 136, .iterations = 0, .nesterov = nesterov});
    check({.batch = 1, .rows = 8, .cols = 520, .iterations = 0, .nesterov = nesterov});
    check({.batch = 1, .rows = 520, .cols = 8, .iterations = 0, .nesterov = nesterov});
  }
}

TEST_F(MuonCudaTest, NewtonSchulz) {
  for (const int iterations : {1, 2, 5}) {
    check({.batch = 3, .rows = 64, .cols = 64, .iterations = iterations});
    check({.batch = 3, .rows = 64, .cols = 192, .iterations = iterations});
    check({.batch = 3, .rows = 200, .cols = 72, .iterations = iterations});
  }
}

TEST_F(MuonCudaTest, MastersAndMargin) {
  for (const MasterSplit split : {MasterSplit::nearest, MasterSplit::truncated, MasterSplit::none}) {
    check({.batch = 2, .rows = 128, .cols = 64, .iterations = 5, .split = split, .norm_margin = 1.02, .eps = 1e-6});
    check({.batch = 2, .rows = 64, .cols = 128, .iterations = 5, .split = split, .norm_margin = 1.02, .eps = 1e-6});
  }
}

// The record's step. Decay is rare enough in size that the sign of a product near zero, which rounding decides, does not matter.
TEST_F(MuonCudaTest, NorMuon) {
  for (const int iterations : {0, 1, 5}) {
    for (const auto& [rows, cols] : {std::pair{64, 64}, {72, 72}, {64, 192}, {40, 520}, {200, 72}, {520, 8}, {8, 136}}) {
      check({.batch = 3, .rows = rows, .cols = cols, .iterations = iterations, .steps = 3, .form = MuonForm::normuon});
    }
  }
}

TEST_F(MuonCudaTest, NorMuonMasters) {
  for (const MasterSplit split : {MasterSplit::nearest, MasterSplit::truncated, MasterSplit::none}) {
    for (const bool decays : {true, false}) {
      check({.batch = 2,
             .rows = 128,
             .cols = 64,
             .iterations = 5,
             .split = split,
             .norm_margin = 1.02,
             .eps = 1e-6,
             .form = MuonForm::normuon,
             .decays = decays});
      check({.batch = 2,
             .rows = 64,
             .cols = 128,
             .iterations = 5,
             .split = split,
             .norm_margin = 1.02,
             .eps = 1e-6,
             .form = MuonForm::normuon,
             .decays = decays});
    }
  }
}

// From the X that the products made, statistics and masters to the last FP32 digits: with a decay that shows.
TEST_F(MuonCudaTest, NorMuonStepFromItsOwnDirection) {
  testing::Random random = testing::test_random();
  for (const auto& [rows, cols] : {std::pair{72, 72}, {200, 72}, {64, 192}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const Case c{.batch = 2,
                 .rows = rows,
                 .cols = cols,
                 .iterations = 5,
                 .split = MasterSplit::truncated,
                 .steps = 1,
                 .form = MuonForm::normuon};
    const Inputs in = make_inputs(c, random);
    const Results<float> got = device(c, in, Launch::direct);
    const bool by_row = rows >= cols;  // and then X is transposed
    const double aspect = std::sqrt(std::max(1.0, static_cast<double>(rows) / cols));
    for (int matrix = 0; matrix < c.batch; ++matrix) {
      const size_t matrix_index = static_cast<size_t>(matrix);
      const auto x = [&](int64_t row, int64_t col) {
        return static_cast<double>(
            got.direction[static_cast<size_t>(matrix * c.elements() + (by_row ? col * rows + row : row * cols + col))]);
      };
      std::vector<double> second(static_cast<size_t>(c.statistics()));
      double norm = 0, scaled_norm = 0;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          second[static_cast<size_t>(by_row ? row : col)] += (1 - kBeta2) * x(row, col) * x(row, col) / std::min(rows, cols);
          norm += x(row, col) * x(row, col);
        }
      }
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col)
          scaled_norm += x(row, col) * x(row, col) / second[static_cast<size_t>(by_row ? row : col)];
      }
      EXPECT_TRUE(within_rule(got.second[matrix_index], second, second, Ulp::float32)) << "statistics";
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          const size_t i = static_cast<size_t>(row * cols + col);
          const double w = in.masters[matrix_index][i], r = 1 / std::sqrt(second[static_cast<size_t>(by_row ? row : col)]);
          // The scale's rounding may go either way where FP32 and double differ at a tie.
          const double exact = r * std::sqrt(norm / scaled_norm);
          double nearest = 1e30;
          for (const double nudge : {1.0, 1 + 1e-6, 1 - 1e-6}) {
            const double v = x(row, col) * static_cast<double>(static_cast<float>(bf16(static_cast<float>(exact * nudge))));
            const double updated = w - (v * w >= 0 ? w * kStep.decay * aspect : 0) - v * kStep.lr * aspect;
            nearest = std::min(nearest, std::abs(got.masters[matrix_index][i] - updated));
          }
          ASSERT_LE(nearest, 1e-6 * (std::abs(w) + kStep.lr)) << "weight " << row << ", " << col;
        }
      }
    }
  }
}

TEST_F(MuonCudaTest, ProductionShapes) {
  check({.batch = 2, .rows = 768, .cols = 768, .iterations = 5, .steps = 1});
  check({.batch = 1, .rows = 3072, .cols = 768, .iterations = 5, .steps = 1});
  check({.batch = 1, .rows = 768, .cols = 3072, .iterations = 5, .steps = 1});
  const auto record = [](int batch, int rows, int cols) {
    return Case{.batch = batch,
                .rows = rows,
                .cols = cols,
                .iterations = 5,
                .split = MasterSplit::truncated,
                .steps = 1,
                .norm_margin = 1.02,
                .eps = 1e-6,
                .form = MuonForm::normuon};
  };
  check(record(3, 256, 768));
  check(record(2, 768, 768));
  check(record(1, 3072, 768));
}

TEST_F(MuonCudaTest, MastersSurviveAStepOfZeroBitForBit) {
  testing::Random random = testing::test_random();
  for (const MuonForm form : {MuonForm::muon, MuonForm::normuon}) {
    for (const int rows : {64, 192}) {
      Case c{.batch = 2,
             .rows = rows,
             .cols = 128,
             .iterations = 0,
             .split = MasterSplit::truncated,
             .steps = 1,
             .form = form,
             .decays = false};
      Inputs in = make_inputs(c, random);
      for (auto& grad : in.grads[0]) std::fill(grad.begin(), grad.end(), 0.0f);
      EXPECT_TRUE(same_bits(flatten(device(c, in, Launch::direct).masters), flatten(in.masters)));
    }
  }
}

TEST_F(MuonCudaTest, ZeroGradientOnlyDecays) {
  for (const double eps : {1e-7, 0.0}) {
    const Case c{.batch = 3, .rows = 64, .cols = 128, .iterations = 5, .steps = 1, .eps = eps, .zero_grad = 1};
    check(c);
    testing::Random random = testing::test_random();
    const Inputs in = make_inputs(c, random);
    const Results<float> got = device(c, in, Launch::direct);
    for (size_t j = 0; j < in.masters[1].size(); ++j) {
      ASSERT_NEAR(got.masters[1][j], in.masters[1][j] * (1 - kStep.decay), 1e-6 * std::abs(in.masters[1][j])) << "element " << j;
      ASSERT_EQ(got.momentum[1][j], 0) << "element " << j;
    }
  }
}

TEST_F(MuonCudaTest, SkipLeavesEverythingAsItWas) {
  for (const MuonForm form : {MuonForm::muon, MuonForm::normuon}) {
    for (const int rows : {64, 192}) {
      const Case c{.batch = 2, .rows = rows, .cols = 128, .iterations = 5, .skip = true, .form = form};
      testing::Random random = testing::test_random();
      const Inputs in = make_inputs(c, random);
      const Results<float> got = device(c, in, Launch::direct);
      EXPECT_TRUE(same_bits(flatten(got.masters), flatten(in.masters)));
      EXPECT_EQ(flatten(got.momentum), std::vector<float>(static_cast<size_t>(c.batch * c.elements())));
      EXPECT_EQ(flatten(got.second), std::vector<float>(static_cast<size_t>(c.batch * c.statistics())));
    }
  }
}

TEST_F(MuonCudaTest, RefusesShapesItCannotDo) {
  auto x = poisoned<bf16>("x", 1024), gram = poisoned<bf16>("gram", 1024);
  auto sums = poisoned<float>("sums", muon_sums(12, 16));
  auto matrices = poisoned<MuonMatrix<bf16>>("matrices", 1);
  auto verdict = uploaded("verdict", std::vector<StepVerdict>{StepVerdict{}});
  EXPECT_THROW(muon_update(Muon<bf16>{.matrices = matrices.get(),
                                      .coefficients = kCoefficients.data(),
                                      .x = x.get(),
                                      .gram = gram.get(),
                                      .sums = sums.get(),
                                      .verdict = verdict.get(),
                                      .batch = 1,
                                      .rows = 12,
                                      .cols = 16,
                                      .iterations = 5,
                                      .nesterov = true,
                                      .norm_margin = 1,
                                      .eps = 1e-7},
                           exec()),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels
