// CUDA bigram embedding against the reference: indices and products are exact, gradients are sums of many rows.
#include "kernels/embedding/bigram.h"

#include "kernels/embedding/embedding.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

struct Case {
  int64_t token_rows, row_tokens;
  int C, rows, sign_rows;  // sign_rows 0: no signs
  bool in_place = false;   // signed_dout is dout
  int64_t N() const { return token_rows * row_tokens; }
};

struct Inputs {
  std::vector<int32_t> tokens;
  std::vector<bf16> table, sign, dout;
  std::vector<float> dtable;  // before the call
};

template <class T>
struct Results {
  std::vector<T> out;
  std::vector<int32_t> index, sign_row;
  std::vector<Acc<T>> dtable;
};

// Pairs of tokens that text repeats, so that rows of the table collect several gradients.
std::vector<int32_t> repeating_tokens(testing::Random& random, int64_t N) {
  std::vector<int32_t> tokens(static_cast<size_t>(N));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(2) == 0 ? random.below(12) : random.below(50'304));
  return tokens;
}

template <class T>
Results<T> reference(const Case& c, const Inputs& in, const HostExec& exec) {
  const std::vector<T> table = widen<T>(in.table), sign = widen<T>(in.sign), dout = widen<T>(in.dout);
  std::vector<T> signed_dout(dout.size());
  const size_t N = static_cast<size_t>(c.N());
  Results<T> r{.out = std::vector<T>(dout.size()),
               .index = std::vector<int32_t>(N),
               .sign_row = std::vector<int32_t>(N),
               .dtable = {in.dtable.begin(), in.dtable.end()}};
  const T* signs = c.sign_rows > 0 ? sign.data() : nullptr;
  bigram_forward(BigramForward<T>{.out = r.out.data(),
                                  .index = r.index.data(),
                                  .sign_row = r.sign_row.data(),
                                  .table = table.data(),
                                  .sign = signs,
                                  .tokens = in.tokens.data(),
                                  .N = c.N(),
                                  .row_tokens = c.row_tokens,
                                  .C = c.C,
                                  .rows = c.rows,
                                  .sign_rows = c.sign_rows},
                 exec);
  bigram_backward(BigramBackward<T>{.dtable = r.dtable.data(),
                                    .signed_dout = signed_dout.data(),
                                    .dout = dout.data(),
                                    .index = r.index.data(),
                                    .sign_row = r.sign_row.data(),
                                    .sign = signs,
                                    .scratch = nullptr,
                                    .N = c.N(),
                                    .row_tokens = c.row_tokens,
                                    .C = c.C,
                                    .rows = c.rows},
                  exec);
  return r;
}

class BigramCudaTest : public CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Inputs& in, Launch launch) {
    auto tokens = uploaded("tokens", in.tokens);
    auto table = uploaded("table", in.table), sign = uploaded("sign", in.sign), dout = uploaded("dout", in.dout);
    auto dtable = uploaded("dtable", in.dtable);
    auto out = poisoned<bf16>("out", dout.size()), signed_dout = poisoned<bf16>("signed_dout", dout.size());
    auto index = poisoned<int32_t>("index", c.N()), sign_row = poisoned<int32_t>("sign_row", c.N());
    auto scratch = poisoned<uint8_t>("scratch", static_cast<int64_t>(embedding_backward_scratch(c.N(), c.C, c.rows)));
    const bool signs = c.sign_rows > 0;
    run(launch, [&] {
      bigram_forward(BigramForward<bf16>{.out = out.get(),
                                         .index = index.get(),
                                         .sign_row = signs ? sign_row.get() : nullptr,
                                         .table = table.get(),
                                         .sign = signs ? sign.get() : nullptr,
                                         .tokens = tokens.get(),
                                         .N = c.N(),
                                         .row_tokens = c.row_tokens,
                                         .C = c.C,
                                         .rows = c.rows,
                                         .sign_rows = c.sign_rows},
                     exec());
      bigram_backward(BigramBackward<bf16>{.dtable = dtable.get(),
                                           .signed_dout = c.in_place ? dout.get() : signed_dout.get(),
                                           .dout = dout.get(),
                                           .index = index.get(),
                                           .sign_row = signs ? sign_row.get() : nullptr,
                                           .sign = signs ? sign.get() : nullptr,
                                           .scratch = scratch.get(),
                                           .N = c.N(),
                                           .row_tokens = c.row_tokens,
                                           .C = c.C,
                                           .rows = c.rows},
                      exec());
    });
    return {.out = out.download(), .index = index.download(), .sign_row = sign_row.download(), .dtable = dtable.download()};
  }

  void check(const Case& c) {
    SCOPED_TRACE(std::to_string(c.token_rows) + " rows of " + std::to_string(c.row_tokens) + ", C=" + std::to_string(c.C) +
                 " rows=" + std::to_string(c.rows) + " sign_rows=" + std::to_string(c.sign_rows));
    testing::Random random = testing::test_random();
    Inputs in{.tokens = repeating_tokens(random, c.N()),
              .table = random.uniform_vector<bf16>(int64_t{c.rows} * c.C),
              .sign = std::vector<bf16>(static_cast<size_t>(int64_t{c.sign_rows} * c.C)),
              .dout = random.uniform_vector<bf16>(c.N() * c.C),
              .dtable = random.uniform_vector<float>(int64_t{c.rows} * c.C)};
    for (bf16& s : in.sign) s = bf16(random.below(2) == 0 ? -1.0f : 1.0f);
    const Results<bf16> got = device(c, in, Launch::direct), again = device(c, in, Launch::captured);
    const Results<double> truth = reference<double>(c, in, truth_exec());
    const Results<float> baseline = reference<float>(c, in, baseline_exec());
    EXPECT_TRUE(same_bits(got.index, baseline.index)) << "index";
    if (c.sign_rows > 0) {
      EXPECT_TRUE(same_bits(got.sign_row, baseline.sign_row)) << "sign_row";
    }
    EXPECT_TRUE(same_bits(widen<float>(got.out), baseline.out)) << "out";
    EXPECT_TRUE(within_rule(got.dtable, truth.dtable, baseline.dtable, Ulp::accumulated)) << "dtable";
    EXPECT_TRUE(same_bits(got.dtable, again.dtable)) << "dtable, second run";
  }
};

TEST_F(BigramCudaTest, KnownIndex) {
  // A row that starts 50256, 464 has index 86,771 at its second token in a table of 377,280 rows.
  const int rows = 377'280;
  auto tokens = uploaded("tokens", std::vector<int32_t>{50256, 464});
  auto table = poisoned<bf16>("table", int64_t{rows} * 8), out = poisoned<bf16>("out", 16);
  auto index = poisoned<int32_t>("index", 2);
  table.zero();
  bigram_forward(BigramForward<bf16>{.out = out.get(),
                                     .index = index.get(),
                                     .sign_row = nullptr,
                                     .table = table.get(),
                                     .sign = nullptr,
                                     .tokens = tokens.get(),
                                     .N = 2,
                                     .row_tokens = 2,
                                     .C = 8,
                                     .rows = rows,
                                     .sign_rows = 0},
                 exec());
  EXPECT_EQ(index.download(), (std::vector<int32_t>{377'279, 86'771}));
}

TEST_F(BigramCudaTest, ShapesOfRowsAndTables) {
  for (const int sign_rows : {0, 1, 100, 8'192}) {
    for (const int rows : {2, 97, 3'000}) {
      for (const int C : {8, 264, 768}) {
        check({.token_rows = 3, .row_tokens = 71, .C = C, .rows = rows, .sign_rows = sign_rows});
      }
    }
  }
  for (const int64_t row_tokens : {1, 2, 3}) {
    check({.token_rows = 33, .row_tokens = row_tokens, .C = 64, .rows = 50, .sign_rows = 16, .in_place = true});
  }
}

TEST_F(BigramCudaTest, ProductionShapes) {
  check({.token_rows = 1, .row_tokens = 16'381, .C = 768, .rows = 37'728, .sign_rows = 8'192, .in_place = true});
  check({.token_rows = 1, .row_tokens = 98'304, .C = 16, .rows = 377'280, .sign_rows = 8'192});
}

TEST_F(BigramCudaTest, RefusesShapesItCannotDo) {
  auto memory = poisoned<bf16>("memory", 1 << 12);
  auto tokens = uploaded("tokens", std::vector<int32_t>(4, 1));
  auto index = poisoned<int32_t>("index", 4);
  const BigramForward<bf16> good{.out = memory.get(),
                                 .index = index.get(),
                                 .sign_row = nullptr,
                                 .table = memory.get() + 2'048,
                                 .sign = nullptr,
                                 .tokens = tokens.get(),
                                 .N = 4,
                                 .row_tokens = 2,
                                 .C = 8,
                                 .rows = 5,
                                 .sign_rows = 0};
  BigramForward<bf16> args = good;
  args.C = 12;
  EXPECT_THROW(bigram_forward(args, exec()), Error);
  args = good;
  args.rows = 1;
  EXPECT_THROW(bigram_forward(args, exec()), Error);
  args = good;
  args.sign = memory.get();
  EXPECT_THROW(bigram_forward(args, exec()), Error);
  args = good;
  args.row_tokens = 3;
  EXPECT_THROW(bigram_forward(args, exec()), Error);
}

}  // namespace
}  // namespace speedrun::kernels
