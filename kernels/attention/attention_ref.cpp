// Attention by tiles of (queries × keys) scores, each made with matrix products. A task owns a block of queries (forward, dq) or of
// keys (dk, dv) of one head and all the keys or queries that meet it, so every sum has one owner and a fixed order; the price is
// that backward makes the scores twice. Probabilities and score gradients are rounded under round_bf16: they are operands of
// tensor-core products on CUDA.
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/base/host_parallel.h"
#include "kernels/gemm/attention_scores_ref.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kBlock = 64;  // queries or keys of one task

// First key that token t sees; never falls as t grows, because doc_start and t − window do not.
int64_t first_key(const int32_t* doc_start, int64_t window, int64_t t) {
  return window > 0 ? std::max<int64_t>(doc_start[t], t - window) : doc_start[t];
}

// First query after `key` that does not see it.
int64_t queries_end(const int32_t* doc_start, int64_t window, int64_t key, int64_t N) {
  int64_t sees = key, end = N;
  while (end - sees > 1) {
    const int64_t middle = sees + (end - sees) / 2;
    (first_key(doc_start, window, middle) <= key ? sees : end) = middle;
  }
  return end;
}

template <class T>
void forward_block(const AttentionForward<T>& a, int head, Span queries, const HostExec& exec) {
  const Span keys{first_key(a.doc_start, a.window, queries.begin), queries.end};
  const int64_t column = int64_t{head} * a.D, C = int64_t{a.H} * a.D;
  std::vector<T> scores(static_cast<size_t>(queries.size() * keys.size()));
  make_scores(scores.data(), a.q + column, a.stride, queries, a.k + column, a.stride, keys, a.D, a.scale, exec);
  for (int64_t t = queries.begin; t < queries.end; ++t) {
    T* row = scores.data() + (t - queries.begin) * keys.size();
    const int64_t first = first_key(a.doc_start, a.window, t) - keys.begin, last = t + 1 - keys.begin;
    T* lse = a.lse + head * a.N + t;
    simd_dispatch<LogSumExp<T>>(lse, static_cast<const T*>(row + first), last - first);
    simd_dispatch<Exponentiate<T>>(row, first, last, keys.size(), *lse);
    round_stored(row, keys.size(), exec);
  }
  T* out = a.out + queries.begin * C + column;
  gemm_ref(GemmRef<T>{.c = out,
                      .a = scores.data(),
                      .b = a.v + keys.begin * a.stride + column,
                      .M = queries.size(),
                      .N = a.D,
                      .K = keys.size(),
                      .lda = keys.size(),
                      .ldb = a.stride,
                      .ldc = C},
           exec);
  for (int64_t t = 0; t < queries.size(); ++t) round_stored(out + t * C, a.D, exec);
}

// One head's probabilities P and score gradients scale·P·(dP − delta), dP = dout·vᵀ, for a tile of queries × keys; 0 where masked.
template <class T>
struct GradientTile {
  Span queries, keys;
  std::vector<T> probabilities, dscores;  // (queries, keys)

  GradientTile(const AttentionBackward<T>& a, int head, Span the_queries, Span the_keys, const HostExec& exec)
      : queries(the_queries),
        keys(the_keys),
        probabilities(static_cast<size_t>(queries.size() * keys.size())),
        dscores(probabilities.size()) {
    const int64_t column = int64_t{head} * a.D, C = int64_t{a.H} * a.D, width = keys.size();
    make_scores(probabilities.data(), a.q + column, a.stride, queries, a.k + column, a.stride, keys, a.D, a.scale, exec);
    make_scores(dscores.data(), a.dout + column, C, queries, a.v + column, a.stride, keys, a.D, 1, exec);
    for (int64_t t = queries.begin; t < queries.end; ++t) {
      T* p = probabilities.data() + (t - queries.begin) * width;
      T* ds = dscores.data() + (t - queries.begin) * width;
      const int64_t first = std::clamp<int64_t>(first_key(a.doc_start, a.window, t) - keys.begin, 0, width);
      const int64_t last = std::clamp<int64_t>(t + 1 - keys.begin, first, width);
      simd_dispatch<Exponentiate<T>>(p, first, last, width, a.lse[head * a.N + t]);
      const T delta = a.delta[head * a.N + t], scale = static_cast<T>(a.scale);
      for (int64_t j = 0; j < width; ++j) ds[j] = scale * p[j] * (ds[j] - delta);
      round_stored(p, width, exec);
      round_stored(ds, width, exec);
    }
  }
};

// delta (H, N) = Σ_d dout · out
template <class T>
void make_delta(const AttentionBackward<T>& a, const HostExec& exec) {
  parallel_ranges(exec, a.N, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t head = 0; head < a.H; ++head) {
        Acc<T> sum = 0;
        for (int64_t i = (t * a.H + head) * a.D; i < (t * a.H + head + 1) * a.D; ++i) sum += a.dout[i] * a.out[i];
        a.delta[head * a.N + t] = sum;
      }
    }
  });
}

// out (rows of the block, D) with the stride of q, k, v = op(tile) · x, stored once.
template <class T>
void tile_product(T* out, const std::vector<T>& tile, bool transpose, const T* x, int64_t stride_x, Span rows, Span inner,
                  int64_t tile_width, const AttentionBackward<T>& a, const HostExec& exec) {
  gemm_ref(GemmRef<T>{.c = out + rows.begin * a.stride,
                      .a = tile.data(),
                      .b = x + inner.begin * stride_x,
                      .M = rows.size(),
                      .N = a.D,
                      .K = inner.size(),
                      .lda = tile_width,
                      .ldb = stride_x,
                      .ldc = a.stride,
                      .transpose_a = transpose},
           exec);
  for (int64_t t = rows.begin; t < rows.end; ++t) round_stored(out + t * a.stride, a.D, exec);
}

template <class T>
void query_gradient(const AttentionBackward<T>& a, int head, Span queries, const HostExec& exec) {
  const int64_t column = int64_t{head} * a.D;
  const Span keys{first_key(a.doc_start, a.window, queries.begin), queries.end};
  const GradientTile<T> tile(a, head, queries, keys, exec);
  tile_product(a.dq + column, tile.dscores, false, a.k + column, a.stride, queries, keys, keys.size(), a, exec);
}

template <class T>
void key_gradient(const AttentionBackward<T>& a, int head, Span keys, const HostExec& exec) {
  const int64_t column = int64_t{head} * a.D;
  const Span queries{keys.begin, queries_end(a.doc_start, a.window, keys.end - 1, a.N)};
  const GradientTile<T> tile(a, head, queries, keys, exec);
  tile_product(a.dv + column, tile.probabilities, true, a.dout + column, int64_t{a.H} * a.D, keys, queries, keys.size(), a, exec);
  tile_product(a.dk + column, tile.dscores, true, a.q + column, a.stride, keys, queries, keys.size(), a, exec);
}

// body(head, block of tokens) for every head and block.
template <class Body>
void for_blocks(int64_t N, int H, const HostExec& exec, const Body& body) {
  const int64_t blocks = (N + kBlock - 1) / kBlock;
  parallel(exec, blocks * H, [&](int64_t index) {
    const int64_t begin = index / H * kBlock;
    body(static_cast<int>(index % H), Span{begin, std::min(N, begin + kBlock)});
  });
}

}  // namespace

template <class T>
void attention_forward(const AttentionForward<T>& a, const HostExec& exec) {
  for_blocks(a.N, a.H, exec, [&](int head, Span queries) { forward_block(a, head, queries, serial(exec)); });
}

template <class T>
void attention_backward(const AttentionBackward<T>& a, const HostExec& exec) {
  make_delta(a, exec);
  for_blocks(a.N, a.H, exec, [&](int head, Span block) {
    query_gradient(a, head, block, serial(exec));
    key_gradient(a, head, block, serial(exec));
  });
}

template void attention_forward(const AttentionForward<float>&, const HostExec&);
template void attention_forward(const AttentionForward<double>&, const HostExec&);
template void attention_backward(const AttentionBackward<float>&, const HostExec&);
template void attention_backward(const AttentionBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels
