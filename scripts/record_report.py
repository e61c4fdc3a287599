#!/usr/bin/env python3
"""Tables of what record.sh has run, in Markdown; every run as JSON and CSV beside them.

    record_report.py OUT [--reference other/record.json]
"""

import argparse
import csv
import json
import math
import pathlib
import re
import statistics
import sys

from markdown_tables import number, p_text, table
from run_metrics import pairs_ms, read_json, read_steps, stages, uncovered_rows, validations
from run_queue import Refused, read_result
from t_tests import mean_below, welch

ALPHA = 0.01  # of the record's rule, and of a difference in clock
# Of a run, from its result.json.
MEASURES = ("clock_s", "val_loss", "startup_s", "warmup_s", "validation_s", "first_step_s", "total_s", "tokens_per_s", "mfu", "joules",
            "steps", "tokens")  # fmt: skip
COLUMNS = ("seed", "reached_at_s", "reached_at_step", *MEASURES, "run")


def read_run(folder):
    """(row of COLUMNS, the whole result) of a run that has come to its end; None of another."""
    result = read_result(folder)
    if result is None:
        return None
    reached = result.get("reached_at") or {}
    row = {"seed": result.get("seed"), "reached_at_s": reached.get("clock_s"), "reached_at_step": reached.get("step")}
    return row | {key: result.get(key) for key in MEASURES} | {"run": folder.name}, result


def values(rows, key):
    return [row[key] for row in rows if row.get(key) is not None]


def mean(found):
    return statistics.fmean(found) if found else None


def deviation(found):
    return statistics.stdev(found) if len(found) > 1 else None


def stage_rows(folders):
    """By stage, over the steps of all runs. All of them have the same schedule."""
    pairs, shares, found = {}, {}, []
    for folder in folders:
        steps, validated = read_steps(folder), validations(folder)
        found = stages(read_json(folder / "config.json"))
        for i, (begin, end, _) in enumerate(found):
            of_run, left_out = pairs_ms(steps, begin, end, validated)
            pairs.setdefault(i, []).append(of_run)
            shares.setdefault(i, []).append(left_out)
    rows = []
    for i, (begin, end, tokens) in enumerate(found):
        every = [ms for of_run in pairs[i] for ms in of_run]
        medians = [statistics.median(of_run) for of_run in pairs[i] if of_run]
        rows.append({"stage": i + 1, "steps": end - begin, "tokens": tokens, "step_ms": statistics.median(every) if every else None,
                     "slowest_run_ms": max(medians, default=None), "fastest_run_ms": min(medians, default=None),
                     "left_out": statistics.fmean(shares[i])})  # fmt: skip
    return rows


def loss_rule(losses, target):
    """The record's: enough runs to show at p < 0.01 that the mean loss is at most the target. (p, None without a test; in words)"""
    if not target or not losses:
        return None, "No target, so no test of the loss." if losses else "No validation loss, so no test of it."
    p = mean_below(losses, target)
    wanted = f"p < {ALPHA} in a one-sided t-test that the mean loss is at most {target:g}"
    if p is None:
        return None, f"One run, so no test: the record's rule asks for {wanted}."
    told = p_text(p) if p < 1e-4 else f"= {p_text(p)}"
    verdict = "**passes**: the mean loss is at most the target" if p < ALPHA else "**does not pass**: that is not shown"
    return p, f"The record's rule, {wanted}: p {told} with {len(losses)} runs: {verdict}."


def read_reference(path):
    """record.json of other runs, or one written by hand: {"runs": [{"clock_s": 73.8}, …]} suffices."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"--reference {path}: {error}") from error
    runs = told.get("runs") if isinstance(told, dict) else None
    if not runs or not isinstance(runs, list):
        raise Refused(f'--reference {path}: expected a record.json: {{"runs": [{{"clock_s": 73.8, "val_loss": 3.279}}, …]}}')
    for i, row in enumerate(runs):
        for key in ("clock_s", *MEASURES):
            value = row.get(key) if isinstance(row, dict) else None
            if (value is None and key == "clock_s") or not isinstance(value, (int, float, type(None))):
                raise Refused(f"--reference {path}: runs[{i}].{key}: expected a number")
    known = told.get("stages")
    stages_told = [row for row in known if isinstance(row, dict)] if isinstance(known, list) else []
    return {"name": str(path)} | told | {"stages": stages_told}


class Report:
    """Of a record as record.json holds it."""

    def __init__(self, record):
        self.record, self.rows = record, record["runs"]
        self.text = []

    def add(self, title, head, rows):
        if rows:
            self.text.append(f"**{title}**\n\n{table(head, rows)}")

    def notes(self, notes):
        self.text.append("\n".join(f"- {note}" for note in notes) + "\n")

    def head(self):
        machine, build = self.record["machine"], self.record["build"]
        gpus = machine.get("ranks", 1)
        shards = self.record["train_shards"]
        notes = [f"{len(self.rows)} runs on {gpus} × {machine.get('device', 'unknown')}; speedrun {build.get('version')} "
                 f"({build.get('commit')}), CUDA {build.get('cuda')}, cuBLASLt {build.get('cublaslt')}; {len(shards)} training shards "
                 f"with {sum(shard['tokens'] for shard in shards):,} tokens."]  # fmt: skip
        if machine.get("device", "").startswith("CPU"):
            notes.append("CPU processes: times mean nothing here.")
        self.notes(notes + self.record["logged"])

    def runs(self):
        columns = [("clock_s", ".3f", 1), ("reached_at_s", ".3f", 1), ("val_loss", ".5f", 1), ("startup_s", ".1f", 1),
                   ("warmup_s", ".1f", 1), ("validation_s", ".1f", 1), ("total_s", ".1f", 1), ("tokens_per_s", ",.0f", 1),
                   ("mfu", ".1f", 100), ("joules", ".2f", 1e-3)]  # fmt: skip

        def cells(label, find):
            found = [(find(key), form, scale) for key, form, scale in columns]
            return [label] + [number(None if value is None else value * scale, form) for value, form, scale in found]

        rows = [cells(str(row["seed"]), row.get) for row in self.rows]
        rows.append(cells("mean", lambda key: mean(values(self.rows, key))))
        rows.append(cells("standard deviation", lambda key: deviation(values(self.rows, key))))
        self.add("Runs", ["seed", "clock, s", "target reached at, s", "validation loss", "start-up, s", "warm-up, s", "validation, s",
                          "whole, s", "tokens/s", "MFU, %", "energy, kJ"], rows)  # fmt: skip
        reached = len(values(self.rows, "reached_at_s"))
        target = self.record["target_loss"]
        self.notes([self.record["loss"]["rule"], f"{reached} of {len(self.rows)} runs reached the target of {target:g}."])

    def stages(self):
        rows = []
        for row in self.record["stages"]:
            ms, fastest = row["step_ms"], row["fastest_run_ms"]
            spread = "–" if fastest is None else f"{fastest:.2f} to {row['slowest_run_ms']:.2f}"
            rows.append([str(row["stage"]), str(row["steps"]), f"{row['tokens']:,}", number(ms, ".2f"), spread,
                         number(row["tokens"] / ms * 1e3 if ms else None, ",.0f"), f"{100 * row['left_out']:.1f}%"])  # fmt: skip
        head = ["stage", "steps", "tokens a step", "ms a step, median", "medians of the runs", "tokens/s", "left out"]
        self.add("Steps", head, rows)
        notes = ["Left out: the first two steps of a stage, and those next to a validation; then what has no neighbour. Medians of "
                 "pairs of neighbouring steps, since tables update in every second one."]  # fmt: skip
        if all(row["step_ms"] is not None for row in self.record["stages"]):
            seconds = sum(row["steps"] * row["step_ms"] for row in self.record["stages"]) / 1e3
            clock = mean(values(self.rows, "clock_s"))
            notes.append(f"All steps at their medians: {seconds:.2f} s of the mean clock's {clock:.2f} s; what is beyond them is the "
                         "start, the changes of stage and slow steps.")  # fmt: skip
        self.notes(notes)

    def communication(self):
        rows = [[str(row["stage"]), f"{row['step_ms']:.1f}", f"{row['compute_ms']:.1f}", f"{row['communication_ms']:.1f}",
                 f"{row['uncovered_ms']:.1f} ({100 * row['uncovered_ms'] / row['step_ms']:.1f}%)", f"{row['idle_ms']:.1f}"]
                for row in self.record["timeline"]]  # fmt: skip
        self.add("Where a step's time goes, ms, the rank with the most uncovered communication (a short run of its own)",
                 ["stage", "step", "compute", "communication", "uncovered", "idle"], rows)  # fmt: skip

    def beside(self, other):
        """Columns: ours, the other's, ours as a share of the other's."""

        def spread(rows, key, form, scale):
            found = [value * scale for value in values(rows, key)]
            if not found:
                return "–"
            return format(mean(found), form) + (f" ± {format(deviation(found), form)}" if len(found) > 1 else "")

        theirs = other["runs"]
        rows = [["runs", str(len(self.rows)), str(len(theirs)), ""]]
        for name, key, form, scale in (("clock, s", "clock_s", ".3f", 1), ("validation loss", "val_loss", ".5f", 1),
                                       ("tokens/s", "tokens_per_s", ",.0f", 1), ("MFU, %", "mfu", ".1f", 100),
                                       ("energy, kJ", "joules", ".2f", 1e-3)):  # fmt: skip
            means = [mean(values(of, key)) for of in (self.rows, theirs)]
            ratio = "–"
            if None not in means and means[1] != 0:
                ratio = f"{means[0] - means[1]:+.5f}" if key == "val_loss" else f"{means[0] / means[1]:.4f}"
            rows.append([name, spread(self.rows, key, form, scale), spread(theirs, key, form, scale), ratio])
        # Milliseconds compare only for steps of the same size.
        known = {(row.get("stage"), row.get("tokens")): row.get("step_ms") for row in other["stages"]}
        for row in self.record["stages"]:
            ms, their_ms = row["step_ms"], known.get((row["stage"], row["tokens"]))
            ratio = f"{ms / their_ms:.4f}" if ms and their_ms else "–"
            rows.append([f"stage {row['stage']}, ms a step", number(ms, ".2f"), number(their_ms, ".2f"), ratio])
        self.add(f"Beside {other['name']}", ["", "these", "those", "ratio (loss: difference)"], rows)
        clocks = [values(of, "clock_s") for of in (self.rows, theirs)]
        p = welch(*clocks)
        if p is None:
            self.notes(["Fewer than two runs on one side, so no test of the clock."])
            return
        shorter = "shorter" if mean(clocks[0]) < mean(clocks[1]) else "longer"
        verdict = f"these clocks are {shorter}" if p < ALPHA else "no difference is shown"
        told = p_text(p) if p < 1e-4 else f"= {p_text(p)}"
        self.notes([f"Welch's t-test on the clock, two-sided: p {told}: {verdict} (at p < {ALPHA})."])

    def make(self, reference=None):
        if self.rows:
            self.head()
            self.runs()
            self.stages()
            self.communication()
            if reference:
                self.beside(reference)
        if self.record["faults"]:
            self.text.append("**Not as it should be**\n")
            self.notes(self.record["faults"])
        return "\n".join(self.text)


def logged(folders):
    """What the logs say of all runs: how the ranks talk and how a step is cut, and every warning once."""
    found = {}
    for folder in folders:
        for line in (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines():
            if re.match(r"warning: |ranks: |steps \d+ to \d+: ", line):
                found[line] = None
    return list(found)


def gather(out, names, failures):
    """Of the runs in OUT/runs that have come to their end, by name."""
    folders = [out / "runs" / name for name in names]
    found = [(folder, *run) for folder in folders if (run := read_run(folder))]
    rows, results, folders = [row for _, row, _ in found], [result for *_, result in found], [folder for folder, *_ in found]
    faults = list(failures)
    for what, key in (("builds of speedrun", lambda result: result.get("build")), ("machines", lambda result: result.get("machine")),
                      ("sets of shards", lambda result: [shard["content_hash"] for shard in result.get("train_shards", [])])):  # fmt: skip
        if len({json.dumps(key(result), sort_keys=True) for result in results}) > 1:
            faults.append(f"the runs were made with more than one of: {what}")
    for row in rows:
        if row["val_loss"] is None or not math.isfinite(row["val_loss"]):
            faults.append(f"{row['run']}: has no validation loss")
    last = results[-1] if results else {}
    losses, target = values(rows, "val_loss"), last.get("target_loss")
    p, rule = loss_rule(losses, target)
    windows = ((read_json(out / "timeline.json") or {}).get("otherData") or {}).get("windows", [])
    keys = ("step_ms", "compute_ms", "communication_ms", "uncovered_ms", "idle_ms")
    clocks = values(rows, "clock_s")
    return {"target_loss": target, "machine": last.get("machine", {}), "build": last.get("build", {}),
            "train_shards": last.get("train_shards", []), "clock": {"mean": mean(clocks), "deviation": deviation(clocks)},
            "loss": {"mean": mean(losses), "deviation": deviation(losses), "p": p, "passes": None if p is None else p < ALPHA,
                     "rule": rule},
            "runs": rows, "stages": stage_rows(folders), "logged": logged(folders), "faults": faults,
            "timeline": [{"stage": stage + 1} | dict(zip(keys, row)) for stage, row in uncovered_rows(windows).items()]}  # fmt: skip


def write(out, names, failures, reference, say):
    """Prints the tables and leaves them in OUT; the exit code: 1 if something failed or does not belong together."""
    record = gather(out, names, failures)
    if not record["runs"] and not failures:
        record["faults"].append(f"{out}: holds no run that has come to its end")
    text = Report(record).make(reference)
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "record.md").write_text(text, encoding="utf-8")
    with open(out / "record.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(record["runs"])
    say(text)
    say(f"{out}: record.json, record.csv, record.md")
    return 1 if record["faults"] else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--reference", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    try:
        reference = read_reference(args.reference) if args.reference else None
        names = sorted((folder.name for folder in args.out.glob("runs/seed_*") if folder.is_dir()),
                       key=lambda name: int(name.removeprefix("seed_")))  # fmt: skip
        if not names:
            raise Refused(f"{args.out}: no runs here (OUT/runs/seed_1 and so on)")
        return write(args.out, names, [], reference, print)
    except (Refused, OSError) as error:
        print(f"record_report: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
