#include <algorithm>
#include <vector>

#include "kernels/base/column_sum.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/qkv/head_norm_ref.h"
#include "kernels/qkv/qkv.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 32;  // tokens of one task

// Turns the pairs (i, i + D/2) by −θ_i, the header's convention; with sign −1 turns them back, which is also the transpose of the
// rotation.
template <class T>
void rotate(T* x, const Acc<T>* cosine, const Acc<T>* sine, Acc<T> sign, int D) {
  for (int i = 0; i < D / 2; ++i) {
    const T low = x[i], high = x[i + D / 2], s = sign * sine[i];
    x[i] = low * cosine[i] + high * s;
    x[i + D / 2] = -low * s + high * cosine[i];
  }
}

}  // namespace

template <class T>
void qkv_forward(const QkvForward<T>& a, const HostExec& exec) {
  const int D = a.C / a.H;
  affine_ref(a.qkv, a.inp, a.weight, a.bias, static_cast<const T*>(nullptr), a.N, a.C, 3 * int64_t{a.C}, exec);
  if (a.qk_rstd == nullptr && a.rotary_cos == nullptr) return;
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t angles = t % a.row_tokens * (D / 2);
      for (int head = 0; head < 2 * a.H; ++head) {  // q heads, then k heads
        T* x = a.qkv + t * 3 * a.C + int64_t{head} * D;
        if (a.qk_rstd != nullptr) a.qk_rstd[t * 2 * a.H + head] = normalize_head(x, D, a.eps);
        if (a.rotary_cos != nullptr) rotate(x, a.rotary_cos + angles, a.rotary_sin + angles, Acc<T>{1}, D);
        round_stored(x, D, exec);
      }
    }
  });
}

template <class T>
void qkv_backward(const QkvBackward<T>& a, const HostExec& exec) {
  const int D = a.C / a.H;
  if (a.qk_rstd != nullptr || a.rotary_cos != nullptr) {
    parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
      std::vector<T> normed(static_cast<size_t>(D));
      for (int64_t t = begin; t < end; ++t) {
        const int64_t angles = t % a.row_tokens * (D / 2);
        for (int head = 0; head < 2 * a.H; ++head) {
          const int64_t offset = t * 3 * a.C + int64_t{head} * D;
          T* dx = a.dqkv + offset;
          std::copy_n(a.qkv + offset, D, normed.data());
          if (a.rotary_cos != nullptr) {
            rotate(dx, a.rotary_cos + angles, a.rotary_sin + angles, Acc<T>{-1}, D);
            rotate(normed.data(), a.rotary_cos + angles, a.rotary_sin + angles, Acc<T>{-1}, D);
          }
          if (a.qk_rstd != nullptr) normalize_head_backward(dx, normed.data(), a.qk_rstd[t * 2 * a.H + head], D);
          round_stored(dx, D, exec);
        }
      }
    });
  }
  if (a.dbias != nullptr) column_sum(a.dbias, a.dqkv, a.scratch, a.N, 3 * int64_t{a.C}, exec);
  affine_weight_grad_ref(a.dweight, a.dqkv, a.inp, a.N, a.C, 3 * int64_t{a.C}, exec);
  affine_input_grad_ref(a.dinp, a.dqkv, a.weight, a.N, a.C, 3 * int64_t{a.C}, exec);
}

template void qkv_forward(const QkvForward<float>&, const HostExec&);
template void qkv_forward(const QkvForward<double>&, const HostExec&);
template void qkv_backward(const QkvBackward<float>&, const HostExec&);
template void qkv_backward(const QkvBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels
