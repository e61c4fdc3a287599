// CUDA attention against the CPU reference. Small cases first: the first test that fails says where to look.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/base/thread_pool.h"
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

constexpr int64_t kPad = 8;  // columns of interleaved qkv rows that belong to nobody

// Where q, k and v of a problem lie: side by side in rows (N, 3·H·D + kPad), or each a plane (N, H·D) of its own.
enum class Layout { rows, planes };

struct Problem {
  int64_t N = 0;
  int H = 1, D = 64;
  int64_t window = 0;
  std::vector<int32_t> doc_start = {};  // (N)
  Layout layout = Layout::rows;
  std::vector<bf16> qkv = {};
  std::vector<bf16> dout = {};  // (N, H·D)

  int64_t channels() const { return int64_t{H} * D; }
  int64_t stride() const { return layout == Layout::planes ? channels() : 3 * channels() + kPad; }
  int64_t offset(int tensor) const { return tensor * (layout == Layout::planes ? N * channels() : channels()); }  // of q, k, v
  int64_t qkv_size() const { return N * (layout == Layout::planes ? 3 * channels() : stride()); }
  double scale() const { return D == 64 ? 0.125 : 0.12; }
  int64_t first_key(int64_t t) const { return std::max<int64_t>(doc_start[static_cast<size_t>(t)], window > 0 ? t - window : 0); }
};

std::ostream& operator<<(std::ostream& out, const Problem& p) {
  const auto documents =
      1 + std::count_if(p.doc_start.begin() + 1, p.doc_start.end(),
                        [last = p.doc_start[0]](int32_t start) mutable { return std::exchange(last, start) != start; });
  return out << (p.layout == Layout::planes ? "planes, " : "") << "N " << p.N << ", H " << p.H << ", D " << p.D << ", window "
             << p.window << ", " << documents << " documents (index of out, dq, dk, dv: (t·H + h)·D + d; of lse: h·N + t)";
}

Problem make_problem(std::vector<int32_t> doc_start, int H, int D, int64_t window, Random& random, double deviation = 1,
                     Layout layout = Layout::rows) {
  Problem p{.N = static_cast<int64_t>(doc_start.size()), .H = H, .D = D, .window = window, .doc_start = std::move(doc_start)};
  p.layout = layout;
  p.qkv = random.normal_vector<bf16>(p.qkv_size(), deviation);
  p.dout = random.normal_vector<bf16>(p.N * p.channels());
  return p;
}

// The rows of tokens begin … end − 1 of a buffer that is laid out as qkv; part(first, count) gives some of its elements.
template <class Part>
std::vector<bf16> qkv_rows(const Problem& p, int64_t begin, int64_t end, const Part& part) {
  std::vector<bf16> result;
  for (int tensor = 0; tensor < (p.layout == Layout::planes ? 3 : 1); ++tensor) {
    const std::vector<bf16> rows = part(p.offset(tensor) + begin * p.stride(), (end - begin) * p.stride());
    result.insert(result.end(), rows.begin(), rows.end());
  }
  return result;
}

// Tokens begin … end − 1, which are whole documents, as a problem of their own.
Problem slice(const Problem& p, int64_t begin, int64_t end) {
  auto rows = [&](const auto& values, int64_t width) {
    return std::decay_t<decltype(values)>(values.begin() + begin * width, values.begin() + end * width);
  };
  Problem part{.N = end - begin, .H = p.H, .D = p.D, .window = p.window, .doc_start = rows(p.doc_start, 1)};
  for (int32_t& start : part.doc_start) start -= static_cast<int32_t>(begin);
  part.layout = p.layout;
  part.qkv = qkv_rows(p, begin, end, [&](int64_t first, int64_t count) {
    return std::vector<bf16>(p.qkv.begin() + first, p.qkv.begin() + first + count);
  });
  part.dout = rows(p.dout, p.channels());
  return part;
}

// (N, H, D): q, k or v (tensor 0, 1, 2) out of a buffer that is laid out as qkv.
template <class T>
std::vector<T> tensor_of(const std::vector<T>& values, const Problem& p, int tensor) {
  std::vector<T> result;
  result.reserve(static_cast<size_t>(p.N * p.channels()));
  for (int64_t t = 0; t < p.N; ++t) {
    const auto row = values.begin() + p.offset(tensor) + t * p.stride();
    result.insert(result.end(), row, row + p.channels());
  }
  return result;
}

template <class T>
struct Forward {
  std::vector<T> out;      // (N, H·D)
  std::vector<float> lse;  // (H, N)
};

Forward<float> reference_forward(const Problem& p, const HostExec& exec) {
  const std::vector<float> qkv = testing::widen<float>(p.qkv);
  Forward<float> result{std::vector<float>(static_cast<size_t>(p.N * p.channels())),
                        std::vector<float>(static_cast<size_t>(p.H * p.N))};
  attention_forward(AttentionForward<float>{.out = result.out.data(),
                                            .lse = result.lse.data(),
                                            .q = qkv.data(),
                                            .k = qkv.data() + p.offset(1),
                                            .v = qkv.data() + p.offset(2),
                                            .doc_start = p.doc_start.data(),
                                            .N = p.N,
                                            .stride = p.stride(),
                                            .H = p.H,
                                            .D = p.D,
                                            .window = p.window,
                                            .scale = p.scale()},
                    exec);
  return result;
}

// dqkv (N, stride) for the given results of the forward pass.
std::vector<float> reference_backward(const Problem& p, const Forward<bf16>& forward, const HostExec& exec) {
  const std::vector<float> qkv = testing::widen<float>(p.qkv), dout = testing::widen<float>(p.dout),
                           out = testing::widen<float>(forward.out);
  std::vector<float> dqkv(qkv.size()), delta(forward.lse.size());
  attention_backward(AttentionBackward<float>{.dq = dqkv.data(),
                                              .dk = dqkv.data() + p.offset(1),
                                              .dv = dqkv.data() + p.offset(2),
                                              .dout = dout.data(),
                                              .out = out.data(),
                                              .lse = forward.lse.data(),
                                              .q = qkv.data(),
                                              .k = qkv.data() + p.offset(1),
                                              .v = qkv.data() + p.offset(2),
                                              .doc_start = p.doc_start.data(),
                                              .delta = delta.data(),
                                              .N = p.N,
                                              .stride = p.stride(),
                                              .H = p.H,
                                              .D = p.D,
                                              .window = p.window,
                                              .scale = p.scale()},
                     exec);
  return dqkv;
}

class AttentionCudaTest : public testing::CudaTest {
 protected:
  // A problem on the device; every buffer that a kernel writes starts poisoned.
  struct Device {
    DeviceBuffer<bf16> qkv, dout, out, dqkv;
    DeviceBuffer<float> lse, delta;
    DeviceBuffer<int32_t> doc_start;
  };

  Device upload(const Problem& p) const {
    return {uploaded("qkv", p.qkv),
            uploaded("dout", p.dout),
            poisoned<bf16>("out", p.N * p.channels()),
            poisoned<bf16>("dqkv", p.qkv_size()),
            poisoned<float>("lse", p.H * p.N),
            poisoned<float>("delta", p.H * p.N),
            uploaded("doc_start", p.doc_start)};
  }

  void run_forward(const Problem& p, const Device& device) const {
    attention_forward(AttentionForward<bf16>{.out = device.out.get(),
                                             .lse = device.lse.get(),
                                             .q = device.qkv.get(),
                                             .k = device.qkv.get() + p.offset(1),
                                             .v = device.qkv.get() + p.offset(2),
                                             .doc_start = device.doc_start.get(),
                                             .N = p.N,
                                             .stride = p.stride(),
                                             .H = p.H,
                                             .D = p.D,
                                             .window = p.window,
                                             .scale = p.scale()},
                      exec());
  }

  void run_backward(const Problem& p, const Device& device) const {
    attention_backward(AttentionBackward<bf16>{.dq = device.dqkv.get(),
                                               .dk = device.dqkv.get() + p.offset(1),
                                               .dv = device.dqkv.get() + p.offset(2),
                                               .dout = device.dout.get(),
                                               .out = device.out.get(),
                                               .lse = device.lse.get(),
                                               .q = device.qkv.get(),
                                               .k = device.qkv.get() + p.offset(1),
                                               .v = device.qkv.get() + p.offset(2),
                                               .doc_start = device.doc_start.get(),
                                               .delta = device.delta.get(),
                                               .N = p.N,
                                               .stride = p.stride(),
                                               .H = p.H,
                                               .D = p.D,
                                               .window = p.window,
                                               .scale = p.scale()},
                       exec());
  }

  // Compares tokens begin … end − 1 (whole documents) of finished runs with the reference. Backward is checked for the out and lse
  // that the device computed, so that an error of the forward pass does not show again.
  void check_tokens(const Problem& whole, const Device& device, int64_t begin, int64_t end) const {
    const Problem p = slice(whole, begin, end);
    SCOPED_TRACE(::testing::Message() << "tokens " << begin << " to " << end << ": " << p);
    Forward<bf16> forward{device.out.download(begin * p.channels(), p.N * p.channels()), {}};
    for (int head = 0; head < p.H; ++head) {
      const std::vector<float> lse = device.lse.download(head * whole.N + begin, p.N);
      forward.lse.insert(forward.lse.end(), lse.begin(), lse.end());
    }
    const std::vector<bf16> dqkv =
        qkv_rows(whole, begin, end, [&](int64_t first, int64_t count) { return device.dqkv.download(first, count); });

    ThreadPool pool(0);
    const HostExec exact{.pool = &pool}, rounded{.pool = &pool, .round_bf16 = true};
    const Forward<float> truth = reference_forward(p, exact), baseline = reference_forward(p, rounded);
    EXPECT_TRUE(within_rule(forward.lse, truth.lse, baseline.lse, Ulp::accumulated)) << "lse";
    EXPECT_TRUE(within_rule(forward.out, truth.out, baseline.out)) << "out";

    const std::vector<float> dqkv_truth = reference_backward(p, forward, exact),
                             dqkv_baseline = reference_backward(p, forward, rounded);
    const char* const names[] = {"dq", "dk", "dv"};
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(within_rule(tensor_of(dqkv, p, i), tensor_of(dqkv_truth, p, i), tensor_of(dqkv_baseline, p, i))) << names[i];
    }
    if (p.layout == Layout::planes) return;
    for (int64_t t = 0; t < p.N; ++t) {
      for (int64_t i = t * p.stride() + 3 * p.channels(); i < (t + 1) * p.stride(); ++i) {
        ASSERT_EQ(dqkv[static_cast<size_t>(i)].bits, 0xffff) << "token " << t << ": written between the rows of dqkv";
      }
    }
  }

  void check(const Problem& p) const {
    const Device device = upload(p);
    run_forward(p, device);
    run_backward(p, device);
    check_tokens(p, device, 0, p.N);
  }
};

// Every visible key has the same weight: values one-hot in their position's residue make each output a count of visible keys.
TEST_F(AttentionCudaTest, ZeroQueriesAverageTheVisibleValues) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    Problem p = make_problem(equal_documents(300, 170), 2, D, 90, random);
    for (int64_t t = 0; t < p.N; ++t) {
      for (int head = 0; head < p.H; ++head) {
        bf16* q = p.qkv.data() + t * p.stride() + head * D;
        for (int d = 0; d < D; ++d) {
          q[d] = bf16(0.0f);
          q[2 * p.channels() + d] = bf16((t + head) % D == d ? 1.0f : 0.0f);
        }
      }
    }
    const Device device = upload(p);
    run_forward(p, device);
    const std::vector<bf16> out = device.out.download();
    const std::vector<float> lse = device.lse.download();
    for (int64_t t = 0; t < p.N; ++t) {
      const int64_t first = p.first_key(t);
      const double count = static_cast<double>(t - first + 1);
      for (int head = 0; head < p.H; ++head) {
        ASSERT_NEAR(lse[static_cast<size_t>(head * p.N + t)], std::log(count), 1e-5)
            << "D " << D << ", token " << t << ", head " << head;
        for (int d = 0; d < D; ++d) {
          double hits = 0;
          for (int64_t key = first; key <= t; ++key) hits += (key + head) % D == d;
          ASSERT_NEAR(static_cast<float>(out[static_cast<size_t>(t * p.channels() + head * D + d)]), hits / count,
                      testing::ulp(hits / count, 7))
              << "D " << D << ", token " << t << " sees keys from " << first << ", head " << head << ", column " << d;
        }
      }
    }
  }
}

// A token that sees itself alone copies its value and passes its gradient on, bit for bit; nothing reaches its query and key but
// the rounding of two sums that are equal in exact arithmetic (D terms of size about 1: below 1e-4).
TEST_F(AttentionCudaTest, DocumentsOfOneToken) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t N : {1, 2, 63, 200}) {
      const Problem p = make_problem(equal_documents(N, 1), 3, D, 0, random);
      SCOPED_TRACE(::testing::Message() << p);
      const Device device = upload(p);
      run_forward(p, device);
      run_backward(p, device);
      const std::vector<bf16> dqkv = device.dqkv.download();
      EXPECT_TRUE(same_bits(device.out.download(), tensor_of(p.qkv, p, 2))) << "out is v";
      EXPECT_TRUE(same_bits(tensor_of(dqkv, p, 2), p.dout)) << "dv is dout";
      for (const int tensor : {0, 1}) {
        for (const bf16 x : tensor_of(dqkv, p, tensor))
          ASSERT_LT(std::abs(static_cast<float>(x)), 1e-4f) << (tensor == 0 ? "dq" : "dk");
      }
    }
  }
}

TEST_F(AttentionCudaTest, OneTile) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t N : {2, 5, 8, 15, 16}) check(make_problem(equal_documents(N, N), 1, D, 0, random));
  }
}

TEST_F(AttentionCudaTest, TileBorders) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t N : {17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000})
      check(make_problem(equal_documents(N, N), 1, D, 0, random));
  }
}

TEST_F(AttentionCudaTest, Heads) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int H : {2, 3, 6, 12}) check(make_problem(equal_documents(200, 200), H, D, 0, random));
  }
}

TEST_F(AttentionCudaTest, Windows) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t window : {1, 15, 31, 32, 63, 64, 65, 127, 128, 399, 400, 100000}) {
      check(make_problem(equal_documents(400, 400), 2, D, window, random));
    }
  }
}

TEST_F(AttentionCudaTest, DocumentBorders) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int64_t length : {3, 31, 32, 63, 64, 65, 127, 128, 129, 200})
      check(make_problem(equal_documents(500, length), 2, D, 0, random));
  }
}

TEST_F(AttentionCudaTest, DocumentsAndWindow) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const double mean : {5.0, 60.0, 300.0}) {
      for (const int64_t window : {0, 1, 50, 200}) check(make_problem(web_documents(777, mean, 600, random), 3, D, window, random));
    }
  }
}

TEST_F(AttentionCudaTest, Planes) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const int H : {1, 3, 6}) {
      for (const double mean : {4.0, 40.0, 400.0}) {
        for (const int64_t window : {0, 128}) {
          check(make_problem(web_documents(700, mean, 600, random), H, D, window, random, 1, Layout::planes));
        }
      }
    }
  }
}

// Documents of the interleaved stream that paired heads make.
std::vector<int32_t> paired(const std::vector<int32_t>& doc_start) {
  std::vector<int32_t> result;
  for (const int32_t start : doc_start) result.insert(result.end(), 2, 2 * start);
  return result;
}

TEST_F(AttentionCudaTest, PairedHeads) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    for (const double mean : {1.5, 15.0, 150.0}) {
      for (const int64_t window : {1, 64, 128})
        check(make_problem(paired(web_documents(511, mean, 500, random)), 3, D, window, random, 1, Layout::planes));
    }
  }
}

// Scores in the hundreds: the running maximum rises again and again, weights are 0 or 1.
TEST_F(AttentionCudaTest, LargeScores) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    Problem p = make_problem(equal_documents(600, 350), 2, D, 0, random, 4);
    check(p);
    // Keys that grow towards the end of a document make every tile raise the maximum.
    for (int64_t t = 0; t < p.N; ++t) {
      for (int64_t i = 0; i < p.channels(); ++i) {
        bf16* q = p.qkv.data() + t * p.stride() + i;
        q[0] = bf16(std::abs(static_cast<float>(q[0])));
        q[p.channels()] = bf16(static_cast<float>(t % 350) / 200.0f);
      }
    }
    check(p);
  }
}

TEST_F(AttentionCudaTest, SameBitsEveryRunAndInAGraph) {
  Random random = testing::test_random();
  for (const int D : {64, 128}) {
    const Problem p = make_problem(web_documents(2000, 300, 900, random), 3, D, 400, random);
    Device device = upload(p);
    run_forward(p, device);
    run_backward(p, device);
    const std::vector<bf16> out = device.out.download(), dqkv = device.dqkv.download();
    const std::vector<float> lse = device.lse.download();
    for (int run = 0; run < 3; ++run) {
      device.out.poison(), device.lse.poison(), device.dqkv.poison(), device.delta.poison();
      run_captured([&] {
        run_forward(p, device);
        run_backward(p, device);
      });
      EXPECT_TRUE(same_bits(device.out.download(), out)) << "out";
      EXPECT_TRUE(same_bits(device.lse.download(), lse)) << "lse";
      EXPECT_TRUE(same_bits(device.dqkv.download(), dqkv)) << "dqkv";
    }
  }
}

// Random numbers for a few thousand tokens, turned by a different offset for each repetition: large buffers in little time.
Problem make_large_problem(std::vector<int32_t> doc_start, int H, int D, int64_t window, Layout layout, Random& random) {
  Problem p{.N = static_cast<int64_t>(doc_start.size()), .H = H, .D = D, .window = window, .doc_start = std::move(doc_start)};
  p.layout = layout;
  const std::vector<bf16> numbers = random.normal_vector<bf16>(1 << 20);
  auto fill = [&](std::vector<bf16>& values, int64_t count) {
    values.resize(static_cast<size_t>(count));
    uint64_t offset = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (i % 65536 == 0) offset = random.bits();
      values[i] = numbers[(i + offset) % numbers.size()];
    }
  };
  fill(p.qkv, p.qkv_size());
  fill(p.dout, p.N * p.channels());
  return p;
}

TEST_F(AttentionCudaTest, Gpt2MicroBatch) {
  Random random = testing::test_random();
  constexpr int64_t kN = 65536, kRow = 1024;
  const Problem p = make_large_problem(equal_documents(kN, kRow), 12, 64, 0, Layout::rows, random);
  const Device device = upload(p);
  run_forward(p, device);
  run_backward(p, device);
  for (const int64_t row : {random.below(kN / kRow), kN / kRow - 1}) check_tokens(p, device, row * kRow, (row + 1) * kRow);
}

// Micro-batches of the Main Track: rows of documents, plain or with paired heads.
TEST_F(AttentionCudaTest, MainTrackMicroBatches) {
  Random random = testing::test_random();
  struct Shape {
    int64_t N, window;
    bool pairs;
    double mean;
  };
  for (const Shape& shape : {Shape{16384, 128, false, 590}, Shape{16384, 128, true, 590}, Shape{49152, 640, false, 590},
                             Shape{49152, 1408, false, 590}, Shape{49152, 640, true, 590}, Shape{49152, 640, true, 12}}) {
    const std::vector<int32_t> documents = web_documents(shape.N, shape.mean, 2048, random);
    const Problem p = make_large_problem(shape.pairs ? paired(documents) : documents, shape.pairs ? 3 : 6, 128, shape.window,
                                         Layout::planes, random);
    const Device device = upload(p);
    run_forward(p, device);
    run_backward(p, device);
    // The documents around three random tokens, and the last one, which the buffer's end cuts.
    for (const int64_t token : {random.below(p.N), random.below(p.N), random.below(p.N), p.N - 1}) {
      const int64_t begin = p.doc_start[static_cast<size_t>(token)];
      const auto end = std::upper_bound(p.doc_start.begin(), p.doc_start.end(), static_cast<int32_t>(begin)) - p.doc_start.begin();
      if (end - begin > 1) check_tokens(p, device, begin, end);
    }
  }
}

// These fail before anything is launched.
TEST(AttentionCudaErrors, NameTheValueThatIsWrong) {
  auto message = [](int D, int64_t stride, double scale) -> std::string {
    try {
      attention_forward(AttentionForward<bf16>{.out = nullptr,
                                               .lse = nullptr,
                                               .q = nullptr,
                                               .k = nullptr,
                                               .v = nullptr,
                                               .doc_start = nullptr,
                                               .N = 10,
                                               .stride = stride,
                                               .H = 2,
                                               .D = D,
                                               .window = 0,
                                               .scale = scale},
                        CudaExec{});
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message(96, 576, 0.1).find("D must be 64 or 128 on CUDA, got 96"), std::string::npos) << message(96, 576, 0.1);
  EXPECT_NE(message(64, 388, 0.1).find("multiple of 8"), std::string::npos) << message(64, 388, 0.1);
  EXPECT_NE(message(64, 384, -1).find("scale must be positive"), std::string::npos) << message(64, 384, -1);
  EXPECT_NE(message(64, 384, 0.1).find("aligned to 16 bytes"), std::string::npos) << message(64, 384, 0.1);
}

}  // namespace
}  // namespace speedrun::kernels
