#!/usr/bin/env python3
"""Whether weight extrapolation helps, with paired seeds: for each seed one baseline, which leaves a checkpoint where the arms
branch off (`speedrun train --from`), so that an arm costs only the tail. Each method is tuned on a small grid with seeds of its own;
its best setting is then compared on new seeds. An interrupted study goes on where it was: give the same command again.

    extrapolation_study.py --train PATTERN --val PATTERN [--jobs 3]          configs/extrapolation_small.json, all methods
    extrapolation_study.py --track main --train PATTERN --val PATTERN        the Main Track in a tenth of its steps: rre, rre_suffix
    extrapolation_study.py --tiny --device cpu                               the bundled sample: everything in half a minute
    extrapolation_study.py --demo CONFIG [--arm method=rre_suffix,every=5]   one baseline and one arm, both curves side by side
    extrapolation_study.py --tune-baseline optim.matrix.lr=0.02,0.04         baselines alone, over a grid of keys (repeatable)
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import sys

import extrapolation_report
from markdown_tables import table
from run_metrics import read_lines, scaled, stages, validations
from run_queue import Queue, Refused, Run, check_jobs, device_list, keep_plan, resolved_config, sets

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The public record's own numbers (modded-nanogpt's optimization track, result #34).
RECORD = {"history": 4, "damping": 0.875, "max_jump": 0.001}
# Of the config keys extrapolation.*, keys with a dot of the whole config; start: so many updates after the branch, 1 unless given.
# Over tails of 55 updates (small), 32 (main) and 10 (tiny). control: no extrapolation, another learning rate in the tail, because a jump
# along the drift is in effect a longer step.
SMALL = {
    "rre": [{"every": 5, **RECORD},
            {"every": 20, "snapshot_every": 5, "history": 4, "max_jump": 0},
            {"every": 5, "snapshot_every": 5, "history": 8, "max_jump": 0, "apply": "readout"}],
    "rre_suffix": [{"every": 5, **RECORD},
                   {"every": 20, "snapshot_every": 5, "history": 4, "max_jump": 0},
                   {"every": 5, "snapshot_every": 5, "history": 4, "max_jump": 0, "apply": "readout"}],
    "mpe": [{"every": 5, **RECORD}],
    "anderson": [{"every": 5, **RECORD}],
    "linear": [{"every": 10, "history": 4, "horizon": 5, "max_jump": cap} for cap in (0.001, 0.004, 0)],
    "ema": [{"ema_updates": 20, "blend": blend, "parameters": "all", "apply": "readout"} for blend in (1, 0.6)],
    "average": [{"start": start, "parameters": "all", "apply": "readout"} for start in (21, 41)],
    "control": [{"optim.matrix.lr": lr} for lr in (0.025, 0.03)],
}  # fmt: skip
MAIN = {method: [{"every": 4, **RECORD}, {"every": 16, "snapshot_every": 4, "history": 4, "max_jump": 0}]
        for method in ("rre", "rre_suffix")}  # fmt: skip
TINY = {
    "rre": [{"every": 5, **RECORD}, {"every": 5, "history": 4, "max_jump": 0, "apply": "readout"}],
    "rre_suffix": [{"every": 5, **RECORD}],
    "average": [{"parameters": "all", "apply": "readout"}],
    "control": [{"optim.matrix.lr": 0.03}],
}
TUNE_SEED = 1001  # the first of the tuning seeds; those of the comparison are smaller


@dataclasses.dataclass
class Track:
    config: str
    sets: list
    tail: float  # share of the steps
    grid: dict
    seconds: tuple  # on one H200, for the plan: a whole run's steps, start-up, validation


TRACKS = {
    "small": Track("extrapolation_small.json", [], 0.12, SMALL, (20, 2, 0.7)),
    "main": Track("main_track.json", ["schedule.scale=0.1", "eval.every=0", "eval.at_start=false", "eval.tokens=2621440"], 0.25, MAIN,
                  (42, 8, 2)),  # fmt: skip
    "tiny": Track("quickstart.json", ["model.num_layers=2", "model.width=64", "model.num_heads=1", "model.mlp_hidden=256",
                                      "train.batch_tokens=512", "schedule.steps=40", "schedule.lr.cooldown_steps=28",
                                      "eval.every=0", "eval.at_start=false", "eval.tokens=8192", "train.stop_at_target=false",
                                      "train.threads=1"], 0.25, TINY, (1.5, 0.2, 0.2)),
}  # fmt: skip
# A branch starts with the checkpoint's config, in which these are the baseline's.
BRANCH_SETS = ["checkpoint.every=0", "checkpoint.at_end=false"]


def say(text):
    print(text, flush=True)


def die(message):
    sys.exit(f"extrapolation_study: {message}")


def label(setting):
    return " ".join(f"{key}={value}" for key, value in setting.items())


def slug(method, setting):
    return "_".join([method] + [f"{key}{value}" for key, value in setting.items()])


def method_of(arm):
    """extrapolation.method of an arm of the grid."""
    return "none" if arm == "control" else arm


def jumps(setting, branch, steps):
    """How often an extrapolation of the weights jumps, or a read-out is seen at the end, in a run that branches off; what the
    program does, see src/optim/extrapolation.h. ema and average: 1 if an update falls into their span."""
    start, stop = branch + setting.get("start", 1), steps
    if setting["method"] == "none":
        return 0
    if setting["method"] in ("ema", "average"):
        return int(start < stop)
    snapshot_every, every, history = setting.get("snapshot_every", 1), setting.get("every", 5), setting.get("history", 4)
    weights = setting.get("apply", "weights") == "weights"
    held = made = 0
    for n in range(branch + 1, stop + 1):
        if n < start or n % snapshot_every:
            continue
        held = min(held + 1, history)
        if held == history and n % every == 0 and (weights or n == steps):
            made += 1
            held = 1
    return made


class Plan:
    """Sizes of one study: the resolved config, steps, where the arms branch off, and how their keys are written."""

    def __init__(self, binary, config, overrides, tail):
        self.arguments = [str(config), *sets(overrides)]
        self.config = resolved_config(binary, self.arguments)
        self.scale = self.config["schedule"].get("scale", 1)
        self.steps = stages(self.config)[-1][1]
        self.tail = scaled(self.steps, tail)
        self.branch = self.steps - self.tail
        # checkpoint.every = branch then writes exactly one
        if 2 * self.branch <= self.steps or self.tail < 2:
            die(f"--tail {tail}: of {self.steps} steps the arms share {self.branch}: give a share below 0.5 that leaves some steps")

    def baseline_sets(self):
        return [f"checkpoint.every={self.branch}", "checkpoint.keep=20", "checkpoint.at_end=false", f"eval.every={self.branch}"]

    def arm_sets(self, setting):
        """Keys of a branch; the start is in steps before schedule.scale."""
        setting = dict(setting)
        if setting["method"] != "none":
            first = self.branch + setting.get("start", 1)
            setting["start"] = round(first / self.scale)
            if scaled(setting["start"], self.scale) != first:
                die(f"schedule.scale = {self.scale}: extrapolation.start cannot be update {first}; choose another --tail")
        return [f"{key if '.' in key else 'extrapolation.' + key}={value}" for key, value in setting.items()]

    def check(self, grid):
        for method, settings in grid.items():
            if not settings:
                die(f"{method}: has no settings in the grid")
            for setting in settings:
                if method_of(method) != "none" and not jumps(setting | {"method": method}, self.branch, self.steps):
                    die(f"{method} {label(setting)}: would do nothing between updates {self.branch + 1} and {self.steps} "
                        "(a read-out is seen only at a multiple of `every`): change it, or --tail")  # fmt: skip


def tail_seconds(lines, branch, steps):
    """Of the training clock, for steps branch … steps − 1: from the first of them that a line tells of, scaled to all of them."""
    clocks = [line["clock_s"] for line in lines if "loss" in line and line["step"] >= branch]
    if len(clocks) != steps - branch or len(clocks) < 2:
        return None
    ends = [line["clock_s"] for line in lines if "val_loss" in line and line["step"] == steps]
    return (max(ends + clocks[-1:]) - clocks[0]) * len(clocks) / (len(clocks) - 1)


class Study:
    def __init__(self, args, plan, grid, seconds):
        self.args, self.plan, self.grid, self.seconds = args, plan, grid, seconds
        self.queue = Queue(args.binary, args.out / "runs", args.jobs, args.limit, args.budget, say, args.devices)
        self.tune_seeds = [TUNE_SEED + i for i in range(args.tune_seeds)]
        self.seeds = [args.first_seed + i for i in range(args.seeds)]
        self.rows, self.chosen, self.faults = [], {}, []

    def checkpoint(self, seed):
        return self.queue.folder / f"seed{seed}_baseline" / "checkpoints" / f"step_{self.plan.branch:06d}.ckpt"

    def baseline(self, seed):
        return Run(f"seed{seed}_baseline", f"seed {seed} baseline", self.plan.arguments + sets(
            self.plan.baseline_sets() + [f"train.seed={seed}"]), makes=self.checkpoint(seed), kind="baseline")  # fmt: skip

    def arm(self, seed, method, setting):
        keys = {"method": method_of(method)} | setting
        return Run(f"seed{seed}_{slug(method, setting)}", f"seed {seed} {method} {label(setting)}",
                   ["--from", str(self.checkpoint(seed)), *sets(self.plan.arm_sets(keys) + BRANCH_SETS + ["eval.every=0"])],
                   after=f"seed{seed}_baseline", needs=self.checkpoint(seed), kind="tail")  # fmt: skip

    def longer(self, seed):
        scale = f"schedule.scale={self.plan.scale * (1 + self.args.longer)}"
        return Run(f"seed{seed}_longer{self.args.longer}", f"seed {seed} longer baseline", self.plan.arguments + sets(
            [scale, f"train.seed={seed}", "checkpoint.every=0", "checkpoint.at_end=false", "eval.every=0"]), kind="longer")  # fmt: skip

    def of_seed(self, seed, arms):
        return [self.baseline(seed)] + [self.arm(seed, method, setting) for method, setting in arms]

    def work(self, by_seed):
        """by_seed: runs of every seed, baseline first. A seed's checkpoint goes when all of its arms have been made."""

        def done(run):
            for seed, runs in by_seed.items():
                if not self.args.keep_checkpoints and all(self.queue.result(other.name) for other in runs):
                    self.checkpoint(seed).unlink(missing_ok=True)

        self.queue.work([run for runs in by_seed.values() for run in runs], done)

    def row(self, phase, seed, method, setting, run):
        """Adds what the run ended with to the rows, if it did."""
        result = self.queue.result(run.name)
        if result is None or result.get("val_loss") is None:
            return None
        lines = read_lines(self.queue.folder / run.name)
        row = {"phase": phase, "seed": seed, "method": method, "setting": setting, "val_loss": result["val_loss"],
               "val_loss_raw": result.get("val_loss_raw"), "baseline_val_loss": None, "difference": None, "steps": result["steps"],
               "tail_s": tail_seconds(lines, self.plan.branch, self.plan.steps), "run": run.name,
               "executable": result.get("build", {}).get("executable_hash")}  # fmt: skip
        if method == "baseline":
            row["branch_val_loss"] = validations(self.queue.folder / run.name).get(self.plan.branch)
        else:
            base = self.queue.result(f"seed{seed}_baseline")
            if base is not None and base.get("val_loss") is not None:
                row["baseline_val_loss"] = base["val_loss"]
                row["difference"] = row["val_loss"] - base["val_loss"]
        self.rows.append(row)
        return row

    def take(self, phase, seed, arms):
        self.row(phase, seed, "baseline", "", self.baseline(seed))
        for method, setting in arms:
            row = self.row(phase, seed, method, label(setting), self.arm(seed, method, setting))
            if row is None or row["difference"] is None:
                continue
            base = row["baseline_val_loss"]
            # Same checkpoint, same steps: nothing but the weights that a validation sees may differ.
            if method == "none" and row["difference"] != 0:
                self.faults.append(f"{row['run']}: a branch without extrapolation ended at {row['val_loss']}, its baseline at {base}")
            if setting.get("apply") == "readout" and row["val_loss_raw"] not in (None, base):
                self.faults.append(f"{row['run']}: a read-out changed the training: {row['val_loss_raw']} without it, baseline {base}")

    def tell_plan(self):
        settings = sum(map(len, self.grid.values()))
        tails = len(self.seeds) * len(self.grid) + (len(self.tune_seeds) * settings + 1 if self.tune_seeds else 0)
        runs = len(self.seeds) + len(self.tune_seeds)
        longer = len(self.tune_seeds) if self.args.longer else 0
        whole, start, validation = self.seconds
        of_tail = whole * self.plan.tail / self.plan.steps
        busy = (runs + longer * (1 + self.args.longer)) * (whole + 2 * validation) + tails * (of_tail + validation)
        waits = (runs + longer + tails) * start / self.args.jobs
        say(f"plan: {self.plan.steps} steps, arms branch off after {self.plan.branch}; {len(self.tune_seeds)} tuning seeds, "
            f"{len(self.seeds)} seeds; {len(self.grid)} methods with {settings} settings in all")  # fmt: skip
        say(f"plan: {runs} baselines, {longer} longer ones, {tails} tails of {self.plan.tail} steps; on one H200 with {self.args.jobs} "
            f"at a time about {(busy + waits) / 60:.1f} minutes (baseline {whole:g} s, tail {of_tail:.1f} s, validation "
            f"{validation:g} s, start {start:g} s)")  # fmt: skip
        for method, of_method in self.grid.items():
            for setting in of_method:
                count = jumps(setting | {"method": method_of(method)}, self.plan.branch, self.plan.steps)
                what = "no extrapolation" if count == 0 else f"{count} {'read-out' if setting.get('apply') == 'readout' else 'jumps'}"
                say(f"  {method} {label(setting)}: {what}")

    def run(self):
        self.tell_plan()
        every = [(method, setting) for method, settings in self.grid.items() for setting in settings]
        tuning = {seed: list(every) for seed in self.tune_seeds}
        if self.tune_seeds:
            tuning[self.tune_seeds[0]].insert(0, ("none", {}))
            self.work({seed: self.of_seed(seed, arms) + ([self.longer(seed)] if self.args.longer else [])
                       for seed, arms in tuning.items()})  # fmt: skip
        for seed, arms in tuning.items():
            self.take("tuning", seed, arms)
            if self.args.longer:
                self.row("longer", seed, "longer", "", self.longer(seed))
        for method, settings in self.grid.items():
            labels = [label(setting) for setting in settings]
            tuned = [row for row in self.rows if row["phase"] == "tuning" and row["method"] == method]
            best = extrapolation_report.best_setting(tuned, labels, len(self.tune_seeds)) if self.tune_seeds else labels[0]
            if best is None and not self.queue.out_of_time():
                self.faults.append(f"{method}: no setting has all of its tuning runs, so it is not compared")
            if best is not None:
                self.chosen[method] = best
        if not self.queue.left_out:
            final = [(method, next(s for s in self.grid[method] if label(s) == best)) for method, best in self.chosen.items()]
            self.work({seed: self.of_seed(seed, final) for seed in self.seeds})
            for seed in self.seeds:
                self.take("final", seed, final)
        return self.finish()

    def finish(self):
        if len({row["executable"] for row in self.rows} - {None}) > 1:
            self.faults.append("the runs were made by more than one build of speedrun")
        study = {"steps": self.plan.steps, "branch": self.plan.branch, "jobs": self.args.jobs, "seconds": self.queue.elapsed(),
                 "grid": {method: [label(setting) for setting in settings] for method, settings in self.grid.items()},
                 "chosen": self.chosen, "faults": self.queue.failures + self.faults, "runs": self.rows}  # fmt: skip
        extrapolation_report.write(study, self.args.out, say)
        say(f"{self.queue.elapsed():.0f} s")
        if study["faults"]:
            return 1
        return 3 if self.queue.left_out else 0


def parse_arm(text):
    """method=rre,every=5 → {"method": "rre", "every": 5}"""

    def value(word):
        try:
            return json.loads(word)
        except ValueError:
            return word

    pairs = [part.partition("=") for part in text.split(",")]
    setting = {key: value(word) for key, _, word in pairs}
    if not all(equals for _, equals, _ in pairs) or "method" not in setting:
        die(f"--arm {text}: expected method=…, and further keys of extrapolation.*, with commas between them")
    return setting


def demo(args, plan):
    """One baseline and one arm from its checkpoint, validated at the same steps of the tail."""
    setting = parse_arm(args.arm)
    plan.check({setting["method"]: [setting]})
    every = args.demo_every or max(plan.tail // 10, 1)
    dense = [f"eval.dense_every={every}", f"eval.dense_from={plan.branch / plan.steps!r}", f"eval.every={plan.branch}"]
    queue = Queue(args.binary, args.out / "runs", 1, args.limit, args.budget, say)
    base = Run("baseline", "baseline", plan.arguments + sets(plan.baseline_sets() + dense))
    checkpoint = queue.folder / "baseline" / "checkpoints" / f"step_{plan.branch:06d}.ckpt"
    base.makes = checkpoint
    arm = Run(slug("arm", setting), label(setting), ["--from", str(checkpoint), *sets(plan.arm_sets(setting) + BRANCH_SETS)],
              after="baseline", needs=checkpoint)  # fmt: skip
    say(f"plan: {plan.steps} steps of a baseline, {plan.tail} of them again with {label(setting)}, validated every {every}")
    ended = queue.work_in_pieces(base) and queue.work_in_pieces(arm)
    curves = [validations(queue.folder / run.name) for run in (base, arm)]
    say(f"| step | baseline | {setting['method']} | difference |\n| --- | --- | --- | --- |")
    for step in sorted(curves[0]):
        ours = curves[1].get(step)
        say(f"| {step} | {curves[0][step]:.5f} | {'–' if ours is None else f'{ours:.5f}'} | "
            f"{'–' if ours is None else f'{ours - curves[0][step]:+.5f}'} |")  # fmt: skip
    for failure in queue.failures:
        say(failure)
    return 1 if queue.failures else 0 if ended else 3


def tune_baseline(args, plan):
    """Mean final loss of every combination of values, over the tuning seeds."""
    grid = [[f"{key}={value}" for value in values.split(",")] for key, values in (part.split("=", 1) for part in args.tune_baseline)]
    combinations, seeds = list(itertools.product(*grid)), [TUNE_SEED + i for i in range(max(args.tune_seeds, 1))]
    queue = Queue(args.binary, args.out / "runs", args.jobs, args.limit, args.budget, say, args.devices)
    ends = ["checkpoint.every=0", "checkpoint.at_end=false", "eval.every=0"]
    runs = {(combination, seed): Run("_".join([f"seed{seed}", *combination]), f"seed {seed} {' '.join(combination)}",
                                     plan.arguments + sets([*ends, f"train.seed={seed}", *combination]))
            for combination in combinations for seed in seeds}  # fmt: skip
    queue.work(list(runs.values()))
    losses = {}
    for (combination, _), run in runs.items():
        result = queue.result(run.name)
        if result is not None:
            losses.setdefault(combination, []).append(result["val_loss"])
    rows = [[" ".join(combination), str(len(values)), f"{statistics.fmean(values):.5f}"]
            for combination, values in sorted(losses.items(), key=lambda item: statistics.fmean(item[1]))]  # fmt: skip
    say(table(["keys", "n", "mean loss"], rows))
    for failure in queue.failures:
        say(failure)
    return 1 if queue.failures else 3 if queue.left_out else 0


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=os.environ.get("SPEEDRUN", ROOT / "build" / "speedrun"))
    parser.add_argument("--track", choices=("small", "main"), default="small")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the bundled sample, 2 seeds")
    parser.add_argument("--demo", metavar="CONFIG", help="one baseline and one arm")
    parser.add_argument("--arm", default="method=rre_suffix,every=5,history=4,damping=0.875,max_jump=0.001",
                        help="--demo: keys of extrapolation.* (default: %(default)s)")  # fmt: skip
    parser.add_argument("--demo-every", type=int, default=0, help="--demo: steps between validations (default: a tenth of the tail)")
    parser.add_argument("--tune-baseline", action="append", metavar="KEY=VALUE,VALUE…", help="whole baselines over these values")
    parser.add_argument("--train", metavar="PATTERN", help="token shards, instead of the config's")
    parser.add_argument("--val", metavar="PATTERN")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, help="of the comparison (default: 8)")
    parser.add_argument("--first-seed", type=int, default=1,
                        help="of the comparison: parts of a study on other machines; their folders' runs can be put together")  # fmt: skip
    parser.add_argument("--tune-seeds", type=int, help="0: each method's first setting is taken (default: small 2, main 1)")
    parser.add_argument("--methods", help="those of the grid to take, with commas (default: all)")
    parser.add_argument("--grid", type=pathlib.Path, help='JSON: {"method": [{"every": 5, …}, …], …} instead of the built-in grid')
    parser.add_argument("--tail", type=float, help="share of the steps after the branch (default: small 0.12, main 0.25, demo 0.12)")
    parser.add_argument("--longer", type=float, default=0.0, metavar="F",
                        help="baselines of a schedule longer by F as well: measures what a step is worth")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further keys, for every run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time on one GPU (default: 1)")
    parser.add_argument("--devices", type=device_list, metavar="0,1,…", help="GPUs that make runs of their own (default: the first)")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a run may take (default: 600)")
    parser.add_argument("--budget", type=float, default=0, help="seconds after which no run is started; exit code 3 (default: none)")
    parser.add_argument("--out", type=pathlib.Path, help="folder (default: runs/extrapolation_TRACK)")
    parser.add_argument("--keep-checkpoints", action="store_true")
    args = parser.parse_args(arguments)
    args.name = "tiny" if args.tiny else "demo" if args.demo else args.track
    args.name += "_baselines" if args.tune_baseline else ""
    few = args.tiny or args.track == "main"
    args.seeds = (2 if args.tiny else 8) if args.seeds is None else args.seeds
    args.tune_seeds = (1 if few else 2) if args.tune_seeds is None else args.tune_seeds
    args.out = (args.out or pathlib.Path("runs") / f"extrapolation_{args.name}").absolute()
    args.binary = pathlib.Path(args.binary).absolute()
    if bool(args.train) != bool(args.val):
        parser.error("--train and --val: give both or neither")
    if min(args.seeds, args.first_seed, args.jobs) < 1 or args.tune_seeds < 0 or args.first_seed + args.seeds > TUNE_SEED:
        parser.error(f"--seeds, from --first-seed: 1 to {TUNE_SEED - 1}; --jobs: 1 or more; --tune-seeds: 0 or more")
    return args


def chosen_grid(args, track):
    grid = track.grid
    if args.grid:
        try:
            grid = json.loads(args.grid.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            die(f"--grid {args.grid}: {error}")
    if args.methods:
        unknown = set(args.methods.split(",")) - grid.keys()
        if unknown:
            die(f"--methods: {', '.join(sorted(unknown))}: none of {', '.join(grid)}")
        grid = {method: settings for method, settings in grid.items() if method in args.methods.split(",")}
    return grid


def main(arguments=None):
    args = parse_arguments(arguments)
    track = TRACKS["tiny" if args.tiny else args.track]
    config = args.demo or ROOT / "configs" / track.config
    overrides = [] if args.demo else list(track.sets)
    overrides += [f"data.train={args.train}", f"data.val={args.val}"] if args.train else []
    overrides += [f"train.device={args.device}"] if args.device else []
    if not os.access(args.binary, os.X_OK):
        die(f"{args.binary}: not built; run scripts/test.sh, or name one with --binary or SPEEDRUN")
    try:
        plan = Plan(args.binary, config, overrides + args.set, args.tail or (0.12 if args.demo else track.tail))
        keep_plan(args.out, {"config": plan.config, "branch": plan.branch})
        check_jobs(args.jobs, plan.config)
    except Refused as refused:
        die(refused)
    if args.demo:
        return demo(args, plan)
    if args.tune_baseline:
        return tune_baseline(args, plan)
    grid = chosen_grid(args, track)
    plan.check(grid)
    return Study(args, plan, grid, track.seconds).run()


if __name__ == "__main__":
    sys.exit(main())
