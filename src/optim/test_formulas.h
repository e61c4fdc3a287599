#pragma once
// The optimizers' formulas written down once more, in double and without regard to speed, for the tests.
#include <algorithm>
#include <cmath>
#include <vector>

#include "src/config/config.h"

namespace speedrun {

using Values = std::vector<double>;

// AdamW (Loshchilov & Hutter 2019), decay first, on one parameter.
struct PlainAdamW {
  Values m, v;
  int updates = 0;

  void update(Values& weight, const Values& gradient, const Config::Group& group, double lr, double decay) {
    m.resize(weight.size());
    v.resize(weight.size());
    ++updates;
    for (size_t i = 0; i < weight.size(); ++i) {
      weight[i] *= 1 - lr * decay;
      m[i] = group.beta1 * m[i] + (1 - group.beta1) * gradient[i];
      v[i] = group.beta2 * v[i] + (1 - group.beta2) * gradient[i] * gradient[i];
      const double m_hat = m[i] / (1 - std::pow(group.beta1, updates)), v_hat = v[i] / (1 - std::pow(group.beta2, updates));
      weight[i] -= lr * m_hat / (std::sqrt(v_hat) + group.eps);
    }
  }
};

// Adam of modded-nanogpt record #89 on one parameter: ε beside the uncorrected root, decay by lr² where the step shrinks the
// weight.
struct PlainCautiousAdam {
  Values m, v;
  int updates = 0;

  void update(Values& weight, const Values& gradient, const Config::Group& group, double lr, double decay) {
    m.resize(weight.size());
    v.resize(weight.size());
    ++updates;
    for (size_t i = 0; i < weight.size(); ++i) {
      m[i] = group.beta1 * m[i] + (1 - group.beta1) * gradient[i];
      v[i] = group.beta2 * v[i] + (1 - group.beta2) * gradient[i] * gradient[i];
      const double bias = std::sqrt(1 - std::pow(group.beta2, updates)) / (1 - std::pow(group.beta1, updates));
      double u = lr * bias * m[i] / (std::sqrt(v[i]) + group.eps);
      if (u * weight[i] > 0) u += lr * lr * decay * weight[i];
      weight[i] -= u;
    }
  }
};

// (rows, inner) x (inner, cols)
inline Values product(const Values& a, const Values& b, int rows, int inner, int cols) {
  Values c(static_cast<size_t>(rows * cols));
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) {
      for (int k = 0; k < inner; ++k)
        c[static_cast<size_t>(i * cols + j)] += a[static_cast<size_t>(i * inner + k)] * b[static_cast<size_t>(k * cols + j)];
    }
  }
  return c;
}

inline Values transpose(const Values& a, int rows, int cols) {
  Values t(a.size());
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) t[static_cast<size_t>(j * rows + i)] = a[static_cast<size_t>(i * cols + j)];
  }
  return t;
}

// Momentum and Newton-Schulz on one (rows, cols) matrix: X.
inline Values orthogonal_direction(Values& momentum, const Values& gradient, int rows, int cols, const Config::Optim::Muon& muon,
                                   double mu) {
  momentum.resize(gradient.size());
  Values x(gradient.size());
  double squares = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    momentum[i] = mu * momentum[i] + (1 - mu) * gradient[i];
    x[i] = muon.nesterov ? (1 - mu) * gradient[i] + mu * momentum[i] : momentum[i];
    squares += x[i] * x[i];
  }
  const bool tall = rows > cols;
  const int m = std::min(rows, cols), n = std::max(rows, cols);
  if (tall) x = transpose(x, rows, cols);
  for (double& value : x) value /= std::sqrt(squares) * muon.norm_margin + muon.eps;
  for (int iteration = 0; iteration < muon.iterations; ++iteration) {
    const auto& k = muon.coefficients[std::min(static_cast<size_t>(iteration), muon.coefficients.size() - 1)];
    const Values a = product(x, transpose(x, m, n), m, n, m);
    Values b = product(a, a, m, m, m);
    for (size_t i = 0; i < b.size(); ++i) b[i] = k[1] * a[i] + k[2] * b[i];
    const Values bx = product(b, x, m, m, n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = k[0] * x[i] + bx[i];
  }
  return tall ? transpose(x, m, n) : x;
}

inline double aspect_of(int rows, int cols) { return std::sqrt(std::max(1.0, static_cast<double>(rows) / cols)); }

// Muon (Jordan et al. 2024) on one (rows, cols) matrix.
struct PlainMuon {
  Values momentum;

  void update(Values& weight, const Values& gradient, int rows, int cols, const Config::Optim::Muon& muon, double mu, double lr,
              double decay) {
    const Values x = orthogonal_direction(momentum, gradient, rows, cols, muon, mu);
    const double size = lr * aspect_of(rows, cols);
    for (size_t i = 0; i < x.size(); ++i) weight[i] = weight[i] * (1 - lr * decay) - size * x[i];
  }
};

// NorMuon of modded-nanogpt record #89. eta: the rate without the group's multiplier.
struct PlainNorMuon {
  Values momentum, second;

  void update(Values& weight, const Values& gradient, int rows, int cols, const Config::Optim::Muon& muon, double mu, double eta,
              double multiplier, double decay) {
    Values v = orthogonal_direction(momentum, gradient, rows, cols, muon, mu);
    const bool by_row = rows >= cols;
    const auto line = [&](size_t i) { return by_row ? i / static_cast<size_t>(cols) : i % static_cast<size_t>(cols); };
    second.resize(static_cast<size_t>(by_row ? rows : cols));
    Values mean(second.size());
    double norm = 0, scaled_norm = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      mean[line(i)] += v[i] * v[i] / (by_row ? cols : rows);
      norm += v[i] * v[i];
    }
    for (size_t k = 0; k < mean.size(); ++k) second[k] = muon.beta2 * second[k] + (1 - muon.beta2) * mean[k];
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] /= std::sqrt(std::max(second[line(i)], 1e-10));
      scaled_norm += v[i] * v[i];
    }
    const double step_size = eta * multiplier * aspect_of(rows, cols);
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] *= std::sqrt(norm / scaled_norm);
      weight[i] -= (v[i] * weight[i] >= 0 ? weight[i] * decay * eta * step_size : 0) + v[i] * step_size;
    }
  }
};

}  // namespace speedrun
