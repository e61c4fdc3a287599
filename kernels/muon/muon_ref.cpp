#include <cmath>
#include <cstring>

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/gemm_ref.h"
#include "kernels/muon/muon.h"

namespace speedrun::kernels {
namespace {

// One matrix of the batch on its way through the update; m = min, n = max of (rows, cols), x is (m, n).
template <class T>
struct Work {
  const Muon<T>& args;
  const MuonMatrix<T>& matrix;
  T* x;          // (m, n)
  T* next;       // (m, n)
  T* gram;       // (m, m) A = XXᵀ
  T* cubic;      // (m, m) B = bA + cA²
  Acc<T>* sums;  // (muon_sums)
  HostExec exec;

  bool transposed() const { return muon_transposes(args.form, args.rows, args.cols); }
  int64_t m() const { return std::min(args.rows, args.cols); }
  int64_t n() const { return std::max(args.rows, args.cols); }
  // Where element (row, col) of the parameter is in x.
  int64_t place(int64_t row, int64_t col) const { return transposed() ? col * n() + row : row * n() + col; }
};

constexpr int64_t kRows = 16;        // rows of one task of the element-wise passes
constexpr double kSmallest = 1e-10;  // normuon: bound below v and N'

// M <- μM + (1−μ)G;  x = T(U)
template <class T>
void momentum(const Work<T>& w) {
  using A = Acc<T>;
  const Muon<T>& a = w.args;
  const A mu = static_cast<A>(w.matrix.step->momentum), rest = 1 - mu, scale = static_cast<A>(a.verdict->grad_scale);
  parallel_ranges(w.exec, a.rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < a.cols; ++col) {
        const int64_t i = row * a.cols + col;
        const A g = w.matrix.grad[i] * scale;
        const A updated = mu * w.matrix.momentum[i] + rest * g;
        w.matrix.momentum[i] = updated;
        w.x[w.place(row, col)] = w.exec.store(a.nesterov ? rest * g + mu * updated : updated);
      }
    }
  });
}

// x <- x / (norm_margin·‖x‖ + eps); zero stays zero even without eps.
template <class T>
void normalize(const Work<T>& w) {
  using A = Acc<T>;
  const int64_t size = w.m() * w.n(), part_size = (size + kMuonNormParts - 1) / kMuonNormParts;
  parallel(w.exec, kMuonNormParts, [&](int64_t part) {
    A sum = 0;
    for (int64_t i = part * part_size; i < std::min(size, (part + 1) * part_size); ++i) sum += w.x[i] * w.x[i];
    w.sums[part] = sum;
  });
  A squares = 0;
  for (int part = 0; part < kMuonNormParts; ++part) squares += w.sums[part];
  const A denominator = static_cast<A>(w.args.norm_margin) * std::sqrt(squares) + static_cast<A>(w.args.eps);
  const A factor = denominator > 0 ? 1 / denominator : A{0};
  parallel_ranges(w.exec, w.m(), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * w.n(); i < end * w.n(); ++i) w.x[i] = w.exec.store(w.x[i] * factor);
  });
}

// c (M, N) = alpha · a · op(b) + beta · c, square or wide, packed, stored once.
template <class T>
void product(const Work<T>& w, T* c, const T* a, const T* b, bool transpose_b, int64_t M, int64_t N, int64_t K, double alpha,
             double beta) {
  gemm_ref(GemmRef<T>{.c = c,
                      .a = a,
                      .b = b,
                      .M = M,
                      .N = N,
                      .K = K,
                      .lda = K,
                      .ldb = transpose_b ? K : N,
                      .ldc = N,
                      .transpose_b = transpose_b,
                      .alpha = static_cast<T>(alpha),
                      .beta = static_cast<T>(beta)},
           w.exec);
  parallel_ranges(w.exec, M, kRows, [&](int64_t begin, int64_t end) { round_stored(c + begin * N, (end - begin) * N, w.exec); });
}

// A = XXᵀ;  B = bA + cA²;  X <- aX + BX
template <class T>
void newton_schulz(Work<T>& w) {
  const int64_t m = w.m(), n = w.n();
  for (int i = 0; i < w.args.iterations; ++i) {
    const MuonCoefficients& k = w.args.coefficients[i];
    product(w, w.gram, w.x, w.x, true, m, m, n, 1, 0);
    std::memcpy(w.cubic, w.gram, sizeof(T) * static_cast<size_t>(m * m));
    product(w, w.cubic, w.gram, w.gram, false, m, m, m, k.c, k.b);
    std::memcpy(w.next, w.x, sizeof(T) * static_cast<size_t>(m * n));
    product(w, w.next, w.cubic, w.x, false, m, n, m, 1, k.a);
    std::swap(w.x, w.next);
  }
}

// Columns of x in tiles: v <- β2·v + (1−β2)·mean(x²); sums <- Σ x² of each tile, then Σ (x·r)² of each.
template <class T>
void statistics(const Work<T>& w) {
  using A = Acc<T>;
  const A beta2 = static_cast<A>(w.args.beta2), rest = static_cast<A>(1 - w.args.beta2);
  const int64_t tiles = muon_stat_tiles(w.args.rows, w.args.cols);
  parallel(w.exec, tiles, [&](int64_t tile) {
    const int64_t begin = tile * kMuonStatColumns, count = std::min<int64_t>(kMuonStatColumns, w.n() - begin);
    A squares[kMuonStatColumns] = {};
    for (int64_t row = 0; row < w.m(); ++row) {
      const T* x = w.x + row * w.n() + begin;
      for (int64_t j = 0; j < count; ++j) squares[j] += x[j] * x[j];
    }
    A sum = 0, scaled = 0;
    for (int64_t j = 0; j < count; ++j) {
      A& v = w.matrix.second[begin + j];
      v = beta2 * v + rest * (squares[j] / static_cast<A>(w.m()));
      sum += squares[j];
      scaled += squares[j] / std::max(v, static_cast<A>(kSmallest));
    }
    w.sums[tile] = sum;
    w.sums[tiles + tile] = scaled;
  });
}

// normuon: N / max(N', 1e-10), what r is multiplied by to keep the Frobenius norm
template <class T>
Acc<T> norm_ratio(const Work<T>& w) {
  using A = Acc<T>;
  const int64_t tiles = muon_stat_tiles(w.args.rows, w.args.cols);
  A squares = 0, scaled = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    squares += w.sums[tile];
    scaled += w.sums[tiles + tile];
  }
  return std::sqrt(squares) / std::max(std::sqrt(scaled), static_cast<A>(kSmallest));
}

// muon: W <- W − decay·W;  W <- W − lr·s·X.   normuon: V = X·scale of its column;  W <- W − [V·W >= 0]·decay·s·W − lr·s·V
template <class T>
void apply(const Work<T>& w) {
  using A = Acc<T>;
  const Muon<T>& a = w.args;
  const bool normuon = a.form == MuonForm::normuon;
  const A aspect = std::sqrt(std::max(A{1}, static_cast<A>(a.rows) / static_cast<A>(a.cols)));
  const A decay = w.matrix.decays ? static_cast<A>(w.matrix.step->decay) * (normuon ? aspect : A{1}) : A{0};
  const A step_size = static_cast<A>(w.matrix.step->lr) * aspect;
  const A ratio = normuon ? norm_ratio(w) : A{1};
  parallel_ranges(w.exec, a.rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* weight = w.matrix.weight.value + row * a.cols;
      for (int64_t col = 0; col < a.cols; ++col) {
        const T x = w.x[w.place(row, col)];
        if (!normuon) {
          weight[col] = (weight[col] - decay * weight[col]) - step_size * x;
          continue;
        }
        const A v = w.matrix.second[w.transposed() ? row : col];
        const A value = x * w.exec.store(ratio / std::sqrt(std::max(v, static_cast<A>(kSmallest))));
        const A decayed = value * weight[col] >= 0 ? weight[col] - decay * weight[col] : weight[col];
        weight[col] = decayed - step_size * value;
      }
      if (w.matrix.weight.split == MasterSplit::none) round_stored(weight, a.cols, w.exec);
    }
  });
}

template <class T>
void update(Work<T> w) {
  momentum(w);
  normalize(w);
  newton_schulz(w);
  if (w.args.form == MuonForm::normuon) statistics(w);
  apply(w);
}

}  // namespace

// Many small matrices go one to a thread, a single one is spread over the threads; the bits are the same.
template <class T>
void muon_update(const Muon<T>& a, const HostExec& exec) {
  if (a.verdict->skip != 0) return;
  const int64_t size = int64_t{a.rows} * a.cols, smaller = std::min(a.rows, a.cols);
  auto one = [&](int64_t i, const HostExec& inner) {
    update(Work<T>{.args = a,
                   .matrix = a.matrices[i],
                   .x = a.x + i * size,
                   .next = a.x + (a.batch + i) * size,
                   .gram = a.gram + i * smaller * smaller,
                   .cubic = a.gram + (a.batch + i) * smaller * smaller,
                   .sums = a.sums + i * muon_sums(a.rows, a.cols),
                   .exec = inner});
  };
  if (a.batch == 1) {
    one(0, exec);
  } else {
    parallel(exec, a.batch, [&](int64_t i) { one(i, serial(exec)); });
  }
}

template void muon_update(const Muon<float>&, const HostExec&);
template void muon_update(const Muon<double>&, const HostExec&);

}  // namespace speedrun::kernels
