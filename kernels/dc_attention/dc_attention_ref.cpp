// Dynamically composable attention by blocks of queries. A block makes A, dA and the score gradients of its queries and all that is
// summed over keys (out, dq, dw1, dw2); backward keeps A and the score gradients of every block, and a second pass over blocks of
// keys sums dk and dv from them: every sum has one owner and a fixed order. A and the score gradients are rounded under round_bf16:
// they are operands of tensor-core products on CUDA.
#include <cmath>
#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/dc_attention/dc_attention.h"
#include "kernels/dc_attention/dc_attention_band.h"
#include "kernels/gemm/attention_scores_ref.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kBlock = 64;  // queries or keys of one task
constexpr double kEps = 1e-6;   // of the normalisation of w1

template <class T>
using Matrix = std::vector<T>;  // (queries, keys) of a block

template <class Args>
int64_t first_key(const Args& a, int64_t t) {
  return std::max<int64_t>(a.doc_start[t], t - a.window);
}

// 1 / √(mean_h w1_h² + eps)
template <class T>
T inverse_rms(const T* w1, int H) {
  T squares = 0;
  for (int h = 0; h < H; ++h) squares += w1[h] * w1[h];
  return 1 / std::sqrt(squares / static_cast<T>(H) + static_cast<T>(kEps));
}

// The keys that a block of queries meets.
template <class Args>
Span keys_of(const Args& a, Span queries) {
  return {first_key(a, queries.begin), queries.end};
}

// p (queries, keys) of one head from its scores. lse_of(row, first, count): a row's lse; the row's visible scores begin at first.
template <class T, class Args, class LseOf>
Matrix<T> make_probabilities(const Args& a, int head, Span queries, Span keys, const LseOf& lse_of, const HostExec& exec) {
  const int64_t column = int64_t{head} * a.D, C = int64_t{a.H} * a.D;
  Matrix<T> p(static_cast<size_t>(queries.size() * keys.size()));
  make_scores(p.data(), a.q + column, C, queries, a.k + column, C, keys, a.D, a.scale, exec);
  for (int64_t t = queries.begin; t < queries.end; ++t) {
    T* row = p.data() + (t - queries.begin) * keys.size();
    const int64_t first = first_key(a, t) - keys.begin, last = t + 1 - keys.begin;
    const T lse = lse_of(t, row + first, last - first);
    simd_dispatch<Exponentiate<T>>(row, first, last, keys.size(), lse);
  }
  return p;
}

// mixed (queries, keys) += u_h · p of one head
template <class T, class Args>
void mix(Matrix<T>& mixed, const Matrix<T>& p, const Args& a, int head, Span queries, Span keys) {
  for (int64_t t = queries.begin; t < queries.end; ++t) {
    const T* w1 = a.w1 + t * a.stride;
    const T u = w1[head] * inverse_rms(w1, a.H);
    const int64_t row = (t - queries.begin) * keys.size();
    for (int64_t j = row; j < row + keys.size(); ++j) mixed[j] += u * p[j];
  }
}

template <class T>
void forward_block(const DcAttentionForward<T>& a, Span queries, const HostExec& exec) {
  const Span keys = keys_of(a, queries);
  const int64_t C = int64_t{a.H} * a.D;
  Matrix<T> mixed(static_cast<size_t>(queries.size() * keys.size()));
  for (int head = 0; head < a.H; ++head) {
    auto make_lse = [&](int64_t t, const T* visible, int64_t count) {
      T* lse = a.lse + head * a.N + t;
      simd_dispatch<LogSumExp<T>>(lse, visible, count);
      return *lse;
    };
    mix(mixed, make_probabilities<T>(a, head, queries, keys, make_lse, exec), a, head, queries, keys);
  }
  round_stored(mixed.data(), static_cast<int64_t>(mixed.size()), exec);
  std::vector<T> values(static_cast<size_t>(queries.size() * a.D));
  for (int head = 0; head < a.H; ++head) {
    gemm_ref(GemmRef<T>{.c = values.data(),
                        .a = mixed.data(),
                        .b = a.v + keys.begin * C + head * a.D,
                        .M = queries.size(),
                        .N = a.D,
                        .K = keys.size(),
                        .lda = keys.size(),
                        .ldb = C,
                        .ldc = a.D},
             exec);
    for (int64_t t = queries.begin; t < queries.end; ++t) {
      const T w2 = a.w2[t * a.stride + head];
      const int64_t row = t * C + head * a.D;
      for (int d = 0; d < a.D; ++d) a.out[row + d] = exec.store(a.y[row + d] + w2 * values[(t - queries.begin) * a.D + d]);
    }
  }
}

// to (rows, D) with row stride C += from (rows, D), rounded once.
template <class T>
void add_rows(T* to, const std::vector<T>& from, Span rows, int64_t C, int D, const HostExec& exec) {
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    for (int d = 0; d < D; ++d) to[t * C + d] = exec.store(to[t * C + d] + from[(t - rows.begin) * D + d]);
  }
}

// What the gradients of keys and values need of a block of queries.
template <class T>
struct QueryBlock {
  Span queries{0, 0}, keys{0, 0};
  Matrix<T> mixed;                 // A
  std::vector<Matrix<T>> dscores;  // per head, scale · ∂loss/∂score
};

template <class T>
QueryBlock<T> query_gradient(const DcAttentionBackward<T>& a, Span queries, const HostExec& exec) {
  const Span keys = keys_of(a, queries);
  const int64_t C = int64_t{a.H} * a.D, size = queries.size() * keys.size(), width = keys.size();
  QueryBlock<T> block{queries, keys, Matrix<T>(static_cast<size_t>(size)), {}};
  for (int head = 0; head < a.H; ++head) {
    auto saved_lse = [&](int64_t t, const T*, int64_t) { return a.lse[head * a.N + t]; };
    block.dscores.push_back(make_probabilities<T>(a, head, queries, keys, saved_lse, exec));
    mix(block.mixed, block.dscores.back(), a, head, queries, keys);
  }
  round_stored(block.mixed.data(), size, exec);

  // dA = Σ_h w2_h · dout_h·v_h, and dw2_h = Σ_s A · dout_h·v_h
  Matrix<T> dmixed(static_cast<size_t>(size)), products(static_cast<size_t>(size));
  for (int head = 0; head < a.H; ++head) {
    const int64_t column = int64_t{head} * a.D;
    make_scores(products.data(), a.dout + column, C, queries, a.v + column, C, keys, a.D, 1, exec);
    for (int64_t t = queries.begin; t < queries.end; ++t) {
      const T w2 = a.w2[t * a.stride + head];
      T dw2 = 0;
      for (int64_t j = (t - queries.begin) * width; j < (t - queries.begin + 1) * width; ++j) {
        dw2 += block.mixed[j] * products[j];
        dmixed[j] += w2 * products[j];
      }
      a.dw2[t * a.stride + head] = exec.store(dw2);
    }
  }

  // du_h = Σ_s dA · p_h; the score gradients p_h · u_h · (dA − du_h); w1 through its normalisation.
  for (int64_t t = queries.begin; t < queries.end; ++t) {
    const T* w1 = a.w1 + t * a.stride;
    const T inverse = inverse_rms(w1, a.H), scale = static_cast<T>(a.scale);
    const int64_t begin = (t - queries.begin) * width, end = begin + width;
    std::vector<T> du(static_cast<size_t>(a.H));
    T projection = 0;  // mean_h u_h · du_h
    for (int head = 0; head < a.H; ++head) {
      Matrix<T>& p = block.dscores[static_cast<size_t>(head)];
      T sum = 0;
      for (int64_t j = begin; j < end; ++j) sum += dmixed[j] * p[j];
      const T u = w1[head] * inverse;
      for (int64_t j = begin; j < end; ++j) p[j] = scale * p[j] * u * (dmixed[j] - sum);
      du[static_cast<size_t>(head)] = sum;
      projection += u * sum / static_cast<T>(a.H);
    }
    for (int head = 0; head < a.H; ++head) {
      a.dw1[t * a.stride + head] = exec.store(inverse * (du[static_cast<size_t>(head)] - w1[head] * inverse * projection));
    }
  }

  std::vector<T> dq(static_cast<size_t>(queries.size() * a.D));
  for (int head = 0; head < a.H; ++head) {
    Matrix<T>& dscores = block.dscores[static_cast<size_t>(head)];
    round_stored(dscores.data(), size, exec);
    gemm_ref(GemmRef<T>{.c = dq.data(),
                        .a = dscores.data(),
                        .b = a.k + keys.begin * C + head * a.D,
                        .M = queries.size(),
                        .N = a.D,
                        .K = width,
                        .lda = width,
                        .ldb = C,
                        .ldc = a.D},
             exec);
    add_rows(a.dq + head * a.D, dq, queries, C, a.D, exec);
  }
  return block;
}

// dk and dv of one head for a block of keys, from the blocks of queries that see them.
template <class T>
void key_gradient(const DcAttentionBackward<T>& a, const std::vector<QueryBlock<T>>& blocks, int head, Span keys,
                  const HostExec& exec) {
  const int64_t C = int64_t{a.H} * a.D, column = int64_t{head} * a.D;
  std::vector<T> dk(static_cast<size_t>(keys.size() * a.D)), dv(dk.size());
  for (size_t i = static_cast<size_t>(keys.begin / kBlock); i < blocks.size() && blocks[i].keys.begin < keys.end; ++i) {
    const QueryBlock<T>& block = blocks[i];
    const Span seen{std::max(keys.begin, block.keys.begin), std::min(keys.end, block.keys.end)};
    const int64_t width = block.keys.size();
    // out (seen, D) += tileᵀ · x
    auto add_product = [&](std::vector<T>& out, const Matrix<T>& tile, const T* x) {
      gemm_ref(GemmRef<T>{.c = out.data() + (seen.begin - keys.begin) * a.D,
                          .a = tile.data() + (seen.begin - block.keys.begin),
                          .b = x + block.queries.begin * C + column,
                          .M = seen.size(),
                          .N = a.D,
                          .K = block.queries.size(),
                          .lda = width,
                          .ldb = C,
                          .ldc = a.D,
                          .transpose_a = true,
                          .beta = 1},
               exec);
    };
    Matrix<T> weights = block.mixed;
    for (int64_t t = 0; t < block.queries.size(); ++t) {
      const T w2 = a.w2[(block.queries.begin + t) * a.stride + head];
      for (int64_t j = t * width; j < (t + 1) * width; ++j) weights[j] = exec.store(weights[j] * w2);
    }
    add_product(dv, weights, a.dout);
    add_product(dk, block.dscores[static_cast<size_t>(head)], a.q);
  }
  add_rows(a.dv + column, dv, keys, C, a.D, exec);
  add_rows(a.dk + column, dk, keys, C, a.D, exec);
}

int64_t num_blocks(int64_t N) { return (N + kBlock - 1) / kBlock; }

Span block_span(int64_t index, int64_t N) { return {index * kBlock, std::min(N, (index + 1) * kBlock)}; }

}  // namespace

template <class T>
void dc_attention_forward(const DcAttentionForward<T>& a, const HostExec& exec) {
  parallel(exec, num_blocks(a.N), [&](int64_t i) { forward_block(a, block_span(i, a.N), serial(exec)); });
}

template <class T>
void dc_attention_backward(const DcAttentionBackward<T>& a, const HostExec& exec) {
  std::vector<QueryBlock<T>> blocks(static_cast<size_t>(num_blocks(a.N)));
  parallel(exec, num_blocks(a.N),
           [&](int64_t i) { blocks[static_cast<size_t>(i)] = query_gradient(a, block_span(i, a.N), serial(exec)); });
  parallel(exec, num_blocks(a.N) * a.H,
           [&](int64_t i) { key_gradient(a, blocks, static_cast<int>(i % a.H), block_span(i / a.H, a.N), serial(exec)); });
}

// A in BF16 and dA in FP32 over the band of keys, u and du in FP32.
size_t dc_attention_scratch(int64_t N, int H, int64_t window) {
  const int64_t band = int64_t{dc_chunks(window)} * kDcChunk;
  return static_cast<size_t>(N * band) * (sizeof(bf16) + sizeof(float)) + static_cast<size_t>(N * H) * 2 * sizeof(float);
}

template void dc_attention_forward(const DcAttentionForward<float>&, const HostExec&);
template void dc_attention_forward(const DcAttentionForward<double>&, const HostExec&);
template void dc_attention_backward(const DcAttentionBackward<float>&, const HostExec&);
template void dc_attention_backward(const DcAttentionBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels
