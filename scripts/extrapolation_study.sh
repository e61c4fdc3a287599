#!/usr/bin/env bash
# Whether weight extrapolation helps: paired seeds, tuned arms, t-tests; Markdown tables at the end (scripts/README.md).
#   scripts/extrapolation_study.sh --train PATTERN --val PATTERN [--track main] [--jobs 3] [further arguments: --help]
#   scripts/extrapolation_study.sh --tiny --device cpu
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

for argument in "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then exec python3 -B "$ROOT/scripts/extrapolation_study.py" --help; fi
done
if [[ " $* " != *" --device"[\ =]"cpu "* ]] && ! has_gpu; then die "no GPU here; --tiny --device cpu tries everything on the CPU"; fi
exec python3 -B "$ROOT/scripts/extrapolation_study.py" "$@"
