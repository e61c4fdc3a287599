#!/usr/bin/env bash
# Checks check_layers.sh itself: a clean tree passes, and every kind of violation is caught and named with file and line.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
num_cases=0

reset_tree() {
  rm -rf "$tree"
  mkdir -p "$tree"/{src/{cli,train,model,optim,data,config,core},kernels/{base,testing,norm,gemm}}
  echo 'add_subdirectory(src)' >"$tree/CMakeLists.txt"
  printf '#pragma once\n#include <vector>\n#include "kernels/base/error.h"\n' >"$tree/src/core/file.h"
  printf '#include "kernels/norm/norm.h"\n#include "kernels/gemm/gemm.h"\n#include "kernels/testing/compare.h"\n' >"$tree/kernels/norm/norm_test.cpp"
  printf '#include <nlohmann/json.hpp>\n#include "src/core/file.h"\n' >"$tree/src/config/config_io.cpp"
  printf '#include "kernels/bench/bench.h"\n#include "kernels/head/head.h"\n' >"$tree/kernels/norm/norm_bench_cuda.cpp"
  printf '#include "src/config/config.h"\n#include "src/core/file.h"\n' >"$tree/src/model/gpt.cpp"
  printf '#include <cxxopts.hpp>\n#include "src/train/trainer.h"\n' >"$tree/src/cli/main.cpp"
}

# expect FILE:LINE CONTENT: with a second line CONTENT in FILE, exactly that place is reported.
expect() {
  local place=$1 content=$2 output
  reset_tree
  mkdir -p "$(dirname "$tree/${place%:*}")"
  printf '// first line\n%s\n' "$content" >"$tree/${place%:*}"
  if output=$("$ROOT/scripts/check_layers.sh" --root "$tree" 2>/dev/null); then die "not caught: $place: $content"; fi
  [[ $output == "$place: "* && $(wc -l <<<"$output") == 1 ]] || die "expected one violation at $place, got: $output"
  num_cases=$((num_cases + 1))
}

reset_tree
"$ROOT/scripts/check_layers.sh" --root "$tree" >/dev/null || die "a clean tree was refused"

expect src/core/up.h:2 '#include "src/model/gpt.h"'
expect src/core/up.cpp:2 '  #  include "src/config/config.h"'
expect src/model/side.cpp:2 '#include "src/optim/muon.h"'
expect src/model/side.cpp:2 '#include "src/config/config_io.h"'
expect src/optim/side.cpp:2 '#include "src/model/gpt.h"'
expect src/data/side.cpp:2 '#include "src/config/config.h"'
expect src/config/side.cpp:2 '#include "src/data/reader.h"'
expect src/train/up.cpp:2 '#include "src/cli/main.h"'
expect src/new_layer/a.cpp:2 '#include "src/core/file.h"'
expect src/core/json.cpp:2 '#include <nlohmann/json.hpp>'
expect src/train/options.cpp:2 '#include <cxxopts.hpp>'
expect src/core/nccl.cpp:2 '#include <nccl.h>'
expect src/core/relative.cpp:2 '#include "file.h"'
expect src/core/relative.cpp:2 '#include "src/core/../cli/main.h"'
expect src/core/angle.cpp:2 '#include <src/cli/main.h>'
expect src/core/testing.cpp:2 '#include "kernels/testing/compare.h"'
expect kernels/norm/up.cpp:2 '#include "src/core/file.h"'
expect kernels/norm/fmt.cpp:2 '#include <fmt/format.h>'
expect kernels/norm/other_op.cu:2 '#include "kernels/head/head_loss.h"'
expect kernels/norm/testing.cuh:2 '#include "kernels/testing/compare.h"'
expect kernels/norm/bench.cu:2 '#include "kernels/bench/bench.h"'
expect kernels/gemm/op.cpp:2 '#include "kernels/norm/norm.h"'
expect kernels/base/op.h:2 '#include "kernels/norm/norm.h"'
expect src/core/CMakeLists.txt:2 'target_link_libraries(speedrun_core PUBLIC nccl)'
expect src/core/CMakeLists.txt:2 'speedrun_library(core SOURCES a.cpp DEPS CUDA::nvml)'
expect src/core/CMakeLists.txt:2 'target_link_options(speedrun PRIVATE -lcuda)'

reset_tree
mkdir "$tree/helpers"
[[ $("$ROOT/scripts/check_layers.sh" --root "$tree" 2>/dev/null || true) == helpers:1:* ]] || die "an unknown top-level folder was not caught"
say "check_layers.sh catches all $((num_cases + 1)) violations tried"
