#include "kernels/base/dtype.h"

#include "kernels/base/error.h"

namespace speedrun {

size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::bf16:
    case DType::u16:
    case DType::i16:
      return 2;
    case DType::u8:
      return 1;
  }
  throw Error("dtype_size: unknown dtype");
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::u16:
      return "u16";
    case DType::u8:
      return "u8";
    case DType::i64:
      return "i64";
    case DType::i16:
      return "i16";
  }
  throw Error("dtype_name: unknown dtype");
}

}  // namespace speedrun
