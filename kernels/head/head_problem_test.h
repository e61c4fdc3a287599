#pragma once
// A head with random inputs for the tests of the CPU reference, and the formulas of its caps.
#include <cmath>
#include <optional>
#include <vector>

#include "kernels/head/head_loss.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/gradient_check.h"

namespace speedrun::testing {

using namespace speedrun::kernels;

inline constexpr Softcap kSoftcaps[] = {Softcap::none, Softcap::rational, Softcap::sigmoid};

template <class T>
struct HeadProblem {
  int64_t N, chunk;
  int C, V;
  Softcap softcap;
  double softcap_value = 3;
  bool with_bias;
  std::optional<LossWeights<T>> loss_weights;
  int loss_terms = 1;
  std::vector<int32_t> prefix;
  int64_t row_tokens = 0;
  std::vector<int32_t> targets;
  std::vector<T> inp, weight, bias, grad_scale{static_cast<T>(0.7)};
  std::vector<T> loss, dinp, dweight, dbias, logits, scratch;

  HeadProblem(int64_t tokens, int64_t tokens_at_once, int channels, int vocabulary, Softcap cap, bool bias_on, Random& random)
      : N(tokens),
        chunk(tokens_at_once),
        C(channels),
        V(vocabulary),
        softcap(cap),
        with_bias(bias_on),
        targets(random.index_vector(N, V)),
        inp(random.normal_vector<T>(N * C)),
        weight(random.normal_vector<T>(int64_t{V} * C)),
        bias(random.normal_vector<T>(V)),
        loss(poisoned<T>(N)),
        dinp(poisoned<T>(N * C)),
        dweight(random.normal_vector<T>(int64_t{V} * C)),
        dbias(random.normal_vector<T>(V)),
        logits(poisoned<T>(chunk * V)),
        scratch(poisoned<T>(bias_grad_scratch(chunk, V))) {}

  void run(const HostExec& exec, bool gradients, const HeadFp8& fp8 = {}) {
    head_loss(HeadLoss<T>{.loss = loss.data(),
                          .dinp = gradients ? dinp.data() : nullptr,
                          .dweight = gradients ? dweight.data() : nullptr,
                          .dbias = gradients && with_bias ? dbias.data() : nullptr,
                          .inp = inp.data(),
                          .weight = weight.data(),
                          .bias = with_bias ? bias.data() : nullptr,
                          .targets = targets.data(),
                          .loss_weights = loss_weights ? &*loss_weights : nullptr,
                          .loss_terms = loss_terms,
                          .prefix = prefix.empty() ? nullptr : prefix.data(),
                          .row_tokens = row_tokens,
                          .grad_scale = grad_scale.data(),
                          .logits = logits.data(),
                          .scratch = scratch.data(),
                          .N = N,
                          .chunk = chunk,
                          .C = C,
                          .V = V,
                          .softcap = softcap,
                          .softcap_value = softcap_value,
                          .fp8 = fp8},
              exec);
  }
  std::vector<T> capped_logits(const HostExec& exec) {
    std::vector<T> capped = poisoned<T>(N * V);
    head_logits(HeadLogits<T>{.logits = capped.data(),
                              .inp = inp.data(),
                              .weight = weight.data(),
                              .bias = with_bias ? bias.data() : nullptr,
                              .N = N,
                              .C = C,
                              .V = V,
                              .softcap = softcap,
                              .softcap_value = softcap_value},
                exec);
    return capped;
  }
};

inline double cap(double x, Softcap kind, double c) {
  if (kind == Softcap::rational) return c * x / std::sqrt(x * x + c * c);
  if (kind == Softcap::sigmoid) return 23 / (1 + std::exp(-(x + 5) / 7.5));
  return x;
}

inline double cap_derivative(double x, Softcap kind, double c) {
  if (kind == Softcap::rational) return std::pow(c / std::sqrt(x * x + c * c), 3);
  const double sigma = 1 / (1 + std::exp(-(x + 5) / 7.5));
  return kind == Softcap::sigmoid ? 23 / 7.5 * sigma * (1 - sigma) : 1;
}

}  // namespace speedrun::testing
