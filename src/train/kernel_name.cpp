#include "src/train/kernel_name.h"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <memory>

namespace speedrun {
namespace {

constexpr size_t kMaxArgument = 40, kMaxName = 64;  // characters
constexpr std::string_view kEllipsis = "…";

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 && text ? std::string(text.get()) : symbol;
}

// Position of the first of `wanted` outside all brackets, or npos.
size_t find_outside(std::string_view text, char wanted, size_t from = 0) {
  int depth = 0;
  for (size_t i = from; i < text.size(); ++i) {
    if (depth == 0 && text[i] == wanted) return i;
    if (text[i] == '<' || text[i] == '(') ++depth;
    if (text[i] == '>' || text[i] == ')') --depth;
  }
  return std::string_view::npos;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// What follows the last "::" outside brackets.
std::string_view without_namespaces(std::string_view text) {
  size_t begin = 0;
  for (size_t at = find_outside(text, ':'); at != std::string_view::npos; at = find_outside(text, ':', at + 1)) begin = at + 1;
  return text.substr(begin);
}

std::string shortened(std::string_view text, size_t limit) {
  if (text.size() <= limit) return std::string(text);
  return std::string(text.substr(0, limit)) + std::string(kEllipsis);
}

std::string short_type(std::string_view type);

// "a<b::c<int>, (int)4>" → "a<c<int>, 4>"; a list that gets longer than the limit → "a<…>".
std::string with_short_arguments(std::string_view name, size_t limit) {
  const size_t open = find_outside(name, '<');
  if (open == std::string_view::npos || name.back() != '>') return shortened(name, limit);
  std::string result(name.substr(0, open));
  const std::string_view list = name.substr(open + 1, name.size() - open - 2);
  std::string arguments;
  for (size_t begin = 0; begin <= list.size();) {
    size_t comma = find_outside(list, ',', begin);
    if (comma == std::string_view::npos) comma = list.size();
    if (begin > 0) arguments += ", ";
    arguments += short_type(trimmed(list.substr(begin, comma - begin)));
    begin = comma + 1;
  }
  if (result.size() + arguments.size() + 2 <= limit) return result + "<" + arguments + ">";
  const size_t room = limit > result.size() + 2 ? limit - result.size() - 2 : 0;
  // Cut between arguments, so that no name ends in the middle.
  size_t cut = 0;
  for (size_t comma = find_outside(arguments, ','); comma != std::string::npos && comma <= room;
       comma = find_outside(arguments, ',', comma + 1))
    cut = comma;
  return shortened(result, limit) + "<" + (cut > 0 ? arguments.substr(0, cut) + ", " : "") + std::string(kEllipsis) + ">";
}

// A template argument: a type, or a literal such as "(bool)1", "(a::Color)2".
std::string short_type(std::string_view type) {
  if (type.starts_with('(')) {
    const size_t close = find_outside(type.substr(1), ')');
    if (close != std::string_view::npos) {
      const std::string_view cast = type.substr(1, close), value = type.substr(close + 2);
      if (cast == "bool") return value == "0" ? "false" : "true";
      return shortened(value, kMaxArgument);
    }
  }
  // "a::b const*": the qualifiers stay.
  const size_t space = find_outside(type, ' ');
  const std::string_view qualifiers = space != std::string_view::npos ? type.substr(space) : std::string_view();
  return with_short_arguments(without_namespaces(type.substr(0, space)), kMaxArgument) + std::string(qualifiers);
}

// nvcc names the unnamed namespace of a source file after it: "_GLOBAL__N__88a256ad_7_norm_cu_37ffedca" → "norm". The number before
// the file is the length of "norm_cu".
std::string source_file(std::string_view symbol) {
  constexpr std::string_view kMark = "_GLOBAL__N__";
  size_t at = symbol.find(kMark);
  if (at == std::string_view::npos) return {};
  at += kMark.size();
  while (at < symbol.size() && std::isxdigit(static_cast<unsigned char>(symbol[at]))) ++at;
  if (at >= symbol.size() || symbol[at] != '_') return {};
  size_t length = 0;
  for (++at; at < symbol.size() && std::isdigit(static_cast<unsigned char>(symbol[at])); ++at)
    length = length * 10 + static_cast<size_t>(symbol[at] - '0');
  if (at >= symbol.size() || symbol[at] != '_' || length < 4 || at + 1 + length > symbol.size()) return {};
  const std::string_view file = symbol.substr(at + 1, length);
  return file.ends_with("_cu") ? std::string(file.substr(0, length - 3)) : std::string();
}

// "void cub::detail::f<…>(…)" → "cub".
std::string outer_namespace(std::string_view full) {
  const size_t parameters = find_outside(full, '(');
  full = full.substr(0, parameters);
  size_t begin = 0;
  for (size_t at = find_outside(full, ' '); at != std::string_view::npos; at = find_outside(full, ' ', at + 1)) begin = at + 1;
  full = full.substr(begin);
  const size_t colon = find_outside(full, ':');
  return colon == std::string_view::npos ? std::string() : std::string(full.substr(0, colon));
}

bool is_matrix_product(std::string_view function, std::string_view full) {
  if (function.starts_with("relu2_up")) return true;  // the product whose epilogue is relu²
  // cuBLASLt's: nvjet_…, cutlass_…, sm90_xmma_gemm_…, and what adds up the parts of a product split along its inner size.
  constexpr std::array<std::string_view, 6> kLibrary = {"nvjet", "cutlass", "xmma", "gemm", "splitK", "cublasLt"};
  for (const std::string_view word : kLibrary) {
    if (full.find(word) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

std::string short_function_name(std::string_view full) {
  // The unnamed namespace's name has a space and brackets of its own.
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";
  std::string plain;
  for (size_t at = 0; at < full.size();) {
    const size_t found = std::min(full.find(kUnnamed, at), full.size());
    plain += full.substr(at, found - at);
    at = found + kUnnamed.size();
  }
  std::string_view name = plain;
  name = name.substr(0, find_outside(name, '('));
  while (true) {  // return type
    const size_t space = find_outside(name, ' ');
    if (space == std::string_view::npos || space + 1 >= name.size()) break;
    name.remove_prefix(space + 1);
  }
  return with_short_arguments(trimmed(without_namespaces(name)), kMaxName);
}

KernelName kernel_name(const std::string& symbol) {
  if (symbol.find(' ') != std::string::npos) return {.text = symbol, .kind = symbol};  // plain words: a copy
  const std::string full = demangled(symbol), file = source_file(symbol);
  KernelName result;
  result.text = short_function_name(full);
  const std::string function = result.text.substr(0, result.text.find('<'));
  result.communication = function.starts_with("nccl");
  if (result.communication) {
    result.kind = "NCCL";
  } else if (file.empty() && is_matrix_product(function, full)) {
    result.kind = "matrix products";
  } else if (!file.empty()) {
    result.kind = file.starts_with("attention") ? "attention" : file.starts_with("dc_attention") ? "DC attention" : file;
    // Several files have a forward_kernel.
    if (!function.starts_with(file.substr(0, file.find('_')))) result.text = file + ": " + result.text;
  } else {
    const std::string library = outer_namespace(full);
    result.kind = library.empty() || library == "speedrun" ? function : library;
  }
  return result;
}

}  // namespace speedrun
