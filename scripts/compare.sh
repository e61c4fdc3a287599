#!/usr/bin/env bash
# Does a changed key help? Paired seeds, differences with intervals and t-tests, clocks (scripts/README.md).
#   scripts/compare.sh CONFIG --arm 'KEY=VALUE …' [--arm …] [--seeds 8] [--set KEY=VALUE …] [further arguments: --help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

exec python3 -B "$ROOT/scripts/compare.py" "$@"
