#!/usr/bin/env bash
# The Main Track's model beside the code of the public record #89 itself: gradients of one batch, then a loss curve across a change of
# stage, from the same weights on the same batches. On one GPU in some minutes; needs PyTorch and a checkout of
# KellerJordan/modded-nanogpt.
#   scripts/reference_check.sh --source DIR --train PATTERN [--runs DIR] [--steps 15] [-- --set KEY=VALUE …]
# Gradients: the record's formulas in FP32 are the truth, the record's code in BF16 is the measure; ours may be 1.5 times as far away.
# Losses: FP8 on, --steps steps of the first stage and as many of the second, the record's code twice for its own spread.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

source='' train='' runs=runs/reference_check steps=15
while (($#)); do
  case $1 in
    --source) source=${2:?--source needs a folder} ;;
    --train) train=${2:?--train needs a pattern} ;;
    --runs) runs=${2:?--runs needs a folder} ;;
    --steps) steps=${2:?--steps needs a number} ;;
    --) shift && break ;;
    *) die "unknown argument '$1' (expected --source, --train, --runs, --steps or --)" ;;
  esac
  shift 2
done
[[ -n $source && -n $train ]] || die "--source and --train are needed: a checkout of modded-nanogpt, a pattern of token shards"
binary=${SPEEDRUN:-$ROOT/build/speedrun}
[[ -x $binary ]] || die "$binary: not built; run scripts/test.sh or set SPEEDRUN"
mkdir -p "$runs"
runs=$(cd "$runs" && pwd)
oracle=$ROOT/scripts/torch_oracle

config=(--set "data.train=$train" --set "data.val=$train" --set "run.dir=$runs" --set eval.every=0 --set eval.at_start=false
  --set eval.tokens=2048 --set eval.row_tokens=2048 --set checkpoint.every=0 --set checkpoint.at_end=false
  --set "schedule.stages.0.steps=$steps" --set "schedule.stages.1.steps=$steps"
  --set schedule.stages.2.steps=0 --set schedule.stages.3.steps=0 --set schedule.split_step=0
  --set schedule.lr.cooldown_steps=1 --set schedule.lr.hold_steps=0
  --set "schedule.momentum.warmup_steps=$steps" --set schedule.momentum.cooldown_steps=5 "$@")
bf16=(--set fp8.mlp_up=bf16 --set fp8.mlp_down=bf16 --set fp8.head=bf16)
"$binary" train "$ROOT/configs/main_track.json" "${config[@]}" --print-config >"$runs/fp8.json"
"$binary" train "$ROOT/configs/main_track.json" "${config[@]}" "${bf16[@]}" --print-config >"$runs/bf16.json"

record() { # MODE CONFIG ARGS…
  python3 "$oracle/reference.py" "$1" "$runs/$2" --source "$source" "${@:3}"
}
record export fp8.json --start-out "$runs/start.safetensors" --warm-steps "$steps" --out "$runs/warm.safetensors"

record train fp8.json --weights "$runs/start.safetensors" --steps $((2 * steps)) --runs 2 --out "$runs/record.jsonl"
rm -rf "$runs/ours"
"$binary" train "$runs/fp8.json" --set "train.init_weights=$runs/start.safetensors" --set run.name=ours | tail -4
python3 "$oracle/compare.py" losses --ours "$runs/ours/metrics.jsonl" --torch "$runs/record.jsonl" --again "$runs/record.2.jsonl" \
  --csv "$runs/losses.csv"

record grads bf16.json --weights "$runs/warm.safetensors" --fp32 --out "$runs/truth.safetensors"
record grads bf16.json --weights "$runs/warm.safetensors" --sum-fp32 --out "$runs/record_bf16.safetensors"
"$binary" train "$runs/bf16.json" --set "train.init_weights=$runs/warm.safetensors" --dump-grads "$runs/ours.safetensors" | tail -1
echo
python3 "$oracle/compare.py" grads --ours "$runs/ours.safetensors" --bf16 "$runs/record_bf16.safetensors" --oracle "$runs/truth.safetensors"
