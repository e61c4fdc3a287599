#!/usr/bin/env bash
# From a fresh machine to a trained model: set up, build `speedrun`, train the bundled sample to its target loss (on the GPU if there is
# one, else on the CPU), and let the model write. Under ten minutes on two cores.
#   scripts/quickstart.sh [further arguments of `speedrun train`]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
build=$ROOT/build
run=quickstart-$(date +%Y%m%d-%H%M%S)

"$ROOT/scripts/setup.sh"

say "building speedrun in $build"
options=()
if ! has_gpu && [[ ! -f $build/CMakeCache.txt ]]; then
  say "no GPU here: leaving the CUDA kernels out (cmake -B build -DSPEEDRUN_CUDA=ON brings them back)"
  options+=(-DSPEEDRUN_CUDA=OFF)
fi
configure "$build" "${options[@]}"
cmake --build "$build" --target speedrun --parallel "$JOBS"

say "training configs/quickstart.json"
"$build/speedrun" train configs/quickstart.json --set run.dir=runs --set "run.name=$run" "$@"

say "what the model writes"
"$build/speedrun" sample --run "runs/$run" --prompt "It was a dark and stormy night, and"

say "files of the run: $ROOT/runs/$run"
for file in config.json metrics.jsonl log.txt result.json checkpoints; do
  if [[ -e runs/$run/$file ]]; then printf '   %s\n' "$ROOT/runs/$run/$file"; fi
done
