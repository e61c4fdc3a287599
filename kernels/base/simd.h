#pragma once
// Vector code for the CPU references without -march flags: GCC vector extensions, one source compiled for AVX-512, AVX2 and SSE2
// and chosen once by the running CPU. On one CPU the bits never change; between instruction sets they may (width of sums, fused
// multiply-add).
//
//   struct RowSum {
//     template <int W> SPEEDRUN_ALWAYS_INLINE static void run(float* out, const float* row, int64_t n) {...}
//   };
//   simd_dispatch<RowSum>(out, row, n);
//
// Everything run() calls in a hot loop must be SPEEDRUN_ALWAYS_INLINE too: only inlined code is compiled for the wider registers.
#include <cmath>
#include <cstdint>
#include <type_traits>

// Other compilers and processors take the 16-byte form alone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SPEEDRUN_X86_TARGETS 1
// Vectors wider than the base instruction set change the ABI of calls; none is passed through one: all such functions are inlined,
// and take vectors by reference.
#pragma GCC diagnostic ignored "-Wpsabi"
#else
#define SPEEDRUN_X86_TARGETS 0
#endif

#define SPEEDRUN_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace speedrun::kernels {

enum class Isa : int { sse2, avx2, avx512 };

inline Isa detect_isa() {
#if SPEEDRUN_X86_TARGETS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return Isa::avx2;
#endif
  return Isa::sse2;
}

inline Isa current_isa() {
  static const Isa isa = detect_isa();
  return isa;
}

#if SPEEDRUN_X86_TARGETS
template <class Kernel, class... Args>
__attribute__((target("arch=x86-64-v4"), noinline)) void run_avx512(Args... args) {
  Kernel::template run<64>(args...);
}
template <class Kernel, class... Args>
__attribute__((target("arch=x86-64-v3"), noinline)) void run_avx2(Args... args) {
  Kernel::template run<32>(args...);
}
#endif

// Kernel::run<W>(args...) with W = the register size in bytes of an instruction set that this CPU has.
template <class Kernel, class... Args>
void simd_run(Isa isa, Args... args) {
#if SPEEDRUN_X86_TARGETS
  if (isa == Isa::avx512) return run_avx512<Kernel>(args...);
  if (isa == Isa::avx2) return run_avx2<Kernel>(args...);
#endif
  static_cast<void>(isa);
  Kernel::template run<16>(args...);
}

template <class Kernel, class... Args>
void simd_dispatch(Args... args) {
  simd_run<Kernel>(current_isa(), args...);
}

// W bytes of T (float or double) with arithmetic by elements.
template <class T, int W>
struct Simd {
  static constexpr int kLanes = W / static_cast<int>(sizeof(T));
  using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef T Vec __attribute__((vector_size(W)));
  typedef Bits Mask __attribute__((vector_size(W)));  // what comparisons give: 0 or -1 in each lane
  typedef T Unaligned __attribute__((vector_size(W), aligned(alignof(T)), may_alias));

  SPEEDRUN_ALWAYS_INLINE static Vec load(const T* p) { return *reinterpret_cast<const Unaligned*>(p); }
  SPEEDRUN_ALWAYS_INLINE static void store(T* p, const Vec& v) { *reinterpret_cast<Unaligned*>(p) = v; }
  SPEEDRUN_ALWAYS_INLINE static Vec fill(T value) { return Vec{} + value; }

  // The first count lanes; the others are `rest`, so that tails take the same path as whole vectors.
  SPEEDRUN_ALWAYS_INLINE static Vec load_part(const T* p, int64_t count, T rest) {
    T lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : rest;
    return load(lanes);
  }
  SPEEDRUN_ALWAYS_INLINE static void store_part(T* p, const Vec& v, int64_t count) {
    for (int i = 0; i < kLanes; ++i) {
      if (i < count) p[i] = v[i];
    }
  }
  SPEEDRUN_ALWAYS_INLINE static Vec max(const Vec& a, const Vec& b) { return a > b ? a : b; }
  SPEEDRUN_ALWAYS_INLINE static Vec sqrt(const Vec& v) {
    T lanes[kLanes];
    store(lanes, v);
    for (int i = 0; i < kLanes; ++i) lanes[i] = std::sqrt(lanes[i]);
    return load(lanes);
  }
  // Lanes added as a tree: a fixed order.
  SPEEDRUN_ALWAYS_INLINE static T sum(const Vec& v) {
    T lanes[kLanes];
    store(lanes, v);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
  SPEEDRUN_ALWAYS_INLINE static T largest(const Vec& v) {
    T best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
  }
};

// The next lanes of a row with `left` elements to go.
template <class S, class T>
SPEEDRUN_ALWAYS_INLINE typename S::Vec load_lanes(const T* p, int64_t left, T rest = 0) {
  return left >= S::kLanes ? S::load(p) : S::load_part(p, left, rest);
}
template <class S, class T>
SPEEDRUN_ALWAYS_INLINE void store_lanes(T* p, const typename S::Vec& v, int64_t left) {
  if (left >= S::kLanes) {
    S::store(p, v);
  } else {
    S::store_part(p, v, left);
  }
}

}  // namespace speedrun::kernels
