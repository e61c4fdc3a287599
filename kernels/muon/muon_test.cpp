#include "kernels/muon/muon.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

// The baseline's 12 × {A = XXᵀ; X ← 2X + (−1.5A + 0.5A²)X}.
const std::vector<MuonCoefficients> kCoefficients(12, MuonCoefficients{2, -1.5, 0.5});

constexpr double kBeta2 = 0.9;

template <class T>
struct Problem {
  int batch, rows, cols;
  bool nesterov = true;
  MuonStep step{.lr = 0.02f, .decay = 0.01f, .momentum = 0.9f};
  StepVerdict verdict{.grad_scale = 0.5f};
  MasterSplit split = MasterSplit::nearest;
  double eps = 1e-7;
  MuonForm form = MuonForm::muon;
  bool decays = true;
  const MuonStep* other_step = nullptr;  // of the matrices after the first
  std::vector<MuonCoefficients> coefficients = kCoefficients;
  std::vector<std::vector<T>> weight, momentum, second, grad;
  std::vector<T> x, gram, sums;

  Problem(int count, int the_rows, int the_cols, Random& random) : batch(count), rows(the_rows), cols(the_cols) {
    const int64_t size = int64_t{rows} * cols, smaller = std::min(rows, cols);
    for (int i = 0; i < batch; ++i) {
      weight.push_back(random.normal_vector<T>(size));
      momentum.push_back(std::vector<T>(static_cast<size_t>(size)));
      second.push_back(std::vector<T>(static_cast<size_t>(std::max(rows, cols))));
      grad.push_back(random.normal_vector<T>(size));
    }
    x = poisoned<T>(2 * batch * size);
    gram = poisoned<T>(2 * batch * smaller * smaller);
    sums = poisoned<T>(batch * muon_sums(rows, cols));
  }

  void update(const HostExec& exec) {
    std::vector<MuonMatrix<T>> matrices;
    for (int i = 0; i < batch; ++i) {
      matrices.push_back({.weight = {weight[i].data(), nullptr, split},
                          .momentum = momentum[i].data(),
                          .second = form == MuonForm::normuon ? second[i].data() : nullptr,
                          .grad = grad[i].data(),
                          .step = i > 0 && other_step != nullptr ? other_step : &step,
                          .decays = decays});
    }
    muon_update(Muon<T>{.matrices = matrices.data(),
                        .coefficients = coefficients.data(),
                        .x = x.data(),
                        .gram = gram.data(),
                        .sums = sums.data(),
                        .verdict = &verdict,
                        .batch = batch,
                        .rows = rows,
                        .cols = cols,
                        .iterations = static_cast<int>(coefficients.size()),
                        .nesterov = nesterov,
                        .norm_margin = 1.0,
                        .eps = eps,
                        .form = form,
                        .beta2 = kBeta2},
                exec);
  }
};

using Matrix = std::vector<double>;  // row-major

Matrix multiply(const Matrix& a, const Matrix& b, int64_t M, int64_t K, int64_t N) {
  Matrix c(static_cast<size_t>(M * N));
  for (int64_t i = 0; i < M; ++i) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t j = 0; j < N; ++j) c[i * N + j] += a[i * K + k] * b[k * N + j];
    }
  }
  return c;
}

Matrix transpose(const Matrix& a, int64_t M, int64_t N) {
  Matrix b(a.size());
  for (int64_t i = 0; i < M; ++i) {
    for (int64_t j = 0; j < N; ++j) b[j * M + i] = a[i * N + j];
  }
  return b;
}

// Momentum and orthogonalisation of one matrix without any transposition: for tall matrices X(XᵀX) replaces (XXᵀ)X, which is the
// same polynomial.
Matrix naive_direction(Matrix& momentum, const Matrix& grad, int64_t rows, int64_t cols, bool nesterov,
                       const std::vector<MuonCoefficients>& coefficients) {
  const double mu = 0.9f;
  Matrix x(momentum.size());
  double squares = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double g = 0.5 * grad[i];
    momentum[i] = mu * momentum[i] + (1 - mu) * g;
    x[i] = nesterov ? (1 - mu) * g + mu * momentum[i] : momentum[i];
    squares += x[i] * x[i];
  }
  for (double& value : x) value /= std::sqrt(squares) + 1e-7;
  for (const MuonCoefficients& k : coefficients) {
    const Matrix a = multiply(x, transpose(x, rows, cols), rows, cols, rows), ax = multiply(a, x, rows, rows, cols),
                 aax = multiply(a, ax, rows, rows, cols);
    for (size_t i = 0; i < x.size(); ++i) x[i] = k.a * x[i] + k.b * ax[i] + k.c * aax[i];
  }
  return x;
}

double aspect_of(int64_t rows, int64_t cols) {
  return std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(cols)));
}

void naive_update(Matrix& weight, Matrix& momentum, const Matrix& grad, int64_t rows, int64_t cols, bool nesterov) {
  const double lr = 0.02f, decay = 0.01f;
  const Matrix x = naive_direction(momentum, grad, rows, cols, nesterov, kCoefficients);
  for (size_t i = 0; i < x.size(); ++i) {
    weight[i] -= decay * weight[i];
    weight[i] -= lr * aspect_of(rows, cols) * x[i];
  }
}

// What normuon makes of X: every row (rows >= cols) or column divided by the root of its running mean square, Frobenius norm kept.
Matrix normalised(const Matrix& x, Matrix& second, int64_t rows, int64_t cols) {
  const bool by_row = rows >= cols;
  Matrix mean(static_cast<size_t>(by_row ? rows : cols)), v = x;
  double norm = 0, scaled_norm = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      mean[by_row ? i : j] += x[i * cols + j] * x[i * cols + j] / static_cast<double>(by_row ? cols : rows);
      norm += x[i * cols + j] * x[i * cols + j];
    }
  }
  for (size_t k = 0; k < mean.size(); ++k) second[k] = kBeta2 * second[k] + (1 - kBeta2) * mean[k];
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      v[i * cols + j] /= std::sqrt(std::max(second[by_row ? i : j], 1e-10));
      scaled_norm += v[i * cols + j] * v[i * cols + j];
    }
  }
  for (double& value : v) value *= std::sqrt(norm) / std::max(std::sqrt(scaled_norm), 1e-10);
  return v;
}

TEST(Muon, FollowsTheFormulaForSeveralSteps) {
  Random random = test_random();
  for (const auto& [rows, cols] : {std::pair{7, 7}, {5, 12}, {13, 6}, {1, 9}, {9, 1}}) {
    for (const bool nesterov : {true, false}) {
      for (const int batch : {1, 3}) {
        Problem<double> p(batch, rows, cols, random);
        p.nesterov = nesterov;
        std::vector<Matrix> weight = p.weight, momentum = p.momentum;
        for (int step = 0; step < 3; ++step) {
          p.update(HostExec{});
          for (int i = 0; i < batch; ++i) {
            naive_update(weight[i], momentum[i], p.grad[i], rows, cols, nesterov);
            for (size_t k = 0; k < weight[i].size(); ++k) {
              ASSERT_NEAR(p.weight[i][k], weight[i][k], 1e-8)
                  << rows << "x" << cols << " matrix " << i << " element " << k << " step " << step;
              ASSERT_NEAR(p.momentum[i][k], momentum[i][k], 1e-12);
            }
          }
        }
      }
    }
  }
}

TEST(NorMuon, FollowsTheFormulaForSeveralSteps) {
  Random random = test_random();
  for (const auto& [rows, cols] : {std::pair{7, 7}, {5, 12}, {13, 6}, {1, 9}, {9, 1}, {70, 3}, {3, 130}}) {
    for (const bool decays : {true, false}) {
      for (const int batch : {1, 3}) {
        Problem<double> p(batch, rows, cols, random);
        p.form = MuonForm::normuon;
        p.decays = decays;
        const double lr = 0.02f, decay = decays ? static_cast<double>(0.01f) : 0, aspect = aspect_of(rows, cols);
        std::vector<Matrix> weight = p.weight, momentum = p.momentum, second = p.second;
        for (int step = 0; step < 3; ++step) {
          p.update(HostExec{});
          for (int i = 0; i < batch; ++i) {
            const Matrix v =
                normalised(naive_direction(momentum[i], p.grad[i], rows, cols, true, kCoefficients), second[i], rows, cols);
            for (size_t k = 0; k < v.size(); ++k) {
              double& w = weight[i][k];
              w -= (v[k] * w >= 0 ? w * decay * aspect : 0) + v[k] * lr * aspect;
              ASSERT_NEAR(p.weight[i][k], w, 1e-8)
                  << rows << "x" << cols << " matrix " << i << " element " << k << " step " << step;
              ASSERT_NEAR(p.momentum[i][k], momentum[i][k], 1e-12);
            }
            for (size_t k = 0; k < second[i].size(); ++k) ASSERT_NEAR(p.second[i][k], second[i][k], 1e-8) << "statistic " << k;
          }
        }
      }
    }
  }
}

// Whatever the statistics, the step is as long as the orthogonal matrix; in the first step all rows (columns) are equally long.
TEST(NorMuon, KeepsTheNormAndLevelsTheRows) {
  Random random = test_random();
  for (const auto& [rows, cols] : {std::pair{24, 64}, {64, 24}, {32, 32}}) {
    Problem<float> p(1, rows, cols, random);
    p.form = MuonForm::normuon;
    p.step = {.lr = 1, .decay = 0, .momentum = 0};
    p.coefficients.clear();
    std::fill(p.weight[0].begin(), p.weight[0].end(), 0.0f);
    p.update(HostExec{});
    const bool by_row = rows >= cols;
    std::vector<double> lengths(static_cast<size_t>(by_row ? rows : cols));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const double step = p.weight[0][i * cols + j] / aspect_of(rows, cols);
        lengths[by_row ? i : j] += step * step;
      }
    }
    double sum = 0;
    for (const double length : lengths) {
      EXPECT_NEAR(length, 1.0 / static_cast<double>(lengths.size()), 1e-4) << rows << "x" << cols;
      sum += length;
    }
    EXPECT_NEAR(sum, 1, 1e-4);
  }
}

TEST(NorMuon, ZeroGradientOnlyDecays) {
  Random random = test_random();
  Problem<float> p(2, 10, 6, random);
  p.form = MuonForm::normuon;
  for (auto& grad : p.grad) std::fill(grad.begin(), grad.end(), 0.0f);
  const std::vector<std::vector<float>> before = p.weight;
  p.update(HostExec{});
  const float decay = 0.01f * static_cast<float>(aspect_of(10, 6));
  for (int i = 0; i < 2; ++i) {
    for (size_t k = 0; k < before[i].size(); ++k) EXPECT_FLOAT_EQ(p.weight[i][k], before[i][k] - decay * before[i][k]);
    EXPECT_EQ(p.second[i], std::vector<float>(10));
  }
}

// The update of a random matrix, −ΔW/lr/aspect, has orthonormal rows (or columns): all singular values near 1.
TEST(Muon, UpdateIsNearlyOrthogonal) {
  Random random = test_random();
  for (const auto& [rows, cols] : {std::pair{24, 64}, {64, 24}}) {
    for (const bool round : {false, true}) {
      Problem<float> p(1, rows, cols, random);
      p.step.decay = 0;
      p.step.lr = 1;
      std::fill(p.weight[0].begin(), p.weight[0].end(), 0.0f);
      p.update(HostExec{.round_bf16 = round});
      const double aspect = std::sqrt(std::max(1.0, static_cast<double>(rows) / cols));
      Matrix x(p.weight[0].begin(), p.weight[0].end());
      for (double& value : x) value /= -aspect;
      const Matrix wide = rows > cols ? transpose(x, rows, cols) : x;
      const Matrix gram = multiply(wide, transpose(wide, 24, 64), 24, 64, 24);
      for (int i = 0; i < 24; ++i) {
        for (int j = 0; j < 24; ++j)
          EXPECT_NEAR(gram[i * 24 + j], i == j ? 1 : 0, round ? 0.05 : 1e-3) << rows << "x" << cols << " at " << i << "," << j;
      }
    }
  }
}

TEST(Muon, ZeroGradientOnlyDecays) {
  Random random = test_random();
  for (const double eps : {1e-7, 0.0}) {
    Problem<float> p(2, 6, 10, random);
    p.eps = eps;
    for (auto& grad : p.grad) std::fill(grad.begin(), grad.end(), 0.0f);
    const std::vector<std::vector<float>> before = p.weight;
    p.update(HostExec{});
    for (int i = 0; i < 2; ++i) {
      for (size_t k = 0; k < before[i].size(); ++k) EXPECT_FLOAT_EQ(p.weight[i][k], before[i][k] - 0.01f * before[i][k]);
    }
  }
}

TEST(Muon, SkipLeavesEverythingAlone) {
  Random random = test_random();
  for (const MuonForm form : {MuonForm::muon, MuonForm::normuon}) {
    Problem<float> p(2, 6, 10, random);
    p.form = form;
    p.verdict.skip = 1;
    p.grad[0][0] = std::nanf("");
    const Problem<float> before = p;
    p.update(HostExec{});
    EXPECT_EQ(p.weight, before.weight);
    EXPECT_EQ(p.momentum, before.momentum);
    EXPECT_EQ(p.second, before.second);
  }
}

TEST(Muon, MatricesOfABatchHaveStepsOfTheirOwn) {
  Random random = test_random();
  for (const MuonForm form : {MuonForm::muon, MuonForm::normuon}) {
    Problem<float> together(2, 6, 10, random);
    together.form = form;
    const MuonStep other{.lr = 0.3f, .decay = 0.2f, .momentum = 0.5f};
    Outputs apart;
    for (const int i : {0, 1}) {
      Problem<float> p = together;
      if (i == 1) p.step = other;
      p.update(HostExec{});
      apart.push_back(p.weight[i]);
    }
    Problem<float> p = together;
    p.other_step = &other;
    p.update(HostExec{});
    EXPECT_EQ(p.weight, apart);
  }
}

TEST(Muon, RoundsTheWeightWithoutAMaster) {
  Random random = test_random();
  for (const MuonForm form : {MuonForm::muon, MuonForm::normuon}) {
    Problem<float> p(1, 12, 20, random);
    p.form = form;
    p.split = MasterSplit::none;
    p.update(HostExec{.round_bf16 = true});
    EXPECT_TRUE(all_bf16(p.weight[0]));
    EXPECT_TRUE(all_bf16(p.gram));
    EXPECT_TRUE(all_bf16(p.x));
    EXPECT_FALSE(all_bf16(p.momentum[0]));
  }
}

TEST(Muon, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  for (const MuonForm form : {MuonForm::muon, MuonForm::normuon}) {
    for (const int batch : {1, 3}) {
      Problem<float> start(batch, 96, 200, random);
      start.form = form;
      check_thread_counts([&](const HostExec& exec) {
        Problem<float> p = start;
        p.update(exec);
        p.update(exec);
        Outputs outputs = p.weight;
        outputs.insert(outputs.end(), p.momentum.begin(), p.momentum.end());
        outputs.insert(outputs.end(), p.second.begin(), p.second.end());
        return outputs;
      });
    }
  }
}

}  // namespace
}  // namespace speedrun::kernels
