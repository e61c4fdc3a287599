#pragma once
// Number types shared by host and device code. bf16 here is storage and conversion; device kernels reinterpret it as __nv_bfloat16.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define SPEEDRUN_HD __host__ __device__
#else
#define SPEEDRUN_HD
#endif

namespace speedrun {

// bfloat16: the upper half of an IEEE float. Conversion from float rounds to nearest even and keeps NaN a (quiet) NaN.
struct alignas(2) bf16 {
  uint16_t bits = 0;

  bf16() = default;
  SPEEDRUN_HD explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) | 0x0040u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  SPEEDRUN_HD explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, i32 = 3, u16 = 4, u8 = 5, i64 = 6, i16 = 7 };

size_t dtype_size(DType dtype);       // bytes of one element
const char* dtype_name(DType dtype);  // "f32", "bf16", ...

// The activation type T fixes the device: bf16 = CUDA, float = CPU, double = CPU in finite-difference tests.
// Acc<T> is the type of statistics, losses and parameter gradients that go with it.
template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct DTypeOf<int16_t> {
  static constexpr DType value = DType::i16;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::u8;
};

}  // namespace speedrun
