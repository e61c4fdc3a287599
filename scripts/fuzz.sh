#!/usr/bin/env bash
# Builds the libFuzzer targets with clang (address and undefined-behaviour sanitizers, CUDA off) and runs each for some seconds.
#   scripts/fuzz.sh [seconds per target] [pattern of target names]     default: 60 seconds, every target
# Inputs that found new code are kept in build_fuzz/corpus/<target>; one that crashes is written to build_fuzz/crashes/<target>/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
seconds=${1:-60}
pattern=${2:-.}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "'$seconds' is not a number of seconds"
command -v clang++ >/dev/null 2>&1 || die "needs clang++ (scripts/setup.sh --dev installs it)"
build=$ROOT/build_fuzz

# Warnings are g++'s business, clang has others (-w). fuzzer-no-link instruments the libraries as well: without it the fuzzer sees no
# coverage but its own entry function's.
configure "$build" -DCMAKE_CXX_COMPILER=clang++ -DSPEEDRUN_CUDA=OFF -DSPEEDRUN_TESTS=OFF -DSPEEDRUN_FUZZERS=ON \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS=-w -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" \
  -DSPEEDRUN_SANITIZE=address,undefined,fuzzer-no-link
mapfile -t targets < <(cmake --build "$build" --target help | grep -oE '^[A-Za-z0-9_]+_fuzz\b' | sort -u | grep -E "$pattern" || true)
((${#targets[@]} > 0)) || die "no fuzz target matches '$pattern'"
cmake --build "$build" --parallel "$JOBS" --target "${targets[@]}"

for target in "${targets[@]}"; do
  say "$target for $seconds s"
  mkdir -p "$build/corpus/$target" "$build/crashes/$target"
  program=$(find "$build" -type f -name "$target" -executable | head -n 1)
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "$program" "$build/corpus/$target" -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=2048 -print_final_stats=1 -print_funcs=0 -verbosity=0 -artifact_prefix="$build/crashes/$target/"
done
say "no crash in ${#targets[@]} targets"
