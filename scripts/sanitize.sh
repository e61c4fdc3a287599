#!/usr/bin/env bash
# Runs the tests under sanitizers: all host tests under AddressSanitizer and UndefinedBehaviorSanitizer, and, where there is a GPU, the
# kernel tests under compute-sanitizer (memcheck, synccheck).
#   scripts/sanitize.sh [host|gpu|all] [GoogleTest filter of the kernel tests]     default: all, every test
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
part=${1:-all}
filter=${2:-*}
[[ $part =~ ^(host|gpu|all)$ ]] || die "unknown argument '$part' (expected host, gpu or all)"

sanitize_host() {
  local build=$ROOT/build_sanitize
  say "host tests with address and undefined-behaviour sanitizers, in $build"
  configure "$build" -DSPEEDRUN_CUDA=OFF -DSPEEDRUN_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSPEEDRUN_SANITIZE=address,undefined
  cmake --build "$build" --parallel "$JOBS"
  ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    ctest --test-dir "$build" --parallel 2 --output-on-failure --no-tests=error
}

sanitize_gpu() {
  local build=$ROOT/build sanitizer nvcc tool tests test
  nvcc=$(find_nvcc) || die "no CUDA compiler (nvcc) found"
  sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
  [[ -x $sanitizer ]] || die "compute-sanitizer not found beside $nvcc"
  configure "$build" -DSPEEDRUN_CUDA=ON -DSPEEDRUN_TESTS=ON
  cmake --build "$build" --parallel "$JOBS"
  mapfile -t tests < <(find "$build" -type f -name '*_cuda_test' -executable | sort)
  ((${#tests[@]} > 0)) || die "no CUDA tests under $build"
  for tool in memcheck synccheck; do
    for test in "${tests[@]}"; do
      say "$tool: $(basename "$test")"
      "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 10 "$test" --gtest_brief=1 --gtest_filter="$filter"
    done
  done
}

if [[ $part != gpu ]]; then sanitize_host; fi
if [[ $part == gpu ]] || { [[ $part == all ]] && has_gpu; }; then
  sanitize_gpu
elif [[ $part == all ]]; then
  say "NO GPU: compute-sanitizer was not run"
fi
