#!/usr/bin/env bash
# Checks that layers only look down, and that outside libraries stay where they belong. Every violation is printed as file:line.
#   scripts/check_layers.sh [--root DIR]         the sources and CMake files of a tree (default: this one)
#   scripts/check_layers.sh --binary FILE        what a built program is linked against
#
#   cli > runs > train > {model, optim, dist, data, config} > core > kernels
#   cli        everything
#   runs       train, config, core
#   train      model, optim, dist, data, config, core, kernels
#   model      core, kernels, src/config/config.h
#   optim      dist, core, kernels, src/config/config.h
#   dist, data, config    core, kernels
#   core       kernels
# In kernels/ the floors are ops > gemm > fp8 > tile > ptx > base, and no op knows another: what several share is one of the floors below.
# kernels/testing and kernels/bench serve tests and benchmarks alone (*_test, *_bench, *_tune), which may check or measure one op by another.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

tree=$ROOT
case ${1:-} in
  '') ;;
  --root) tree=${2:?--root needs a folder} ;;
  --binary)
    # A program that needs one of these at load time would not start on a machine without a driver or without NCCL.
    [[ -f ${2:?--binary needs a file} ]] || die "$2: no such file"
    linked=$(readelf -d "$2" | grep -E 'NEEDED.*lib(nccl|nvidia-ml|cupti|cuda)\.' || true)
    [[ -z $linked ]] || die "$2 is linked against a library that must be opened at run time: $linked"
    exit 0
    ;;
  *) die "unknown argument '$1' (expected --root DIR or --binary FILE)" ;;
esac
cd "$tree"

# shellcheck disable=SC2016  # awk's $0
check_includes() {
  find src kernels -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z |
    xargs -0 -r awk '
      BEGIN {
        allowed["runs"] = "runs train config core"
        allowed["train"] = "train model optim dist data config core kernels"
        allowed["model"] = "model core kernels"
        allowed["optim"] = "optim dist core kernels"
        allowed["dist"] = "dist core kernels"
        allowed["data"] = "data core kernels"
        allowed["config"] = "config core kernels"
        allowed["core"] = "core kernels"
        kernel_allowed["base"] = "base"
        kernel_allowed["ptx"] = "ptx base"
        kernel_allowed["tile"] = "tile ptx base"
        kernel_allowed["fp8"] = "fp8 tile ptx base"
        kernel_allowed["gemm"] = "gemm fp8 tile ptx base"
        kernel_allowed["testing"] = "testing gemm fp8 tile ptx base"
      }
      function violation(reason) { printf "%s:%d: %s: %s\n", FILENAME, FNR, $0, reason }
      function has(list, word) { return index(" " list " ", " " word " ") > 0 }
      function layer_of(path, parts) { split(path, parts, "/"); return parts[1] == "src" ? (parts[2] ~ /\./ ? "cli" : parts[2]) : parts[1] }

      !/^[ \t]*#[ \t]*include/ { next }
      {
        if (!match($0, /["<][^">]+[">]/)) { violation("include without a file name"); next }
        quoted = substr($0, RSTART, 1) == "\""
        target = substr($0, RSTART + 1, RLENGTH - 2)
        layer = layer_of(FILENAME)
        is_test = FILENAME ~ /_(test|(bench|tune)(_cuda)?)\.(cpp|cu|h|cuh)$/ || FILENAME ~ /^kernels\/bench\//
        split(FILENAME, own, "/")
        split(target, other, "/")
      }

      # Outside libraries.
      target ~ /^nlohmann\// && layer !~ /^(config|train|runs|cli)$/ && FILENAME != "src/data/tokenize_files.cpp" {
        violation("JSON is read and written in src/{config,train,runs,cli} and for JSONL documents in src/data/tokenize_files.cpp alone")
        next
      }
      target ~ /^cxxopts/ && layer != "cli" { violation("cxxopts belongs in src/cli alone"); next }
      target ~ /^fmt\// && layer == "kernels" { violation("kernels/ knows only kernels/ and the CUDA toolkit"); next }
      FILENAME == "src/dist/nccl_library.h" && target == "nccl.h" { next }  # types and names alone: the library is opened at run time
      target ~ /^(nccl|nvml|cupti)[_a-z]*\.h$/ { violation("NCCL, NVML and CUPTI are opened at run time; declare what is used"); next }

      target ~ /^(nlohmann|cxxopts|fmt|gtest|gmock)[\/.]/ { next }
      target == "version.h" && layer == "core" { next }  # generated in the build folder by src/core/version.cmake

      # Our own files: named from the repository root, in quotes.
      !quoted && target ~ /^(src|kernels)\// { violation("our own files are included in quotes"); next }
      !quoted { next }
      target !~ /^(src|kernels)\// || target ~ /(^|\/)\.\.?\// { violation("include from the repository root (\"src/…\" or \"kernels/…\")"); next }

      layer == "kernels" {
        if (other[1] != "kernels") { violation("kernels/ knows nothing of src/"); next }
        if (other[2] == own[2] || is_test) next
        if (other[2] ~ /^(testing|bench)$/) { violation("kernels/" other[2] " is for tests and benchmarks"); next }
        if (!has((own[2] in kernel_allowed) ? kernel_allowed[own[2]] : "gemm fp8 tile ptx base", other[2]))
          violation((own[2] in kernel_allowed) ? "kernels/" own[2] " must not know " other[1] "/" other[2] : "an op includes no other op (shared code moves to a floor below the ops)")
        next
      }

      target ~ /^kernels\/testing\// && !is_test { violation("kernels/testing is for tests and benchmarks"); next }
      layer == "cli" { next }
      !(layer in allowed) { violation("src/" layer " is no layer scripts/check_layers.sh knows"); next }
      target == "src/config/config.h" && layer ~ /^(model|optim)$/ { next }
      !has(allowed[layer], layer_of(target)) { violation("src/" layer " must not know " (other[1] == "kernels" ? "kernels" : "src/" other[2])) }
    '
}

# Link commands of CMake files, comments removed; NCCL, NVML, CUPTI and libcuda must not appear in one.
# shellcheck disable=SC2016
check_cmake() {
  find . -path './build*' -prune -o -path './.git' -prune -o \( -name CMakeLists.txt -o -name '*.cmake' \) -print0 | sort -z |
    xargs -0 -r awk '
      FNR == 1 { command = "" }
      {
        line = $0
        sub(/#.*/, "", line)
        if (match(line, /[A-Za-z_]+[ \t]*\(/)) { command = tolower(substr(line, RSTART, RLENGTH - 1)); gsub(/[ \t]/, "", command) }
        links = command ~ /link|speedrun_(library|test|fuzzer)/
        n = split(line, words, /[ \t()"$<>;]+/)
        for (i = 1; i <= n; ++i) {
          word = tolower(words[i])
          if (word ~ /^cuda::(nvml|cupti|cuda_driver)/ || word ~ /^-l(nccl|nvidia-ml|cupti|cuda)$/ || (links && word ~ /^(nccl(::nccl)?|nvidia-ml|cupti|cuda)$/))
            printf "%s:%d: %s: NCCL, NVML, CUPTI and libcuda are opened at run time, never linked\n", substr(FILENAME, 3), FNR, words[i]
        }
      }
    '
}

# The top level holds what README.md lists and nothing else. In a git checkout ignored files (builds, runs) do not count.
check_top_level() {
  local entry
  if [[ -e .git ]]; then
    git ls-files --cached --others --exclude-standard
  else
    find . -mindepth 1 -maxdepth 1 ! -name 'build*' ! -name runs -printf '%P\n'
  fi | cut -d/ -f1 | sort -u | while read -r entry; do
    case $entry in
      src | kernels | configs | data | scripts | docs | CMakeLists.txt | README.md | LICENSE | .ci | .clang-format | .clang-tidy | .gitignore) ;;
      *) printf '%s:1: not an entry of the top level (see scripts/check_layers.sh)\n' "$entry" ;;
    esac
  done
}

violations=$(check_includes && check_cmake && check_top_level)
if [[ -n $violations ]]; then
  printf '%s\n' "$violations"
  die "$(wc -l <<<"$violations") violations"
fi
say "layers only look down"
