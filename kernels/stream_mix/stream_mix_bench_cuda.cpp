#include "kernels/bench/bench.h"
#include "kernels/stream_mix/stream_mix.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kN = 49'152, kGates = 41;
constexpr int kC = 768;

// Buffers for the largest mix; every case takes its terms from the front.
class MixBench {
 public:
  explicit MixBench(const CudaExec& exec) : exec_(exec) {
    for (int i = 0; i < kMaxMixTerms; ++i) {
      src_.push_back(BenchBuffer::normal_bf16(kN * kC));
      dsrc_.push_back(BenchBuffer::normal_bf16(kN * kC));
    }
  }

  enum class Term { identity, scalar, gate };

  BenchCase forward(const std::string& name, const std::vector<Term>& kinds) const {
    StreamMixForward<bf16> args{.out = out_.as<bf16>(), .terms = {}, .num_terms = static_cast<int>(kinds.size()), .N = kN, .C = kC};
    for (size_t i = 0; i < kinds.size(); ++i) args.terms[i] = term(kinds[i], i);
    const double tensors = static_cast<double>(kinds.size()) + 1;
    return {name, [args, exec = exec_] { stream_mix_forward(args, exec); }, 0, tensors * kTensorBytes};
  }

  // The identity's gradient stays in dout; those of gated terms are added to what is there.
  BenchCase backward(const std::string& name, const std::vector<Term>& kinds) const {
    StreamMixBackward<bf16> args{.terms = {},
                                 .grads = {},
                                 .num_terms = static_cast<int>(kinds.size()),
                                 .dout = out_.as<bf16>(),
                                 .scratch = scratch_.as<float>(),
                                 .N = kN,
                                 .C = kC};
    double tensors = 1;
    for (size_t i = 0; i < kinds.size(); ++i) {
      args.terms[i] = term(kinds[i], i);
      MixTermGrad<bf16>& grad = args.grads[i];
      grad.dsrc = kinds[i] == Term::identity ? out_.as<bf16>() : dsrc_[i].as<bf16>();
      if (kinds[i] == Term::identity) continue;
      grad.accumulate = kinds[i] == Term::gate;
      if (kinds[i] == Term::scalar) grad.dscalar = dscalars_.as<float>() + i;
      if (kinds[i] == Term::gate) grad.dgate = dgates_.as<bf16>() + i;
      tensors += grad.accumulate ? 3 : 2;
    }
    return {name, [args, exec = exec_] { stream_mix_backward(args, exec); }, 0, tensors * kTensorBytes};
  }

  BenchCase copy() const { return bench_copy(kN * kC * sizeof(bf16), exec_); }

 private:
  static constexpr double kTensorBytes = 2.0 * kN * kC;

  MixTerm<bf16> term(Term kind, size_t i) const {
    return {.src = src_[i].as<bf16>(),
            .scalar = kind == Term::scalar ? scalars_.as<bf16>() + i : nullptr,
            .gate = kind == Term::gate ? gates_.as<bf16>() + i : nullptr,
            .gate_stride = kGates,
            .gate_add = kind == Term::gate ? 0.0 : 1.0};
  }

  CudaExec exec_;
  std::vector<BenchBuffer> src_, dsrc_;
  BenchBuffer out_ = BenchBuffer::normal_bf16(kN * kC), scalars_ = BenchBuffer::normal_bf16(kMaxMixTerms);
  BenchBuffer gates_ = BenchBuffer::normal_bf16(kN * kGates), dgates_ = BenchBuffer::zeroed(kN * kGates * sizeof(bf16));
  BenchBuffer dscalars_ = BenchBuffer::zeroed(kMaxMixTerms * sizeof(float));
  BenchBuffer scratch_ = BenchBuffer::zeroed(static_cast<size_t>(stream_mix_scratch(kN)) * sizeof(float));
};

}  // namespace

void bench_stream_mix(const BenchOptions& options, std::ostream& out) {
  using enum MixBench::Term;
  const MixBench bench(options.exec);
  const std::vector<MixBench::Term> mlp{scalar, scalar}, attention{scalar, scalar, gate, gate},
      mudd{identity, gate, gate, gate, gate, gate};
  bench_table("stream_mix, 49152 x 768 bf16",
              {bench.copy(), bench.forward("forward, 2 scalars", mlp), bench.forward("forward, 2 scalars + 2 gates", attention),
               bench.forward("forward, 1 + 5 gates", mudd), bench.backward("backward, 2 scalars", mlp),
               bench.backward("backward, 2 scalars + 2 gates", attention), bench.backward("backward, 1 + 5 gates", mudd)},
              options.exec, options.seconds, out);
}

}  // namespace speedrun::kernels
