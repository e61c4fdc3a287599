#include "kernels/embedding/bigram.h"

#include "kernels/base/error.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N, row_tokens;
  int C, rows, sign_rows;  // sign_rows 0: no signs
  std::vector<int32_t> tokens, index, sign_row;
  std::vector<T> table, sign, dout, signed_dout, out, dtable;

  Problem(int64_t token_rows, int64_t tokens_of_row, int channels, int table_rows, int rows_of_signs, Random& random)
      : N(token_rows * tokens_of_row),
        row_tokens(tokens_of_row),
        C(channels),
        rows(table_rows),
        sign_rows(rows_of_signs),
        tokens(random.index_vector(N, 50'304)),
        index(static_cast<size_t>(N), -1),
        sign_row(static_cast<size_t>(N), -1),
        table(random.normal_vector<T>(int64_t{rows} * C)),
        sign(static_cast<size_t>(int64_t{sign_rows} * C)),
        dout(random.normal_vector<T>(N * C)),
        signed_dout(poisoned<T>(N * C)),
        out(poisoned<T>(N * C)),
        dtable(random.normal_vector<T>(int64_t{rows} * C)) {
    for (T& s : sign) s = random.below(2) == 0 ? T{-1} : T{1};
  }

  void forward(const HostExec& exec) {
    const bool signs = sign_rows > 0;
    bigram_forward(BigramForward<T>{.out = out.data(),
                                    .index = index.data(),
                                    .sign_row = signs ? sign_row.data() : nullptr,
                                    .table = table.data(),
                                    .sign = signs ? sign.data() : nullptr,
                                    .tokens = tokens.data(),
                                    .N = N,
                                    .row_tokens = row_tokens,
                                    .C = C,
                                    .rows = rows,
                                    .sign_rows = sign_rows},
                   exec);
  }
  void backward(const HostExec& exec, bool in_place = false) {
    const bool signs = sign_rows > 0;
    bigram_backward(BigramBackward<T>{.dtable = dtable.data(),
                                      .signed_dout = in_place ? dout.data() : signed_dout.data(),
                                      .dout = dout.data(),
                                      .index = index.data(),
                                      .sign_row = signs ? sign_row.data() : nullptr,
                                      .sign = signs ? sign.data() : nullptr,
                                      .scratch = nullptr,
                                      .N = N,
                                      .row_tokens = row_tokens,
                                      .C = C,
                                      .rows = rows},
                    exec);
  }
};

TEST(Bigram, KnownIndices) {
  // Worked out in exact integers: XOR of the two products, wrapped to [−2³¹, 2³¹), floor-modulo 377,279. The second token of a row
  // is hashed with 377,279 in place of the first. Two rows of five tokens.
  constexpr int kRows = 377'280, kSignRows = 8'192;
  std::vector<int32_t> tokens{50256, 464, 50256, 50303, 0, 1, 0, 0, 50303, 50303}, index(10), sign_row(10);
  const std::vector<float> table(kRows), sign(kSignRows, 1.0f);
  std::vector<float> out(10);
  bigram_forward(BigramForward<float>{out.data(), index.data(), sign_row.data(), table.data(), sign.data(), tokens.data(), 10, 5, 1,
                                      kRows, kSignRows},
                 HostExec{});
  EXPECT_EQ(index, (std::vector<int32_t>{377279, 86771, 324067, 107209, 152498, 377279, 330959, 0, 245200, 143640}));
  EXPECT_EQ(sign_row, (std::vector<int32_t>{0, 1408, 1408, 47, 1151, 0, 1, 0, 1151, 0}));
}

TEST(Bigram, EqualsTheFormula) {
  Random random = test_random();
  for (const int sign_rows : {0, 1, 64, 100}) {
    for (const int rows : {2, 64, 5'001}) {
      Problem<double> p(4, 33, 5, rows, sign_rows, random);
      p.forward(HostExec{});
      for (int64_t t = 0; t < p.N; ++t) {
        const int64_t position = t % p.row_tokens, m = rows - 1;
        int64_t expected = m, expected_sign = 0;
        if (position > 0) {
          const int64_t before = position == 1 ? m : p.tokens[t - 1];
          // Products below 2³¹·2³² are exact in 64 bits; the low 32 bits of their XOR, as a signed number.
          int64_t wrapped = (36'313 * int64_t{p.tokens[t]} ^ 27'191 * before) & 0xffffffff;
          if (wrapped >= int64_t{1} << 31) wrapped -= int64_t{1} << 32;
          expected = (wrapped % m + m) % m;
          expected_sign = sign_rows > 0 ? (p.tokens[t - 1] ^ p.tokens[t]) % sign_rows : 0;
        }
        ASSERT_EQ(p.index[t], expected) << "token " << t;
        ASSERT_EQ(p.sign_row[t], sign_rows > 0 ? expected_sign : -1) << "token " << t;
        for (int c = 0; c < p.C; ++c) {
          EXPECT_EQ(p.out[t * p.C + c], p.table[expected * p.C + c] * (sign_rows > 0 ? p.sign[expected_sign * p.C + c] : 1));
        }
      }
    }
  }
}

TEST(Bigram, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const int sign_rows : {0, 7}) {
    for (const bool in_place : {false, true}) {
      Problem<double> p(3, 20, 40, 9, sign_rows, random);  // 60 tokens of 9 rows: repeats are certain
      const std::vector<double> dtable = p.dtable, dout = p.dout;
      p.forward(HostExec{});
      p.backward(HostExec{}, in_place);
      const std::vector<double> gradient = added(p.dtable, dtable);
      const GradientCheck check{.objective = [&] {
        p.forward(HostExec{});
        return dot(p.out, dout);
      }};
      check_gradients(check, {{"table", &p.table, &gradient}}, random);
    }
  }
}

TEST(Bigram, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(5, 50, 100, 20, 16, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.signed_dout, p.dtable};
  });
}

TEST(Bigram, RoundsWhatItPicks) {
  Random random = test_random();
  Problem<float> exact(2, 40, 24, 50, 16, random), rounded = exact;
  exact.forward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  for (size_t i = 0; i < exact.out.size(); ++i) EXPECT_EQ(rounded.out[i], static_cast<float>(bf16(exact.out[i])));
}

TEST(Bigram, RefusesTablesItCannotHashInto) {
  Random random = test_random();
  Problem<float> p(2, 4, 8, 2, 3, random);
  p.rows = 1;
  EXPECT_THROW(p.forward(HostExec{}), Error);
}

}  // namespace
}  // namespace speedrun::kernels
