#!/usr/bin/env bash
# clang-tidy over the host files (.clang-tidy says which checks); any finding fails. CUDA files are left out: clang 14 cannot read CUDA 13.
#   scripts/tidy.sh [pattern]    only files whose path matches the pattern (extended regular expression)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
command -v clang-tidy >/dev/null 2>&1 || die "needs clang-tidy (scripts/setup.sh --dev installs it)"
build=$ROOT/build_tidy

configure "$build" -DSPEEDRUN_CUDA=OFF -DCMAKE_CXX_COMPILER_LAUNCHER= >/dev/null
cmake --build "$build" --target speedrun_version >/dev/null  # the one generated header
sed -n 's/^ *"file": "\(.*\.cpp\)",\{0,1\}$/\1/p' "$build/compile_commands.json" | sort -u |
  { grep -E "${1:-.}" || die "no host file matches '${1:-.}'"; } |
  xargs -d '\n' -n 4 -P "$JOBS" clang-tidy -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option
say "clang-tidy: clean"
