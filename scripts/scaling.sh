#!/usr/bin/env bash
# Everything that an owner of a host with several GPUs wants to see, in one command; prints Markdown tables for docs/performance.md.
#   scripts/scaling.sh [--train PATTERN --val PATTERN] [--ranks "1 2 4 8"] [--parts "stages timeline gpt2 resume faults cycles"]
#                      [--stage-steps 40] [--cycles 50] [--full] [--one-gpu | --cpu] [--limit 600] [--runs DIR] [--set KEY=VALUE …]
# Parts: stages: the Main Track through all stages, shortened: ms a step, tokens/s, joules, equality of losses between numbers of ranks;
# timeline: communication that no compute covers; gpt2: GPT-2 124M; resume: a checkpoint of the most ranks goes on on one, and back;
# faults: each rank killed and stopped in the middle of a step; cycles: starts and ends in a row (--cycles N, 0 unless given).
# --full: whole Main Track runs as well, on 1 and on the most ranks. Without --train the shards are made up, and losses mean nothing.
# --one-gpu: all ranks on one GPU over the loopback interface, small batches, resume and faults with a tiny model: times mean nothing,
# equality and failures do.
# --set: further keys of the Main Track's runs (repeatable), for instance a micro-batch that leaves memory to others.
# --cpu: the same on CPU processes with tiny models, without GPU and timeline. Every run ends after --limit seconds at the latest.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

train='' val='' ranks='' parts='stages timeline gpt2 resume faults cycles' stage_steps='' cycles=0 full=0 mode=gpus limit=600
runs=runs/scaling sets=()
while (($#)); do
  case $1 in
    --full) full=1 ;;
    --one-gpu) mode=one-gpu ;;
    --cpu) mode=cpu ;;
    --train | --val | --ranks | --parts | --stage-steps | --cycles | --limit | --runs)
      name=${1#--}
      printf -v "${name//-/_}" '%s' "${2:?$1 needs a value}"
      shift
      ;;
    --set)
      sets+=(--set "${2:?--set needs KEY=VALUE}")
      shift
      ;;
    *) die "unknown argument '$1' (the head of scripts/scaling.sh lists them)" ;;
  esac
  shift
done
binary=${SPEEDRUN:-$ROOT/build/speedrun}
[[ -x $binary ]] || die "$binary: not built; run scripts/test.sh or set SPEEDRUN"
binary=$(realpath "$binary")
for part in $parts; do
  [[ " stages timeline gpt2 resume faults cycles " == *" $part "* ]] ||
    die "--parts: '$part' is none of stages, timeline, gpt2, resume, faults, cycles"
done
[[ -n $train && -n $val || -z $train && -z $val ]] || die "--train and --val: give both or neither"
[[ $cycles =~ ^[0-9]+$ && $limit =~ ^[1-9][0-9]*$ && ${stage_steps:-2} =~ ^[0-9]*[02468]$ ]] ||
  die "--cycles, --limit and --stage-steps: whole numbers; the last one even, because tables update in every second step"
if [[ $mode != cpu ]] && ! has_gpu; then die "no GPU here; --cpu tries everything on CPU processes"; fi
if [[ -z $ranks ]]; then
  present=8
  if [[ $mode == gpus ]]; then present=$(nvidia-smi -L | grep -c '^GPU '); fi
  if [[ $mode == cpu ]]; then present=2; fi
  for n in 1 2 4 8; do ((n <= present)) && ranks+="$n "; done
fi
for n in $ranks; do
  [[ $n =~ ^[1248]$ ]] || die "--ranks: '$n' is none of 1, 2, 4, 8 (numbers that divide the 8 rows of a Main Track step)"
done
most=1
for n in $ranks; do ((n > most)) && most=$n; done
((!full)) || [[ -n $train || $mode == cpu ]] || die "--full needs --train and --val: 338,821,120 tokens with repeats"
[[ ! -e $runs ]] || die "$runs: exists; remove it or name another folder with --runs"
mkdir -p "$runs"
runs=$(realpath "$runs")
failed=0

# What the three modes run.
sample=(--set "data.train=$ROOT/data/sample/sample_train_*.bin" --set "data.val=$ROOT/data/sample/sample_val_*.bin")
config=$ROOT/configs/main_track.json gpt2=(train "$ROOT/configs/gpt2_124m.json") gpt2_steps=30
small=(train "$ROOT/configs/tiny.json") eval_tokens=2621440 gpu_flag=(--gpu)
main=() data=() brief_data=() common=(--set "run.dir=$runs" --set eval.every=0 --set eval.at_start=false --set checkpoint.every=0
  --set checkpoint.at_end=false --set dist.progress_s=120)
case $mode in
  gpus) stage_steps=${stage_steps:-40} ;;
  one-gpu)
    # The tables' gradients travel through the loopback interface: fewer bigram rows, rows of 4,096 tokens.
    stage_steps=${stage_steps:-4} gpt2_steps=6 eval_tokens=65536
    main=(--set model.bigram_rows=50304 --set eval.row_tokens=32768)
    brief_config=$ROOT/configs/main_track_tiny.json brief_tokens=4096
    brief_data=(--set train.device=cuda "${sample[@]}" --set data.repeat=20)
    for stage in 0 1 2 3; do main+=(--set "schedule.stages.$stage.batch_tokens=32768"); done
    gpt2+=(--set train.batch_tokens=32768)
    parts=${parts/timeline/}
    say "one GPU for all ranks: times mean nothing here, only equality and failures do"
    ;;
  cpu)
    stage_steps=${stage_steps:-4} gpt2_steps=6 eval_tokens=4096 gpu_flag=()
    config=$ROOT/configs/main_track_tiny.json
    common+=(--set train.device=cpu --set train.threads=1)
    gpt2=(train "$ROOT/configs/tiny.json" --set model.vocab_size=4096)
    parts=${parts/timeline/}
    say "CPU processes: times mean nothing here, only equality and failures do"
    ;;
esac
main+=("${sets[@]}")
if [[ -z $train ]]; then
  if [[ $mode == cpu ]]; then
    train="$ROOT/data/sample/sample_train_*.bin" val="$ROOT/data/sample/sample_val_*.bin"
  else
    say "no --train: making shards of random documents in $runs/shards"
    python3 -B "$ROOT/scripts/scaling_run.py" shards "$runs/shards" || die "cannot make shards in $runs/shards"
    train="$runs/shards/synthetic_train_*.bin" val="$runs/shards/synthetic_val_*.bin"
  fi
fi
data=(--set "data.train=$train" --set "data.val=$val" --set data.repeat=20)
gpt2+=("${common[@]}" "${data[@]}" --set "schedule.steps=$gpt2_steps" --set schedule.lr.warmup_steps=2 --set eval.tokens=4096)
small+=("${common[@]}" --set model.vocab_size=4096 "${sample[@]}" --set eval.tokens=1024)
if ((${#brief_data[@]} == 0)); then brief_config=$config brief_tokens=$eval_tokens brief_data=("${data[@]}" "${main[@]}"); fi

# short_main CONFIG EVALUATION_TOKENS ARGS…: all stages with as many steps each, the extension with four.
short_main() {
  local steps=$stage_steps
  printf '%s\n' train "$1" "${common[@]}" "${@:3}" --set "eval.tokens=$2" \
    --set "schedule.stages.0.steps=$steps" --set "schedule.stages.1.steps=$steps" --set "schedule.stages.2.steps=$steps" \
    --set schedule.stages.3.steps=4 --set "schedule.split_step=$((2 * steps + 1))" --set "schedule.lr.cooldown_steps=$((steps + 4))" \
    --set schedule.lr.hold_steps=4 --set "schedule.momentum.warmup_steps=$steps" --set schedule.momentum.cooldown_steps=3
}

# flags_for N: how N ranks are asked for.
flags_for() {
  if (($1 > 1)); then printf '%s\n' --gpus "$1"; fi
  if [[ $mode == one-gpu ]] && (($1 > 1)); then printf '%s\n' --set "dist.ranks_per_gpu=$1"; fi
}

# run NAME RANKS ARGS…: one run with its output in NAME.log, ended after the limit; a failure is reported, and the rest goes on.
run() {
  local name=$1 n=$2 flags
  shift 2
  mapfile -t flags < <(flags_for "$n")
  say "$name"
  timeout --foreground --kill-after=30 "$limit" "$binary" "$@" "${flags[@]}" --set "run.name=$name" >"$runs/$name.log" 2>&1 && return
  local code=$?
  say "$name FAILED with exit code $code: $(tail -1 "$runs/$name.log")"
  failed=1
}

mapfile -t short < <(short_main "$config" "$eval_tokens" "${data[@]}" "${main[@]}")
mapfile -t brief < <(short_main "$brief_config" "$brief_tokens" "${brief_data[@]}") # for resume and faults
for part in $parts; do
  case $part in
    stages) for n in $ranks; do run "stages_$n" "$n" "${short[@]}"; done ;;
    timeline) for n in $ranks; do run "timeline_$n" "$n" "${short[@]}" --timeline "$runs/timeline_$n.json"; done ;;
    gpt2) for n in $ranks; do run "gpt2_$n" "$n" "${gpt2[@]}"; done ;;
    resume)
      ((most > 1)) || continue
      # One checkpoint, behind the middle of the steps: copies of the folder go on from there.
      once=(--set "checkpoint.every=$((stage_steps + stage_steps / 2 + 4))")
      run "resume_$most" "$most" "${brief[@]}" "${once[@]}"
      run resume_1 1 "${brief[@]}" "${once[@]}"
      for pair in "$most 1" "1 $most"; do
        read -r from to <<<"$pair"
        [[ -d $runs/resume_$from/checkpoints ]] || continue
        name=resume_${from}_to_$to
        cp -r "$runs/resume_$from" "$runs/$name"
        run "$name" "$to" train --resume "$runs/$name" --set checkpoint.every=0 --set dist.ranks_per_gpu=1
      done
      ;;
    faults)
      ((most > 1)) || continue
      for kind in kill stop; do
        for ((rank = 0; rank < most; ++rank)); do
          name=fault_${kind}_$rank
          say "$name"
          mapfile -t flags < <(flags_for "$most")
          SPEEDRUN_FAULT=$rank:step:5:$kind python3 -B "$ROOT/scripts/scaling_run.py" watch "$runs/$name.json" --limit 120 \
            "${gpu_flag[@]}" -- "$binary" "${brief[@]}" "${flags[@]}" --set dist.heartbeat_s=2 --set "run.name=$name" || failed=1
        done
      done
      ;;
    cycles)
      ((cycles > 0)) || continue
      mapfile -t flags < <(flags_for "$most")
      for ((i = 1; i <= cycles; ++i)); do
        python3 -B "$ROOT/scripts/scaling_run.py" watch "$runs/cycle_$i.json" --limit 120 "${gpu_flag[@]}" -- "$binary" \
          "${small[@]}" "${flags[@]}" --set schedule.steps=2 --set schedule.lr.warmup_steps=0 --set "run.name=cycle_$i" || failed=1
      done
      ;;
  esac
done
if ((full)); then
  limit=$((limit > 1800 ? limit : 1800))
  for n in $(printf '%s\n' 1 "$most" | sort -un); do
    run "full_$n" "$n" train "$config" "${data[@]}" --set "run.dir=$runs" "${sets[@]}"
  done
fi
python3 -B "$ROOT/scripts/scaling_report.py" "$runs" --mode "$mode" || failed=1
exit $failed
