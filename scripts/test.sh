#!/usr/bin/env bash
# Sets up, builds everything, checks format and layers, and runs all tests. The last lines printed are ctest's own summary.
#   scripts/test.sh [further arguments of ctest]
# BUILD_DIR (default: build) and JOBS (default: number of cores) may be set in the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
build=${BUILD_DIR:-$ROOT/build}

"$ROOT/scripts/setup.sh"
"$ROOT/scripts/check_layers.sh"
"$ROOT/scripts/check_layers_test.sh"
if "$ROOT/scripts/check_format.sh" --available; then
  "$ROOT/scripts/check_format.sh"
else
  say "format NOT checked: no clang-format of version 14 or newer (scripts/setup.sh --dev installs one)"
fi

say "building everything in $build"
configure "$build" -DSPEEDRUN_CUDA=ON -DSPEEDRUN_TESTS=ON
cmake --build "$build" --parallel "$JOBS"
"$ROOT/scripts/check_layers.sh" --binary "$build/speedrun"

if ! has_gpu; then
  cat <<'EOF'
********************************************************************************
*  NO GPU: every test that needs one is SKIPPED. The CUDA kernels are not       *
*  tested by this run. Run scripts/test.sh on a machine with a GPU for that.    *
********************************************************************************
EOF
fi

ctest --test-dir "$build" --parallel 2 --output-on-failure --no-tests=error "$@"
