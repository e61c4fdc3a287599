#!/usr/bin/env bash
# The Main Track's model beside the code of the public record #89 itself: loss curves through all stages, a validation and gradients of
# single batches, from the same weights on the same batches. On one GPU in some ten minutes; needs PyTorch and a checkout of
# KellerJordan/modded-nanogpt.
#   scripts/reference_check.sh --source DIR --train PATTERN --val PATTERN [--runs DIR] [--warm "15 30"] [--batches 2]
#     [--part all|losses|eval|grads] [-- --set KEY=VALUE …]
# Weights: the record's after so many warm steps each (a fresh optimizer follows them).
# Losses: 28 steps with FP8 through all four stages and the split of head and embedding, the record's code three times for its own
# spread: as it is (its atomics differ), and twice from weights moved by a rounding to BF16.
# Validation: 131,072 tokens, BF16.
# Gradients: the record's formulas in FP32 are the truth, the record's code in BF16 is the measure; ours may be 1.5 times as far away, as
# root mean squares over the weights and the first batch of so many shards, and once a batch of the largest stage.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

source='' train='' val='' runs=runs/reference_check warm='15 30' batches=2 part=all
while (($#)); do
  case $1 in
    --source) source=${2:?--source needs a folder} ;;
    --train) train=${2:?--train needs a pattern} ;;
    --val) val=${2:?--val needs a pattern} ;;
    --runs) runs=${2:?--runs needs a folder} ;;
    --warm) warm=${2:?--warm needs numbers} ;;
    --batches) batches=${2:?--batches needs a number} ;;
    --part) part=${2:?--part needs all, losses, eval or grads} ;;
    --) shift && break ;;
    *) die "unknown argument '$1' (expected --source, --train, --val, --runs, --warm, --batches, --part or --)" ;;
  esac
  shift 2
done
[[ -n $source && -n $train && -n $val ]] || die "--source, --train and --val are needed: a checkout of modded-nanogpt, patterns of shards"
[[ $part =~ ^(all|losses|eval|grads)$ ]] || die "--part $part: expected all, losses, eval or grads"
binary=${SPEEDRUN:-$ROOT/build/speedrun}
[[ -x $binary ]] || die "$binary: not built; run scripts/test.sh or set SPEEDRUN"
mkdir -p "$runs"
runs=$(cd "$runs" && pwd)
oracle=$ROOT/scripts/torch_oracle

warm_steps=($warm)
longest=${warm_steps[-1]}

common=(--set "data.train=$train" --set "data.val=$val" --set "run.dir=$runs" --set eval.every=0
  --set eval.tokens=131072 --set eval.row_tokens=65536 --set checkpoint.every=0 --set checkpoint.at_end=false
  --set schedule.lr.cooldown_steps=8 --set schedule.momentum.warmup_steps=8 --set schedule.momentum.cooldown_steps=4 "$@")
bf16=(--set fp8.mlp_up=bf16 --set fp8.mlp_down=bf16 --set fp8.head=bf16)
resolve() { # NAME STEPS_OF_STAGE_0 … STEPS_OF_STAGE_3 SPLIT_STEP ARGS…
  local name=$1 stages=() i
  for i in 0 1 2 3; do stages+=(--set "schedule.stages.$i.steps=${*:i+2:1}"); done
  "$binary" train "$ROOT/configs/main_track.json" "${common[@]}" "${stages[@]}" --set "schedule.lr.hold_steps=$5" \
    --set "schedule.split_step=$6" "${@:7}" --print-config >"$runs/$name.json"
}
resolve warm "$longest" 12 0 0 0
resolve losses 8 8 8 4 17 --set eval.at_start=false
resolve eval 12 0 0 0 0 "${bf16[@]}"
resolve grads 12 0 0 0 0 "${bf16[@]}"
# The first stage with the batch and the windows of the third.
resolve large 12 0 0 0 0 "${bf16[@]}" --set schedule.stages.0.batch_tokens=393216 --set schedule.stages.0.max_seq_len=2048 \
  --set schedule.stages.0.window_short=640 --set schedule.stages.0.window_long=1408 --set schedule.stages.0.mtp_start=[1] \
  --set schedule.stages.0.mtp_end=[1] --set schedule.stages.0.prefix_start=0 --set schedule.stages.0.prefix_end=0

record() { # MODE CONFIG ARGS…
  python3 "$oracle/reference.py" "$1" "$runs/$2" --source "$source" "${@:3}"
}
ours() { # CONFIG WEIGHTS ARGS…
  "$binary" train "$runs/$1" --set "train.init_weights=$2" "${@:3}"
}
[[ -f $runs/warm$longest.safetensors ]] || record export warm.json --warm-steps "${warm_steps[@]}" --out "$runs/warm{}.safetensors"
weights=$runs/warm$longest.safetensors

failed=0
if [[ $part == all || $part == losses ]]; then
  record train losses.json --weights "$weights" --steps 28 --runs 3 --nudge 2 --out "$runs/record.jsonl"
  rm -rf "$runs/ours"
  ours losses.json "$weights" --set run.name=ours | tail -4
  python3 "$oracle/compare.py" losses --ours "$runs/ours/metrics.jsonl" --torch "$runs/record.jsonl" \
    --again "$runs/record.2.jsonl" "$runs/record.3.jsonl" --csv "$runs/losses.csv" --within-spread || failed=1
fi
if [[ $part == all || $part == eval ]]; then
  record eval eval.json --weights "$weights" --out "$runs/eval.jsonl" | tail -1
  rm -rf "$runs/ours_eval"
  ours eval.json "$weights" --set run.name=ours_eval | grep 'step 0/.*validation'
fi
if [[ $part == all || $part == grads ]]; then
  gradients() { # CONFIG WEIGHTS SHARD NAME
    record grads "$1" --data "$3" --weights "$2" --fp32 --out "$runs/truth.$4.safetensors" | grep loss
    record grads "$1" --data "$3" --weights "$2" --sum-fp32 --out "$runs/record.$4.safetensors" | grep loss
    ours "$1" "$2" --set "data.train=$3" --dump-grads "$runs/ours.$4.safetensors" | tail -1
  }
  compare() { # NAMES…
    python3 "$oracle/compare.py" grads --ours "${@/#/$runs/ours.}" --bf16 "${@/#/$runs/record.}" --oracle "${@/#/$runs/truth.}" || failed=1
  }
  mapfile -t shards < <(printf '%s\n' $train | sort | head -n "$batches")
  names=()
  for steps in $warm; do
    for shard in "${shards[@]}"; do
      name=$steps.$(basename "$shard" .bin)
      gradients grads.json "$runs/warm$steps.safetensors" "$shard" "$name"
      names+=("$name.safetensors")
    done
  done
  compare "${names[@]}"
  gradients large.json "$weights" "${shards[0]}" large
  compare large.safetensors
fi
exit $failed
