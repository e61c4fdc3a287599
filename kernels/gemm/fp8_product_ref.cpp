#include "kernels/gemm/fp8_product_ref.h"

#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/gemm_ref.h"

namespace speedrun::kernels {
namespace {

template <class T, class Fp8>
std::vector<T> expand(const Fp8* codes, int64_t count, const HostExec& exec) {
  constexpr int64_t kGrain = 1 << 14;
  std::vector<T> values(static_cast<size_t>(count));
  parallel_ranges(exec, count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i)] = static_cast<T>(to_float(codes[i]));
  });
  return values;
}

}  // namespace

template <class T, class A, class B>
void fp8_product_ref(const Fp8ProductRef<T, A, B>& args, const HostExec& exec) {
  const std::vector<T> a = expand<T>(args.a, args.M * args.K, exec), b = expand<T>(args.b, args.N * args.K, exec);
  gemm_ref(GemmRef<T>{.c = args.c,
                      .a = a.data(),
                      .b = b.data(),
                      .M = args.M,
                      .N = args.N,
                      .K = args.K,
                      .lda = args.K,
                      .ldb = args.K,
                      .ldc = args.N,
                      .transpose_b = true,
                      .alpha = static_cast<T>(args.scale_a) * static_cast<T>(args.scale_b),
                      .beta = args.beta},
           exec);
}

template void fp8_product_ref(const Fp8ProductRef<float, e4m3>&, const HostExec&);
template void fp8_product_ref(const Fp8ProductRef<float, e5m2>&, const HostExec&);
template void fp8_product_ref(const Fp8ProductRef<float, e4m3, e5m2>&, const HostExec&);
template void fp8_product_ref(const Fp8ProductRef<double, e4m3, e5m2>&, const HostExec&);
template void fp8_product_ref(const Fp8ProductRef<double, e4m3>&, const HostExec&);
template void fp8_product_ref(const Fp8ProductRef<double, e5m2>&, const HostExec&);

}  // namespace speedrun::kernels
