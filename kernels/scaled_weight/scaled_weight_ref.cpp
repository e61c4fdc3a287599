#include "kernels/base/host_parallel.h"
#include "kernels/scaled_weight/scaled_weight.h"
#include "kernels/scaled_weight/scaled_weight_parts.h"

namespace speedrun::kernels {
namespace {

// body(task, item, begin, end) for every part of every tensor; tasks count through the parts of the first, the second, …
template <class T, class Body>
void for_each_part(const ScaledWeights<T>& args, const HostExec& exec, const Body& body) {
  parallel(exec, int64_t{args.num_items} * kScaledWeightParts, [&](int64_t task) {
    const int64_t item = task / kScaledWeightParts, part = task % kScaledWeightParts, n = args.items[item].n;
    body(task, args.items[item], scaled_weight_begin(part, n), scaled_weight_begin(part + 1, n));
  });
}

}  // namespace

int64_t scaled_weights_scratch(int num_items) { return int64_t{num_items} * kScaledWeightParts; }

template <class T>
void scaled_weights_forward(const ScaledWeights<T>& a, const HostExec& exec) {
  for_each_part(a, exec, [&](int64_t, const ScaledWeightItem<T>& item, int64_t begin, int64_t end) {
    const T scalar = *item.scalar;
    for (int64_t i = begin; i < end; ++i) item.out[i] = exec.store(scalar * item.weight[i]);
  });
}

template <class T>
void scaled_weights_backward(const ScaledWeights<T>& a, const HostExec& exec) {
  for_each_part(a, exec, [&](int64_t task, const ScaledWeightItem<T>& item, int64_t begin, int64_t end) {
    if (item.grad == nullptr) return;
    const Acc<T> scalar = *item.scalar;
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      sum += static_cast<double>(item.grad[i]) * static_cast<double>(item.weight[i]);
      item.grad[i] *= scalar;
    }
    a.scratch[task] = sum;
  });
  for (int64_t i = 0; i < a.num_items; ++i) {
    const ScaledWeightItem<T>& item = a.items[i];
    if (item.grad == nullptr) continue;
    double sum = 0;
    for (int part = 0; part < kScaledWeightParts; ++part) sum += a.scratch[i * kScaledWeightParts + part];
    *item.dscalar = static_cast<Acc<T>>(static_cast<double>(*item.dscalar) + sum);
  }
}

template void scaled_weights_forward(const ScaledWeights<float>&, const HostExec&);
template void scaled_weights_forward(const ScaledWeights<double>&, const HostExec&);
template void scaled_weights_backward(const ScaledWeights<float>&, const HostExec&);
template void scaled_weights_backward(const ScaledWeights<double>&, const HostExec&);

}  // namespace speedrun::kernels
