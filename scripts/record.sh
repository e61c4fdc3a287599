#!/usr/bin/env bash
# The Main Track n times on all GPUs of this host, and what it took: time, loss, p-value, speed, milliseconds a step (scripts/README.md).
#   scripts/record.sh [--train PATTERN --val PATTERN] [--runs 3] [--local DIR] [--timeline] [further arguments: --help]
#   scripts/record.sh --cpu          the same path with a tiny model on CPU processes, in half a minute
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

exec python3 -B "$ROOT/scripts/record.py" "$@"
