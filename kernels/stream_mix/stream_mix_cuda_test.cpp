// CUDA stream mix against the reference: every number of terms, kind of factor and set of wanted gradients, production shape.
#include "kernels/stream_mix/stream_mix.h"

#include <sstream>

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

enum class Scalar { none, plain, sigmoid };
enum class Source { none, write, accumulate, in_place };  // of a term: what becomes of its dsrc; in_place: it is dout

struct TermCase {
  Scalar scalar = Scalar::none;
  bool gate = false;
  double gate_add = 0;
  Source dsrc = Source::write;
  bool dscalar = false, dgate = false;
};

struct Case {
  int64_t N;
  int C;
  std::vector<TermCase> terms;
  int64_t gate_stride = 41;
  int out_term = -1;  // the term whose src is overwritten by out; -1: none
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "N=" << c.N << " C=" << c.C << " out_term=" << c.out_term;
  for (const TermCase& t : c.terms) {
    out << " {scalar=" << static_cast<int>(t.scalar) << " gate=" << t.gate << " add=" << t.gate_add
        << " dsrc=" << static_cast<int>(t.dsrc) << " dscalar=" << t.dscalar << " dgate=" << t.dgate << '}';
  }
  return out;
}

struct Inputs {
  std::vector<std::vector<bf16>> src, dsrc;  // of each term; dsrc before the call
  std::vector<bf16> scalars, gates, dout;
  std::vector<float> dscalars;  // before the call
};

Inputs make_inputs(const Case& c, testing::Random& random) {
  const int64_t terms = static_cast<int64_t>(c.terms.size());
  Inputs in{.src = {},
            .dsrc = {},
            .scalars = random.normal_vector<bf16>(terms, 0.5, 0.7),
            .gates = random.normal_vector<bf16>(c.N * c.gate_stride),
            .dout = random.uniform_vector<bf16>(c.N * c.C, 0.3),
            .dscalars = random.normal_vector<float>(terms)};
  for (int64_t i = 0; i < terms; ++i) {
    in.src.push_back(random.uniform_vector<bf16>(c.N * c.C, 2));
    in.dsrc.push_back(random.uniform_vector<bf16>(c.N * c.C, 0.5));
  }
  return in;
}

// Pointers of a case, on either device.
template <class T>
struct Pointers {
  std::vector<T*> src, dsrc;
  T *scalars, *gates, *dgates, *dout, *out;
  Acc<T>*dscalars, *scratch;
};

template <class T>
MixTerm<T> term(const Case& c, const Pointers<T>& p, size_t i) {
  return {.src = p.src[i],
          .scalar = c.terms[i].scalar != Scalar::none ? p.scalars + i : nullptr,
          .sigmoid = c.terms[i].scalar == Scalar::sigmoid,
          .gate = c.terms[i].gate ? p.gates + i : nullptr,
          .gate_stride = c.gate_stride,
          .gate_add = c.terms[i].gate_add};
}

template <class T>
StreamMixForward<T> forward_args(const Case& c, const Pointers<T>& p) {
  StreamMixForward<T> args{.out = c.out_term >= 0 ? p.src[static_cast<size_t>(c.out_term)] : p.out,
                           .terms = {},
                           .num_terms = static_cast<int>(c.terms.size()),
                           .N = c.N,
                           .C = c.C};
  for (size_t i = 0; i < c.terms.size(); ++i) args.terms[i] = term(c, p, i);
  return args;
}

template <class T>
StreamMixBackward<T> backward_args(const Case& c, const Pointers<T>& p) {
  StreamMixBackward<T> args{.terms = {},
                            .grads = {},
                            .num_terms = static_cast<int>(c.terms.size()),
                            .dout = p.dout,
                            .scratch = p.scratch,
                            .N = c.N,
                            .C = c.C};
  for (size_t i = 0; i < c.terms.size(); ++i) {
    const TermCase& t = c.terms[i];
    args.terms[i] = term(c, p, i);
    args.grads[i] = {.dsrc = t.dsrc == Source::none       ? nullptr
                             : t.dsrc == Source::in_place ? p.dout
                                                          : p.dsrc[i],
                     .accumulate = t.dsrc == Source::accumulate,
                     .dscalar = t.dscalar ? p.dscalars + i : nullptr,
                     .dgate = t.dgate ? p.dgates + i : nullptr};
  }
  return args;
}

// dgates start as 0 outside the device, where they are poisoned: only wanted columns are compared.
template <class T>
struct Results {
  std::vector<std::vector<T>> dsrc;
  std::vector<T> out, dout, dgates;
  std::vector<Acc<T>> dscalars;
};

template <class T>
Results<T> reference(const Case& c, const Inputs& in, const HostExec& exec) {
  std::vector<std::vector<T>> src, dsrc;
  for (const std::vector<bf16>& values : in.src) src.push_back(widen<T>(values));
  for (const std::vector<bf16>& values : in.dsrc) dsrc.push_back(widen<T>(values));
  std::vector<T> scalars = widen<T>(in.scalars), gates = widen<T>(in.gates), dout = widen<T>(in.dout), out(dout.size()),
                 dgates(gates.size()), scratch(static_cast<size_t>(stream_mix_scratch(c.N)));
  std::vector<T> dscalars(in.dscalars.begin(), in.dscalars.end());
  Pointers<T> p{.src = {},
                .dsrc = {},
                .scalars = scalars.data(),
                .gates = gates.data(),
                .dgates = dgates.data(),
                .dout = dout.data(),
                .out = out.data(),
                .dscalars = dscalars.data(),
                .scratch = scratch.data()};
  for (size_t i = 0; i < c.terms.size(); ++i) {
    p.src.push_back(src[i].data());
    p.dsrc.push_back(dsrc[i].data());
  }
  stream_mix_backward(backward_args(c, p), exec);
  stream_mix_forward(forward_args(c, p), exec);
  return {.dsrc = dsrc,
          .out = c.out_term >= 0 ? src[static_cast<size_t>(c.out_term)] : out,
          .dout = dout,
          .dgates = dgates,
          .dscalars = dscalars};
}

class StreamMixCudaTest : public CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Inputs& in, Launch launch) {
    std::vector<std::unique_ptr<testing::DeviceBuffer<bf16>>> src, dsrc;
    auto scalars = uploaded("scalars", in.scalars), gates = uploaded("gates", in.gates), dout = uploaded("dout", in.dout);
    auto dscalars = uploaded("dscalars", in.dscalars);
    auto out = poisoned<bf16>("out", dout.size()), dgates = poisoned<bf16>("dgates", gates.size());
    auto scratch = poisoned<float>("scratch", stream_mix_scratch(c.N));
    Pointers<bf16> p{.src = {},
                     .dsrc = {},
                     .scalars = scalars.get(),
                     .gates = gates.get(),
                     .dgates = dgates.get(),
                     .dout = dout.get(),
                     .out = out.get(),
                     .dscalars = dscalars.get(),
                     .scratch = scratch.get()};
    for (size_t i = 0; i < c.terms.size(); ++i) {
      src.push_back(std::make_unique<testing::DeviceBuffer<bf16>>(uploaded("src " + std::to_string(i), in.src[i])));
      dsrc.push_back(std::make_unique<testing::DeviceBuffer<bf16>>(uploaded("dsrc " + std::to_string(i), in.dsrc[i])));
      if (c.terms[i].dsrc == Source::write) dsrc.back()->poison();
      p.src.push_back(src.back()->get());
      p.dsrc.push_back(dsrc.back()->get());
    }
    run(launch, [&] {
      stream_mix_backward(backward_args(c, p), exec());
      stream_mix_forward(forward_args(c, p), exec());
    });
    Results<bf16> r{.dsrc = {},
                    .out = c.out_term >= 0 ? src[static_cast<size_t>(c.out_term)]->download() : out.download(),
                    .dout = dout.download(),
                    .dgates = dgates.download(),
                    .dscalars = dscalars.download()};
    for (const auto& buffer : dsrc) r.dsrc.push_back(buffer->download());
    return r;
  }

  void check(const Case& c) {
    std::ostringstream text;
    text << c;
    SCOPED_TRACE(text.str());
    testing::Random random = testing::test_random();
    const Inputs in = make_inputs(c, random);
    const Results<bf16> got = device(c, in, Launch::direct);
    const Results<double> truth = reference<double>(c, in, truth_exec());
    const Results<float> baseline = reference<float>(c, in, baseline_exec());
    EXPECT_TRUE(within_rule(got.out, truth.out, baseline.out)) << "out";
    EXPECT_TRUE(within_rule(got.dout, truth.dout, baseline.dout)) << "dout, overwritten by a dsrc";
    EXPECT_TRUE(within_rule(got.dscalars, truth.dscalars, baseline.dscalars, Ulp::accumulated)) << "dscalars";
    for (size_t i = 0; i < c.terms.size(); ++i) {
      EXPECT_TRUE(within_rule(got.dsrc[i], truth.dsrc[i], baseline.dsrc[i])) << "dsrc of term " << i;
      if (!c.terms[i].dscalar) {
        EXPECT_EQ(got.dscalars[i], in.dscalars[i]) << "dscalar of term " << i << ", not wanted";
      }
    }
    check_gates(c, got.dgates, truth.dgates, baseline.dgates);

    const Results<bf16> again = device(c, in, Launch::captured);
    EXPECT_TRUE(same_bits(got.out, again.out)) << "out, second run";
    EXPECT_TRUE(same_bits(got.dout, again.dout)) << "dout, second run";
    EXPECT_TRUE(same_bits(got.dgates, again.dgates)) << "dgates, second run";
    EXPECT_TRUE(same_bits(got.dscalars, again.dscalars)) << "dscalars, second run";
    for (size_t i = 0; i < c.terms.size(); ++i) EXPECT_TRUE(same_bits(got.dsrc[i], again.dsrc[i])) << "dsrc, second run";
  }

  // The column of each gate by itself; columns of no wanted gate stay poisoned.
  void check_gates(const Case& c, const std::vector<bf16>& got, const std::vector<double>& truth,
                   const std::vector<float>& baseline) {
    for (int64_t column = 0; column < c.gate_stride; ++column) {
      const bool wanted = column < static_cast<int64_t>(c.terms.size()) && c.terms[static_cast<size_t>(column)].dgate;
      std::vector<bf16> got_column;
      std::vector<double> truth_column;
      std::vector<float> baseline_column;
      for (int64_t t = 0; t < c.N; ++t) {
        const size_t i = static_cast<size_t>(t * c.gate_stride + column);
        got_column.push_back(got[i]);
        truth_column.push_back(truth[i]);
        baseline_column.push_back(baseline[i]);
        if (!wanted) {
          ASSERT_EQ(got[i].bits, 0xffff) << "dgate written that was not wanted: token " << t << " column " << column;
        }
      }
      if (wanted) {
        EXPECT_TRUE(within_rule(got_column, truth_column, baseline_column)) << "dgate, column " << column;
      }
    }
  }
};

// The mixes of a layer of the Main Track's model.
const std::vector<TermCase> kAttentionMix = {{Scalar::plain, false, 1, Source::in_place, true, false},
                                             {Scalar::plain, false, 1, Source::write, true, false},
                                             {Scalar::none, true, 0, Source::accumulate, false, true},
                                             {Scalar::none, true, 0, Source::accumulate, false, true}};
const std::vector<TermCase> kMlpMix = {{Scalar::plain, false, 1, Source::in_place, true, false},
                                       {Scalar::plain, false, 1, Source::write, true, false}};
const std::vector<TermCase> kSkipMix = {{Scalar::none, false, 1, Source::in_place, false, false},
                                        {Scalar::sigmoid, true, 0, Source::write, true, true}};
const std::vector<TermCase> kMuddMix = {
    {Scalar::none, false, 1, Source::in_place, false, false}, {Scalar::none, true, 0, Source::accumulate, false, true},
    {Scalar::none, true, 0, Source::write, false, true},      {Scalar::none, true, 1, Source::accumulate, false, true},
    {Scalar::none, true, 0, Source::none, false, true},       {Scalar::none, true, 0, Source::accumulate, false, true}};

TEST_F(StreamMixCudaTest, MixesOfTheModelOnOddShapes) {
  for (const std::vector<TermCase>& mix : {kAttentionMix, kMlpMix, kSkipMix, kMuddMix}) {
    for (const int64_t N : {1, 15, 16, 17, 1001}) check({N, 768, mix});
    for (const int C : {8, 248, 256, 264, 760, 776, 1024, 1544}) check({37, C, mix});
  }
}

TEST_F(StreamMixCudaTest, RandomTerms) {
  testing::Random random = testing::test_random();
  for (int num_terms = 1; num_terms <= kMaxMixTerms; ++num_terms) {
    for (int repeat = 0; repeat < 12; ++repeat) {
      Case c{.N = 1 + random.below(150), .C = 8 * static_cast<int>(1 + random.below(150)), .terms = {}};
      c.gate_stride = num_terms + random.below(5);
      if (random.below(2) == 1) c.out_term = static_cast<int>(random.below(num_terms));
      bool in_place = false;
      for (int i = 0; i < num_terms; ++i) {
        TermCase t{.scalar = static_cast<Scalar>(random.below(3)), .gate = random.below(2) == 1};
        t.gate_add = static_cast<double>(random.below(3)) - (t.gate ? 1 : 2);
        t.dsrc = static_cast<Source>(random.below(in_place ? 3 : 4));
        in_place = in_place || t.dsrc == Source::in_place;
        t.dscalar = t.scalar != Scalar::none && random.below(2) == 1;
        t.dgate = t.gate && random.below(2) == 1;
        c.terms.push_back(t);
      }
      check(c);
    }
  }
}

TEST_F(StreamMixCudaTest, TheIdentityAloneLeavesEverything) {
  check({100, 768, {{Scalar::none, false, 1, Source::in_place}}});
  check({100, 768, {{Scalar::none, false, 1, Source::in_place}, {Scalar::plain, true, 0, Source::none}}});
}

TEST_F(StreamMixCudaTest, TwoTermsMayShareAScalar) {
  testing::Random random = testing::test_random();
  const Case c{501, 64, {{Scalar::plain, false, 1, Source::write, true}, {Scalar::plain, false, 2, Source::write, true}}};
  const Inputs in = make_inputs(c, random);
  auto src0 = uploaded("src 0", in.src[0]), src1 = uploaded("src 1", in.src[1]), dout = uploaded("dout", in.dout);
  auto scalar = uploaded("scalar", std::vector<bf16>{in.scalars[0]});
  auto dscalar = uploaded("dscalar", std::vector<float>{in.dscalars[0]});
  auto scratch = poisoned<float>("scratch", stream_mix_scratch(c.N));
  StreamMixBackward<bf16> args{.terms = {{src0.get(), scalar.get()}, {src1.get(), scalar.get()}},
                               .grads = {{nullptr, false, dscalar.get()}, {nullptr, false, dscalar.get()}},
                               .num_terms = 2,
                               .dout = dout.get(),
                               .scratch = scratch.get(),
                               .N = c.N,
                               .C = c.C};
  args.terms[0].gate_add = 1;
  args.terms[1].gate_add = 2;
  stream_mix_backward(args, exec());
  const Results<double> truth = reference<double>(c, in, truth_exec());
  EXPECT_NEAR(dscalar.download()[0], truth.dscalars[0] + truth.dscalars[1] - static_cast<double>(in.dscalars[1]), 2e-3);
}

TEST_F(StreamMixCudaTest, ProductionShapes) {
  check({16'383, 768, kAttentionMix});
  check({16'381, 768, kMuddMix});
  check({70'001, 64, kMlpMix});
}

TEST_F(StreamMixCudaTest, RefusesWhatItCannotDo) {
  auto memory = poisoned<bf16>("memory", 1 << 12);
  const StreamMixForward<bf16> good{.out = memory.get(), .terms = {{memory.get()}}, .num_terms = 1, .N = 2, .C = 16};
  StreamMixForward<bf16> args = good;
  args.C = 12;
  EXPECT_THROW(stream_mix_forward(args, exec()), Error);
  args = good;
  args.num_terms = kMaxMixTerms + 1;
  EXPECT_THROW(stream_mix_forward(args, exec()), Error);
  args = good;
  args.terms[0].src = memory.get() + 1;
  EXPECT_THROW(stream_mix_forward(args, exec()), Error);

  StreamMixBackward<bf16> backward{.terms = {{memory.get()}},
                                   .grads = {{nullptr, false, nullptr, memory.get()}},
                                   .num_terms = 1,
                                   .dout = memory.get(),
                                   .scratch = nullptr,
                                   .N = 2,
                                   .C = 16};
  EXPECT_THROW(stream_mix_backward(backward, exec()), Error);  // the gradient of a gate that is not there
}

}  // namespace
}  // namespace speedrun::kernels
