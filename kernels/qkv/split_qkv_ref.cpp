#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/projection_fp8_ref.h"
#include "kernels/qkv/head_norm_ref.h"
#include "kernels/qkv/split_qkv.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 32;  // tokens of one task

// cos and sin of a token's D/4 angles: for all heads, or for even and for odd heads.
template <class T>
class Rotary {
 public:
  Rotary(const Acc<T>* frequencies, bool paired, int D)
      : frequencies_(frequencies), paired_(paired), angles_(D / 4), cos_(2 * angles_), sin_(2 * angles_) {}

  void move_to(int64_t position) {
    for (int parity = 0; parity < (paired_ ? 2 : 1); ++parity) {
      const Acc<T> head_position = static_cast<Acc<T>>(paired_ ? 2 * position + parity : position);
      for (int i = 0; i < angles_; ++i) {
        cos_[parity * angles_ + i] = std::cos(head_position * frequencies_[i]);
        sin_[parity * angles_ + i] = std::sin(head_position * frequencies_[i]);
      }
    }
  }

  // Turns the lower half of x (D) by −θ, the header's convention; with sign −1 back, which is also the transpose.
  void rotate(T* x, int head, Acc<T> sign) const {
    const int first = paired_ ? head % 2 * angles_ : 0;
    for (int i = 0; i < angles_; ++i) {
      const T even = x[2 * i], odd = x[2 * i + 1], c = cos_[first + i], s = sign * sin_[first + i];
      x[2 * i] = c * even + s * odd;
      x[2 * i + 1] = c * odd - s * even;
    }
  }

 private:
  const Acc<T>* frequencies_;
  bool paired_;
  int angles_;
  std::vector<Acc<T>> cos_, sin_;
};

template <class T>
void normalize_and_rotate(const SplitQkvForward<T>& a, int64_t t, const Rotary<T>& rotary, const HostExec& exec) {
  const int D = a.C / a.H;
  for (int head = 0; head < 2 * a.H; ++head) {  // q heads, then k heads
    T* x = head < a.H ? a.q + t * a.C + int64_t{head} * D : a.k + t * a.C + int64_t{head - a.H} * D;
    std::copy_n(a.raw + t * 3 * a.C + int64_t{head} * D, D, x);
    a.qk_rstd[t * 2 * a.H + head] = normalize_head(x, D, a.eps);
    rotary.rotate(x, head % a.H, Acc<T>{1});
    round_stored(x, D, exec);
  }
}

template <class T>
void mix_values(const SplitQkvForward<T>& a, int64_t t, const HostExec& exec) {
  const int D = a.C / a.H;
  for (int c = 0; c < a.C; ++c) {
    Acc<T> value = a.raw[t * 3 * a.C + 2 * a.C + c];
    if (a.value_embed != nullptr)
      value += a.value_gate[t * a.value_gate_stride + c / D / a.gate_heads] * a.value_embed[t * a.C + c];
    if (a.value_add != nullptr) value += a.value_add[t * a.C + c];
    a.v[t * a.C + c] = exec.store(value);
  }
}

// Hands the upper halves of a row's keys, from its first token at `begin`, on to the next token.
template <class T>
void shift_keys(const SplitQkvForward<T>& a, int64_t begin) {
  const int D = a.C / a.H, half = D / 2;
  const int64_t last = begin + a.row_tokens - 1;
  for (int head = 0; head < a.H; ++head) {
    T* upper = a.k + int64_t{head} * D + half;
    std::copy_n(upper + last * a.C, half, a.key_tail + (begin / a.row_tokens * a.H + head) * half);
    for (int64_t t = last; t > begin; --t) std::copy_n(upper + (t - 1) * a.C, half, upper + t * a.C);
  }
}

// Key and gradient of head `head` of token t as they were before the shift.
template <class T>
void unshift_key(T* key, T* dkey, const SplitQkvBackward<T>& a, int64_t t, int head) {
  const int D = a.C / a.H, half = D / 2;
  const int64_t position = t % a.row_tokens, at = t * a.C + int64_t{head} * D;
  std::copy_n(a.k + at, D, key);
  std::copy_n(a.dk + at, D, dkey);
  if (!a.key_shift) return;
  if (position > 0) std::fill_n(dkey + half, half, T{0});  // only a row's first token kept its own upper half
  if (position + 1 < a.row_tokens) {
    std::copy_n(a.k + at + a.C + half, half, key + half);
    for (int d = half; d < D; ++d) dkey[d] += a.dk[at + a.C + d];
  } else {
    std::copy_n(a.key_tail + (t / a.row_tokens * a.H + head) * half, half, key + half);
  }
}

template <class T>
void value_gradients(const SplitQkvBackward<T>& a, int64_t t, const HostExec& exec) {
  const int D = a.C / a.H;
  const T* dv = a.dv + t * a.C;
  for (int c = 0; c < a.C; ++c) a.raw[t * 3 * a.C + 2 * a.C + c] = exec.store(dv[c]);
  if (a.value_embed == nullptr) return;
  const T* embed = a.value_embed + t * a.C;
  T* dembed = a.dvalue_embed + t * a.C;
  for (int first = 0; first < a.H; first += a.gate_heads) {  // of those that share a gate
    const int64_t gate_at = t * a.value_gate_stride + first / a.gate_heads;
    const T gate = a.value_gate[gate_at];
    Acc<T> dgate = 0;
    for (int c = first * D; c < std::min(first + a.gate_heads, a.H) * D; ++c) {
      dgate += dv[c] * embed[c];
      dembed[c] = exec.store((a.accumulate_dvalue_embed ? dembed[c] : T{0}) + gate * dv[c]);
    }
    a.dvalue_gate[gate_at] = exec.store(dgate);
  }
}

}  // namespace

template <class T>
void split_qkv_forward(const SplitQkvForward<T>& a, const HostExec& exec) {
  projection_ref(a.raw, a.inp, a.weight, a.fp8, a.N, a.C, 3 * a.C, exec);
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    Rotary<T> rotary(a.frequencies, a.paired, a.C / a.H);
    for (int64_t t = begin; t < end; ++t) {
      rotary.move_to(t % a.row_tokens);
      normalize_and_rotate(a, t, rotary, exec);
      mix_values(a, t, exec);
    }
  });
  if (a.key_shift) parallel(exec, a.N / a.row_tokens, [&](int64_t row) { shift_keys(a, row * a.row_tokens); });
}

template <class T>
void split_qkv_backward(const SplitQkvBackward<T>& a, const HostExec& exec) {
  const int D = a.C / a.H;
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    Rotary<T> rotary(a.frequencies, a.paired, D);
    std::vector<T> normed(static_cast<size_t>(D));
    for (int64_t t = begin; t < end; ++t) {
      rotary.move_to(t % a.row_tokens);
      for (int head = 0; head < 2 * a.H; ++head) {  // q heads, then k heads
        T* dx = a.raw + t * 3 * a.C + int64_t{head} * D;
        if (head < a.H) {
          const int64_t at = t * a.C + int64_t{head} * D;
          std::copy_n(a.q + at, D, normed.data());
          std::copy_n(a.dq + at, D, dx);
        } else {
          unshift_key(normed.data(), dx, a, t, head - a.H);
        }
        rotary.rotate(dx, head % a.H, Acc<T>{-1});
        rotary.rotate(normed.data(), head % a.H, Acc<T>{-1});
        normalize_head_backward(dx, normed.data(), a.qk_rstd[t * 2 * a.H + head], D);
        round_stored(dx, D, exec);
      }
      value_gradients(a, t, exec);
    }
  });
  const T* draw = a.raw;
  projection_grad_ref(a.dinp, a.dweight, draw, a.inp, a.weight, a.fp8, a.N, a.C, 3 * a.C, exec);
}

template void split_qkv_forward(const SplitQkvForward<float>&, const HostExec&);
template void split_qkv_forward(const SplitQkvForward<double>&, const HostExec&);
template void split_qkv_backward(const SplitQkvBackward<float>&, const HostExec&);
template void split_qkv_backward(const SplitQkvBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels
