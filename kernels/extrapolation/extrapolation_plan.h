#pragma once
// From the sums over the snapshots to the jump, in double: one code for host and device. At most 7 differences, so plain loops
// serve.
#include <cfloat>
#include <cmath>

#include "kernels/extrapolation/extrapolation.h"

namespace speedrun::kernels {

inline constexpr int kMaxDifferences = kMaxSnapshots - 1;

// Below this share of the largest eigenvalue the smallest one is rounding: the system has no solution to speak of.
inline constexpr double kSmallestEigenvalue = 64 * DBL_EPSILON;
inline constexpr double kSmallestCoefficientSum = 1e-12;
inline constexpr double kLeastNorm = 1e-12;  // ‖x_{k−1}‖ counts as no less in the ratio
inline constexpr double kLeastRidge = 1e-10;

// Symmetric; the leading n rows and columns count.
struct SmallMatrix {
  double at[kMaxDifferences][kMaxDifferences];
  int n;
};

// γ or c, one a difference.
struct Coefficients {
  double at[kMaxDifferences] = {};
};

// b ← a⁻¹ b by elimination with row pivoting; not finite if a has no inverse.
SPEEDRUN_HD inline void solve(SmallMatrix a, Coefficients& b) {
  for (int column = 0; column < a.n; ++column) {
    int pivot = column;
    for (int row = column + 1; row < a.n; ++row) {
      if (std::abs(a.at[row][column]) > std::abs(a.at[pivot][column])) pivot = row;
    }
    for (int j = 0; j < a.n; ++j) {
      const double swapped = a.at[column][j];
      a.at[column][j] = a.at[pivot][j];
      a.at[pivot][j] = swapped;
    }
    const double swapped = b.at[column];
    b.at[column] = b.at[pivot];
    b.at[pivot] = swapped;
    for (int row = column + 1; row < a.n; ++row) {
      const double factor = a.at[row][column] / a.at[column][column];
      for (int j = column; j < a.n; ++j) a.at[row][j] -= factor * a.at[column][j];
      b.at[row] -= factor * b.at[column];
    }
  }
  for (int row = a.n - 1; row >= 0; --row) {
    for (int j = row + 1; j < a.n; ++j) b.at[row] -= a.at[row][j] * b.at[j];
    b.at[row] /= a.at[row][row];
  }
}

// The rotation of rows and columns p and q that makes a_pq 0.
SPEEDRUN_HD inline void rotate(SmallMatrix& a, int p, int q) {
  if (a.at[p][q] == 0) return;
  const double theta = (a.at[q][q] - a.at[p][p]) / (2 * a.at[p][q]);
  const double tangent = (theta < 0 ? -1 : 1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
  const double cosine = 1 / std::sqrt(tangent * tangent + 1), sine = tangent * cosine;
  for (int i = 0; i < a.n; ++i) {
    const double x = a.at[i][p], y = a.at[i][q];
    a.at[i][p] = cosine * x - sine * y;
    a.at[i][q] = sine * x + cosine * y;
  }
  for (int j = 0; j < a.n; ++j) {
    const double x = a.at[p][j], y = a.at[q][j];
    a.at[p][j] = cosine * x - sine * y;
    a.at[q][j] = sine * x + cosine * y;
  }
  a.at[p][q] = a.at[q][p] = 0;
}

// Largest over smallest eigenvalue (Jacobi's method), at most 1 / kSmallestEigenvalue, which stands for a singular matrix, too.
SPEEDRUN_HD inline double condition_number(SmallMatrix a) {
  constexpr int kMaxSweeps = 30;  // 5 to 8 are usual: convergence is quadratic
  constexpr double kNegligible = DBL_EPSILON * DBL_EPSILON;
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    double diagonal = 0, rest = 0;
    for (int i = 0; i < a.n; ++i) {
      diagonal += a.at[i][i] * a.at[i][i];
      for (int j = i + 1; j < a.n; ++j) rest += a.at[i][j] * a.at[i][j];
    }
    if (rest <= kNegligible * diagonal) break;
    for (int p = 0; p < a.n; ++p) {
      for (int q = p + 1; q < a.n; ++q) rotate(a, p, q);
    }
  }
  double smallest = a.at[0][0], largest = a.at[0][0];
  for (int i = 1; i < a.n; ++i) {
    smallest = std::fmin(smallest, a.at[i][i]);
    largest = std::fmax(largest, a.at[i][i]);
  }
  return smallest > kSmallestEigenvalue * largest ? largest / smallest : 1 / kSmallestEigenvalue;
}

// c (their sum is 1) and the condition number of the methods that solve for them.
SPEEDRUN_HD inline JumpRefusal solve_coefficients(const JumpPlan& plan, const SmallMatrix& gram, Coefficients& c,
                                                  double& condition) {
  const bool mpe = plan.method == ExtrapolationMethod::mpe;
  const int m = gram.n;
  double trace = 0;
  for (int i = 0; i < m; ++i) trace += gram.at[i][i];
  const double ridge = plan.regularization * std::fmax(trace, 0.0) / m + kLeastRidge;
  SmallMatrix system = gram;
  if (mpe) system.n = m - 1;
  for (int i = 0; i < system.n; ++i) {
    system.at[i][i] += ridge;
    c.at[i] = mpe ? -gram.at[i][m - 1] : 1;
  }
  if (system.n > 0) {
    condition = condition_number(system);
    if (condition >= 1 / kSmallestEigenvalue) return JumpRefusal::singular;
    solve(system, c);
  }
  if (mpe) c.at[m - 1] = 1;
  double sum = 0;
  for (int i = 0; i < m; ++i) sum += c.at[i];
  if (!std::isfinite(sum)) return JumpRefusal::not_finite;
  if (std::abs(sum) < kSmallestCoefficientSum) return JumpRefusal::singular;
  for (int i = 0; i < m; ++i) c.at[i] /= sum;
  return JumpRefusal::none;
}

// γ_j of every method.
SPEEDRUN_HD inline Coefficients difference_coefficients(const JumpPlan& plan, int m, const Coefficients& c) {
  Coefficients gamma;
  double before = 0, after = 1;  // Σ c_i over i < j and over i >= j
  for (int j = 0; j < m; ++j) {
    switch (plan.method) {
      case ExtrapolationMethod::rre:
      case ExtrapolationMethod::mpe:
        gamma.at[j] = before + c.at[j];
        break;
      case ExtrapolationMethod::rre_suffix:
        gamma.at[j] = after;
        break;
      case ExtrapolationMethod::anderson:
        gamma.at[j] = before + (1 - plan.mixing) * c.at[j];
        break;
      case ExtrapolationMethod::linear:
        gamma.at[j] = -plan.horizon / m;
        break;
      case ExtrapolationMethod::fixed:
        gamma.at[j] = plan.fixed[j];
        break;
    }
    before += c.at[j];
    after -= c.at[j];
  }
  return gamma;
}

// What plan_jump writes; sums as snapshot_sums makes them, skip: the verdict's.
SPEEDRUN_HD inline JumpReport make_jump_report(const JumpPlan& plan, const double* sums, bool skip) {
  const int m = plan.k - 1;
  JumpReport refused;
  refused.differences = m;

  SmallMatrix gram;
  gram.n = m;
  bool finite = !skip, changed = false;
  for (int i = 0; i < m; ++i) {
    for (int j = i; j < m; ++j) {
      const double sum = *sums++;
      gram.at[i][j] = gram.at[j][i] = sum;
      finite = finite && std::isfinite(sum);
    }
    changed = changed || gram.at[i][i] > 0;
  }
  const double norm = std::sqrt(*sums);
  refused.refusal = JumpRefusal::not_finite;
  if (!finite || !std::isfinite(norm)) return refused;
  refused.refusal = JumpRefusal::no_change;
  if (!changed) return refused;

  Coefficients c;
  if (plan.method != ExtrapolationMethod::linear && plan.method != ExtrapolationMethod::fixed) {
    refused.refusal = solve_coefficients(plan, gram, c, refused.condition);
    if (refused.refusal != JumpRefusal::none) return refused;
  }

  const Coefficients gamma = difference_coefficients(plan, m, c);
  double square = 0;  // γᵀGγ = ‖Σ γ_j u_j‖²
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < m; ++j) square += gamma.at[i] * gram.at[i][j] * gamma.at[j];
  }
  JumpReport report = refused;
  report.refusal = JumpRefusal::none;
  report.jump = std::abs(plan.damping) * std::sqrt(std::fmax(square, 0.0)) / std::fmax(norm, kLeastNorm);
  const bool capped = plan.max_jump > 0 && report.jump > plan.max_jump;
  report.capped_jump = capped ? plan.max_jump : report.jump;
  const double scale = capped ? plan.damping * (plan.max_jump / report.jump) : plan.damping;

  // No element of the result, and nothing on the way to it, can be larger than this; it has to be a float.
  double bound = norm;
  for (int j = 0; j < m; ++j) {
    report.c[j] = c.at[j];
    report.weights[j] = scale * gamma.at[j];
    bound += std::abs(report.weights[j]) * (1 + std::sqrt(gram.at[j][j]));
  }
  refused.refusal = JumpRefusal::not_finite;
  return std::isfinite(square) && bound <= static_cast<double>(FLT_MAX) ? report : refused;
}

// The master after a jump: x_{k−1} − Σ weights_j u_j, x oldest first. Fused multiply-add, so that host and device get the same
// bits.
template <class A>
SPEEDRUN_HD inline A jumped(const A* x, const A* weights, int k) {
  A step = 0;
  for (int j = 0; j + 1 < k; ++j) step = std::fma(weights[j], x[j + 1] - x[j], step);
  return x[k - 1] - step;
}

// An average's next value; where it starts nothing needs to be there.
template <class A>
SPEEDRUN_HD inline A averaged(A average, A master, A share) {
  return share == 1 ? master : std::fma(master - average, share, average);
}

}  // namespace speedrun::kernels
