#!/usr/bin/env bash
# FP8 against BF16 in training: the Main Track's model, 300 steps of 32,768 tokens, the same seeds in both; then every scale forced to 1,
# which must be visibly worse (so the check can fail). Prints the mean loss of the last 30 steps of each run and a verdict.
#   scripts/fp8_check.sh --train PATTERN --val PATTERN [--seeds "1 2 3"] [--steps 300] [--runs DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

train='' val='' seeds='1 2 3' steps=300 runs=runs/fp8_check
while (($#)); do
  case $1 in
    --train) train=${2:?--train needs a pattern} ;;
    --val) val=${2:?--val needs a pattern} ;;
    --seeds) seeds=${2:?--seeds needs numbers} ;;
    --steps) steps=${2:?--steps needs a number} ;;
    --runs) runs=${2:?--runs needs a folder} ;;
    *) die "unknown argument '$1' (expected --train, --val, --seeds, --steps or --runs)" ;;
  esac
  shift 2
done
[[ -n $train && -n $val ]] || die "--train and --val: patterns of token shards are needed"
binary=${SPEEDRUN:-$ROOT/build/speedrun}
[[ -x $binary ]] || die "$binary: not built; run scripts/test.sh or set SPEEDRUN"

# One stage throughout; head and embedding stay one matrix.
common=(--set "data.train=$train" --set "data.val=$val" --set "run.dir=$runs" --set data.repeat=3
  --set "schedule.stages.0.steps=$steps" --set schedule.stages.0.batch_tokens=32768
  --set schedule.stages.1.steps=0 --set schedule.stages.2.steps=0 --set schedule.stages.3.steps=0 --set schedule.split_step=0
  --set "schedule.lr.cooldown_steps=$((steps * 3 / 5))" --set schedule.lr.hold_steps=0 --set "schedule.momentum.warmup_steps=$((steps / 4))"
  --set eval.every=0 --set eval.at_start=false --set eval.tokens=1048576 --set checkpoint.every=0 --set checkpoint.at_end=false)
bf16=(--set fp8.mlp_up=bf16 --set fp8.mlp_down=bf16 --set fp8.head=bf16)

run() { # NAME ARGS…
  local name=$1
  shift
  "$binary" train "$ROOT/configs/main_track.json" "${common[@]}" "$@" --set "run.name=$name" >"$runs/$name.log" 2>&1 ||
    die "$name: $(tail -1 "$runs/$name.log")"
}
mkdir -p "$runs"
for seed in $seeds; do
  run "bf16_$seed" "${bf16[@]}" --set "train.seed=$seed"
  run "fp8_$seed" --set "train.seed=$seed"
done
run unit_scales --set "train.seed=${seeds%% *}" --set fp8.force_unit_scales=true

python3 - "$runs" "$seeds" <<'PYTHON'
import json, math, statistics, sys
runs, seeds = sys.argv[1], sys.argv[2].split()
def tail(name):
    losses = [json.loads(line).get("loss") for line in open(f"{runs}/{name}/metrics.jsonl")]
    return statistics.fmean([x for x in losses if x is not None][-30:])
bf16, fp8 = [tail(f"bf16_{s}") for s in seeds], [tail(f"fp8_{s}") for s in seeds]
unit = tail("unit_scales")
for s, a, b in zip(seeds, bf16, fp8):
    print(f"seed {s}: BF16 {a:.4f}  FP8 {b:.4f}  difference {b - a:+.4f}")
noise = statistics.stdev(bf16) if len(bf16) > 1 else math.nan
mean = statistics.fmean(b - a for a, b in zip(bf16, fp8))
print(f"mean difference {mean:+.4f}; standard deviation over seeds (BF16) {noise:.4f}")
print(f"every scale 1: {unit:.4f}, {unit - bf16[0]:+.4f} against BF16 with the same seed")
paired = max(abs(b - a) for a, b in zip(bf16, fp8))
ok = abs(mean) <= noise and unit - bf16[0] > max(2 * noise, 5 * paired)
print("FP8 is within the noise of the seeds, unit scales are not" if ok else "NOT as expected")
sys.exit(0 if ok else 1)
PYTHON
