// CUDA dynamically composable attention against the CPU reference. Small cases first: the first test that fails says where to look.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/dc_attention/dc_attention.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/documents.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::equal_documents;
using testing::Random;
using testing::same_bits;
using testing::Ulp;
using testing::web_documents;
using testing::within_rule;

struct Problem {
  int64_t N = 0;
  int H = 1, D = 64;
  int64_t window = 0;
  std::vector<int32_t> doc_start = {};
  std::vector<bf16> q = {}, k = {}, v = {}, y = {}, dout = {};  // (N, H, D)
  std::vector<bf16> dq = {}, dk = {}, dv = {};                  // (N, H, D) what the gradients hold before the call
  std::vector<bf16> w = {};                                     // (N, stride): w1 from column 1 on, w2 from column H + 2 on

  int64_t channels() const { return int64_t{H} * D; }
  int64_t stride() const { return 2 * int64_t{H} + 3; }
  int64_t w1() const { return 1; }
  int64_t w2() const { return H + 2; }
  double scale() const { return D == 64 ? 0.125 : 0.12; }
};

std::ostream& operator<<(std::ostream& out, const Problem& p) {
  const auto documents =
      1 + std::count_if(p.doc_start.begin() + 1, p.doc_start.end(),
                        [last = p.doc_start[0]](int32_t start) mutable { return std::exchange(last, start) != start; });
  return out << "N " << p.N << ", H " << p.H << ", D " << p.D << ", window " << p.window << ", " << documents
             << " documents (index of out, dq, dk, dv: (t·H + h)·D + d; of lse: h·N + t; of dw1, dw2: t·H + h)";
}

using Plane = std::vector<bf16> Problem::*;
constexpr Plane kInputs[] = {&Problem::q, &Problem::k, &Problem::v, &Problem::y, &Problem::dout};
constexpr Plane kGradients[] = {&Problem::dq, &Problem::dk, &Problem::dv};
constexpr const char* kGradientNames[] = {"dq", "dk", "dv"};

// `before`: deviation of what the gradients hold before the call. Where it is 0 they show the kernels' own errors best.
Problem make_problem(std::vector<int32_t> doc_start, int H, int D, int64_t window, Random& random, double deviation = 1,
                     double before = 0) {
  Problem p{.N = static_cast<int64_t>(doc_start.size()), .H = H, .D = D, .window = window, .doc_start = std::move(doc_start)};
  for (const Plane plane : kInputs) p.*plane = random.normal_vector<bf16>(p.N * p.channels(), deviation);
  for (const Plane plane : kGradients) p.*plane = random.normal_vector<bf16>(p.N * p.channels(), before);
  p.w = random.normal_vector<bf16>(p.N * p.stride());
  return p;
}

// Tokens begin … end − 1, which are whole documents, as a problem of their own.
Problem slice(const Problem& p, int64_t begin, int64_t end) {
  auto rows = [&](const auto& values, int64_t width) {
    return std::decay_t<decltype(values)>(values.begin() + begin * width, values.begin() + end * width);
  };
  Problem part{.N = end - begin, .H = p.H, .D = p.D, .window = p.window, .doc_start = rows(p.doc_start, 1)};
  for (int32_t& start : part.doc_start) start -= static_cast<int32_t>(begin);
  for (const Plane plane : kInputs) part.*plane = rows(p.*plane, p.channels());
  for (const Plane plane : kGradients) part.*plane = rows(p.*plane, p.channels());
  part.w = rows(p.w, p.stride());
  return part;
}

// Columns first … first + H − 1 of (N, stride).
template <class T>
std::vector<T> head_columns(const std::vector<T>& values, const Problem& p, int64_t first) {
  std::vector<T> result;
  for (int64_t t = 0; t < p.N; ++t) {
    const auto row = values.begin() + t * p.stride() + first;
    result.insert(result.end(), row, row + p.H);
  }
  return result;
}

struct Forward {
  std::vector<float> out, lse;
};

Forward reference_forward(const Problem& p, const HostExec& exec) {
  const std::vector<float> q = testing::widen<float>(p.q), k = testing::widen<float>(p.k), v = testing::widen<float>(p.v),
                           y = testing::widen<float>(p.y), w = testing::widen<float>(p.w);
  Forward result{std::vector<float>(q.size()), std::vector<float>(static_cast<size_t>(p.H * p.N))};
  dc_attention_forward(DcAttentionForward<float>{.out = result.out.data(),
                                                 .lse = result.lse.data(),
                                                 .y = y.data(),
                                                 .q = q.data(),
                                                 .k = k.data(),
                                                 .v = v.data(),
                                                 .w1 = w.data() + p.w1(),
                                                 .w2 = w.data() + p.w2(),
                                                 .stride = p.stride(),
                                                 .doc_start = p.doc_start.data(),
                                                 .N = p.N,
                                                 .H = p.H,
                                                 .D = p.D,
                                                 .window = p.window,
                                                 .scale = p.scale()},
                       exec);
  return result;
}

struct Backward {
  std::vector<float> gradients[3], dw;  // dq, dk, dv; (N, stride)
};

Backward reference_backward(const Problem& p, const std::vector<float>& lse, const HostExec& exec) {
  const std::vector<float> q = testing::widen<float>(p.q), k = testing::widen<float>(p.k), v = testing::widen<float>(p.v),
                           dout = testing::widen<float>(p.dout), w = testing::widen<float>(p.w);
  Backward result{{testing::widen<float>(p.dq), testing::widen<float>(p.dk), testing::widen<float>(p.dv)},
                  std::vector<float>(w.size())};
  dc_attention_backward(DcAttentionBackward<float>{.dq = result.gradients[0].data(),
                                                   .dk = result.gradients[1].data(),
                                                   .dv = result.gradients[2].data(),
                                                   .dw1 = result.dw.data() + p.w1(),
                                                   .dw2 = result.dw.data() + p.w2(),
                                                   .dout = dout.data(),
                                                   .q = q.data(),
                                                   .k = k.data(),
                                                   .v = v.data(),
                                                   .w1 = w.data() + p.w1(),
                                                   .w2 = w.data() + p.w2(),
                                                   .stride = p.stride(),
                                                   .lse = lse.data(),
                                                   .doc_start = p.doc_start.data(),
                                                   .scratch = nullptr,
                                                   .N = p.N,
                                                   .H = p.H,
                                                   .D = p.D,
                                                   .window = p.window,
                                                   .scale = p.scale()},
                        exec);
  return result;
}

class DcAttentionCudaTest : public testing::CudaTest {
 protected:
  // A problem on the device; every buffer that a kernel overwrites starts poisoned.
  struct Device {
    DeviceBuffer<bf16> q, k, v, y, dout, w, dq, dk, dv, out, dw;
    DeviceBuffer<float> lse;
    DeviceBuffer<int32_t> doc_start;
    DeviceBuffer<uint8_t> scratch;
  };

  Device upload(const Problem& p) const {
    return {.q = uploaded("q", p.q),
            .k = uploaded("k", p.k),
            .v = uploaded("v", p.v),
            .y = uploaded("y", p.y),
            .dout = uploaded("dout", p.dout),
            .w = uploaded("w", p.w),
            .dq = uploaded("dq", p.dq),
            .dk = uploaded("dk", p.dk),
            .dv = uploaded("dv", p.dv),
            .out = poisoned<bf16>("out", p.N * p.channels()),
            .dw = poisoned<bf16>("dw", p.N * p.stride()),
            .lse = poisoned<float>("lse", p.H * p.N),
            .doc_start = uploaded("doc_start", p.doc_start),
            .scratch = poisoned<uint8_t>("scratch", static_cast<int64_t>(dc_attention_scratch(p.N, p.H, p.window)))};
  }

  void run_forward(const Problem& p, const Device& device) const {
    dc_attention_forward(DcAttentionForward<bf16>{.out = device.out.get(),
                                                  .lse = device.lse.get(),
                                                  .y = device.y.get(),
                                                  .q = device.q.get(),
                                                  .k = device.k.get(),
                                                  .v = device.v.get(),
                                                  .w1 = device.w.get() + p.w1(),
                                                  .w2 = device.w.get() + p.w2(),
                                                  .stride = p.stride(),
                                                  .doc_start = device.doc_start.get(),
                                                  .N = p.N,
                                                  .H = p.H,
                                                  .D = p.D,
                                                  .window = p.window,
                                                  .scale = p.scale()},
                         exec());
  }

  void run_backward(const Problem& p, const Device& device) const {
    dc_attention_backward(DcAttentionBackward<bf16>{.dq = device.dq.get(),
                                                    .dk = device.dk.get(),
                                                    .dv = device.dv.get(),
                                                    .dw1 = device.dw.get() + p.w1(),
                                                    .dw2 = device.dw.get() + p.w2(),
                                                    .dout = device.dout.get(),
                                                    .q = device.q.get(),
                                                    .k = device.k.get(),
                                                    .v = device.v.get(),
                                                    .w1 = device.w.get() + p.w1(),
                                                    .w2 = device.w.get() + p.w2(),
                                                    .stride = p.stride(),
                                                    .lse = device.lse.get(),
                                                    .doc_start = device.doc_start.get(),
                                                    .scratch = device.scratch.get(),
                                                    .N = p.N,
                                                    .H = p.H,
                                                    .D = p.D,
                                                    .window = p.window,
                                                    .scale = p.scale()},
                          exec());
  }

  // Compares tokens begin … end − 1 (whole documents) of finished runs with the reference. Backward is checked for the lse that the
  // device computed, so that an error of the forward pass does not show again.
  void check_tokens(const Problem& whole, const Device& device, int64_t begin, int64_t end) {
    const Problem p = slice(whole, begin, end);
    SCOPED_TRACE(::testing::Message() << "tokens " << begin << " to " << end << ": " << p);
    auto plane = [&](const DeviceBuffer<bf16>& buffer) { return buffer.download(begin * p.channels(), p.N * p.channels()); };
    std::vector<float> lse;
    for (int head = 0; head < p.H; ++head) {
      const std::vector<float> part = device.lse.download(head * whole.N + begin, p.N);
      lse.insert(lse.end(), part.begin(), part.end());
    }
    const Forward truth = reference_forward(p, truth_exec()), baseline = reference_forward(p, baseline_exec());
    EXPECT_TRUE(within_rule(lse, truth.lse, baseline.lse, Ulp::accumulated)) << "lse";
    EXPECT_TRUE(within_rule(plane(device.out), truth.out, baseline.out)) << "out";

    const Backward dtruth = reference_backward(p, lse, truth_exec()), dbaseline = reference_backward(p, lse, baseline_exec());
    const std::vector<bf16> dw = device.dw.download(begin * p.stride(), p.N * p.stride());
    auto check_weights = [&](const char* name, int64_t column) {
      EXPECT_TRUE(
          within_rule(head_columns(dw, p, column), head_columns(dtruth.dw, p, column), head_columns(dbaseline.dw, p, column)))
          << name;
    };
    check_weights("dw2", p.w2());
    // One head's w1 is normalised to ±1: its gradient is rounding alone.
    if (p.H > 1) check_weights("dw1", p.w1());
    const DeviceBuffer<bf16>* const gradients[] = {&device.dq, &device.dk, &device.dv};
    for (int i = 0; i < 3; ++i)
      EXPECT_TRUE(within_rule(plane(*gradients[i]), dtruth.gradients[i], dbaseline.gradients[i])) << kGradientNames[i];
    for (int64_t t = 0; t < p.N; ++t) {
      for (const int64_t column : {int64_t{0}, int64_t{p.H + 1}, p.stride() - 1}) {
        ASSERT_EQ(dw[static_cast<size_t>(t * p.stride() + column)].bits, 0xffff)
            << "token " << t << ", column " << column << " of dw is nobody's";
      }
    }
  }

  void check(const Problem& p) {
    const Device device = upload(p);
    run_forward(p, device);
    run_backward(p, device);
    check_tokens(p, device, 0, p.N);
  }
};

// Nothing is mixed: out is y, bit for bit, and dv is 0.
TEST_F(DcAttentionCudaTest, OffWithoutWeights) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const bool first : {true, false}) {
      Problem p = make_problem(equal_documents(200, 130), 3, D, 60, random);
      SCOPED_TRACE(::testing::Message() << (first ? "w1 = 0, " : "w2 = 0, ") << p);
      for (int64_t t = 0; t < p.N; ++t) std::fill_n(p.w.begin() + t * p.stride() + (first ? p.w1() : p.w2()), p.H, bf16(0.0f));
      const Device device = upload(p);
      run_forward(p, device);
      run_backward(p, device);
      EXPECT_TRUE(same_bits(device.out.download(), p.y));
      for (const bf16 x : device.dv.download()) ASSERT_EQ(static_cast<float>(x), 0.0f);
    }
  }
}

// Tokens that see themselves alone: nothing reaches queries and keys but the rounding of two sums that are equal in exact
// arithmetic (p is 1 to a few ulp of the D terms of its score).
TEST_F(DcAttentionCudaTest, TokensThatSeeThemselvesAlone) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t length : {1, 200}) {
      const Problem p = make_problem(equal_documents(200, length), 3, D, length == 1 ? 111 : 0, random);
      SCOPED_TRACE(::testing::Message() << p);
      const Device device = upload(p);
      run_forward(p, device);
      run_backward(p, device);
      const Forward truth = reference_forward(p, truth_exec()), baseline = reference_forward(p, baseline_exec());
      EXPECT_TRUE(within_rule(device.out.download(), truth.out, baseline.out));
      for (const DeviceBuffer<bf16>* gradient : {&device.dq, &device.dk}) {
        for (const bf16 x : gradient->download()) ASSERT_LT(std::abs(static_cast<float>(x)), 1e-3f);
      }
    }
  }
}

TEST_F(DcAttentionCudaTest, OneTile) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t N : {2, 5, 8, 15, 16}) check(make_problem(equal_documents(N, N), 1, D, 111, random));
  }
}

TEST_F(DcAttentionCudaTest, TileBorders) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t N : {17, 31, 32, 63, 64, 65, 127, 128, 129, 193, 300})
      check(make_problem(equal_documents(N, N), 2, D, 111, random));
  }
}

TEST_F(DcAttentionCudaTest, Heads) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int H : {1, 3, 6, 16}) check(make_problem(equal_documents(150, 150), H, D, 111, random));
  }
}

TEST_F(DcAttentionCudaTest, Windows) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t window : {1, 2, 15, 16, 31, 63, 64, 110, 111, 112, 113, 200, 255})
      check(make_problem(equal_documents(400, 400), 2, D, window, random));
  }
}

TEST_F(DcAttentionCudaTest, Documents) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t length : {2, 3, 16, 31, 64, 65, 127, 200})
      check(make_problem(equal_documents(300, length), 2, D, 111, random));
    for (const double mean : {5.0, 60.0, 300.0}) {
      for (const int64_t window : {40, 111, 180}) check(make_problem(web_documents(555, mean, 600, random), 3, D, window, random));
    }
  }
}

TEST_F(DcAttentionCudaTest, AddsToTheGradients) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) check(make_problem(web_documents(333, 100, 200, random), 3, D, 111, random, 1, 2));
}

// Scores in the hundreds: weights are 0 or 1.
TEST_F(DcAttentionCudaTest, LargeScores) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) check(make_problem(equal_documents(300, 170), 2, D, 111, random, 4));
}

TEST_F(DcAttentionCudaTest, SameBitsEveryRunAndInAGraph) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    const Problem p = make_problem(web_documents(2000, 300, 900, random), 6, D, 111, random, 1, 1);
    Device device = upload(p);
    run_forward(p, device);
    run_backward(p, device);
    auto results = [&] {
      return std::vector<std::vector<bf16>>{device.out.download(), device.dq.download(), device.dk.download(), device.dv.download(),
                                            device.dw.download()};
    };
    const auto expected = results();
    for (int run = 0; run < 3; ++run) {
      device.out.poison(), device.lse.poison(), device.dw.poison(), device.scratch.poison();
      device.dq.upload(p.dq), device.dk.upload(p.dk), device.dv.upload(p.dv);
      run_captured([&] {
        run_forward(p, device);
        run_backward(p, device);
      });
      const auto found = results();
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same_bits(found[i], expected[i])) << "result " << i << " of out, dq …";
    }
  }
}

TEST_F(DcAttentionCudaTest, MainTrackMicroBatch) {
  Random random = testing::test_random();
  constexpr int64_t kN = 49152;
  Problem p = make_problem(web_documents(1, 1, 1, random), 6, 128, 111, random);
  p.doc_start = web_documents(kN, 500, 2048, random);
  p.N = kN;
  // Random numbers for a few thousand tokens, turned by a different offset for each repetition: large buffers in little time.
  const std::vector<bf16> numbers = random.normal_vector<bf16>(1 << 20);
  auto fill = [&](std::vector<bf16>& values, int64_t count) {
    values.resize(static_cast<size_t>(count));
    uint64_t offset = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (i % 65536 == 0) offset = random.bits();
      values[i] = numbers[(i + offset) % numbers.size()];
    }
  };
  for (const Plane plane : kInputs) fill(p.*plane, kN * p.channels());
  for (const Plane plane : kGradients) (p.*plane).assign(static_cast<size_t>(kN * p.channels()), bf16(0.0f));
  fill(p.w, kN * p.stride());
  const Device device = upload(p);
  run_forward(p, device);
  run_backward(p, device);
  // The documents around three random tokens, and the last one, which the buffer's end cuts.
  for (const int64_t token : {random.below(kN), random.below(kN), random.below(kN), kN - 1}) {
    const int64_t begin = p.doc_start[static_cast<size_t>(token)];
    const auto end = std::upper_bound(p.doc_start.begin(), p.doc_start.end(), static_cast<int32_t>(begin)) - p.doc_start.begin();
    if (end - begin > 1) check_tokens(p, device, begin, end);
  }
}

// These fail before anything is launched.
TEST(DcAttentionCudaErrors, NameTheValueThatIsWrong) {
  auto message = [](int H, int D, int64_t window, int64_t stride) -> std::string {
    try {
      dc_attention_forward(DcAttentionForward<bf16>{.out = nullptr,
                                                    .lse = nullptr,
                                                    .y = nullptr,
                                                    .q = nullptr,
                                                    .k = nullptr,
                                                    .v = nullptr,
                                                    .w1 = nullptr,
                                                    .w2 = nullptr,
                                                    .stride = stride,
                                                    .doc_start = nullptr,
                                                    .N = 10,
                                                    .H = H,
                                                    .D = D,
                                                    .window = window,
                                                    .scale = 0.1},
                           CudaExec{});
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message(6, 96, 111, 41).find("D must be 64 or 128 on CUDA, got 96"), std::string::npos) << message(6, 96, 111, 41);
  EXPECT_NE(message(17, 64, 111, 41).find("H must be between 1 and 16"), std::string::npos) << message(17, 64, 111, 41);
  EXPECT_NE(message(6, 64, 256, 41).find("window must be between 0 and 255"), std::string::npos) << message(6, 64, 256, 41);
  EXPECT_NE(message(6, 64, 111, 5).find("at least H = 6, got 5"), std::string::npos) << message(6, 64, 111, 5);
  EXPECT_NE(message(6, 64, 111, 6).find("aligned to 16 bytes"), std::string::npos) << message(6, 64, 111, 6);
}

}  // namespace
}  // namespace speedrun::kernels
