#!/usr/bin/env python3
"""Plots one or several runs: training and validation loss, gradient norm, learning rates and speed, into one PNG.

  scripts/plot_run.py runs/ID [runs/OTHER …] [--out plot.png] [--x step|tokens|clock_s]
  scripts/plot_run.py runs/ID [runs/OTHER …] --against runs/BASE        losses less those of the same steps of another run

A run is its folder or its metrics.jsonl (or that of reference_script.py). Needs matplotlib.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

SMOOTHED = 25  # steps
X_LABELS = {"step": "step", "tokens": "training tokens", "clock_s": "clock (s)"}


def read_run(path):
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path}: no such file")
    steps, validations = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                print(f"{path}:{number}: not a JSON object, left out (a run that was killed may end so)", file=sys.stderr)
                continue
            (validations if "val_loss" in row else steps).append(row)
    if not steps and not validations:
        raise SystemExit(f"{path}: no metrics yet")
    # A validation line carries no token count: it has that of the last step before it.
    tokens = {row["step"]: row["tokens"] for row in steps if row.get("tokens") is not None}
    for row in validations:
        row.setdefault("tokens", max((count for step, count in tokens.items() if step <= row["step"]), default=0))
    return path.parent.name or str(path), steps, validations


def column(rows, x, y):
    pairs = [(row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def moving_mean(values, length):
    """Means of so many neighbours; the first ones, and the last, of fewer."""
    half = length // 2
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def differences(rows, base, key):
    """Steps that both have, and the rows' values less the base's: what makes one batch harder than another falls away."""
    of_base = dict(zip(*column(base, "step", key)))
    shared = [row for row in rows if row["step"] in of_base]
    steps, values = column(shared, "step", key)
    return steps, [value - of_base[step] for step, value in zip(steps, values)]


def plot_differences(base_path, paths, out):
    name, base, base_validations = read_run(base_path)
    figure, (training, validation) = plt.subplots(1, 2, figsize=(13, 4.5))
    for path in paths:
        other, rows, validations = read_run(path)
        steps, less = differences(rows, base, "loss")
        if not steps:
            raise SystemExit(f"{path}: no step in common with {base_path}")
        training.plot(steps, moving_mean(less, SMOOTHED), linewidth=1, label=other)
        validation.plot(*differences(validations, base_validations, "val_loss"), marker="o", markersize=4, label=other)
    for axis, loss in ((training, f"training loss (means of {SMOOTHED} steps)"), (validation, "validation loss")):
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set(title=f"{loss} less that of {name}", xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    print(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders or metrics.jsonl files")
    parser.add_argument("--out", default="plot.png")
    parser.add_argument("--x", choices=X_LABELS, default="step")
    parser.add_argument("--target", type=float, help="validation loss to mark")
    parser.add_argument("--against", metavar="RUN", help="plot differences of losses to this run instead")
    args = parser.parse_args()
    if args.against:
        return plot_differences(args.against, args.runs, args.out)

    figure, axes = plt.subplots(2, 2, figsize=(13, 8))
    (loss, speed), (norm, rates) = axes
    for index, path in enumerate(args.runs):
        name, steps, validations = read_run(path)
        color = f"C{index % 10}"
        loss.plot(*column(steps, args.x, "loss"), color=color, linewidth=0.8, alpha=0.5)
        loss.plot(*column(validations, args.x, "val_loss"), color=color, marker="o", markersize=3, label=name)
        norm.plot(*column(steps, args.x, "grad_norm"), color=color, linewidth=0.8)
        speed.plot(*column(steps, args.x, "tokens_per_s"), color=color, linewidth=0.8)
        groups = sorted({group for row in steps for group in (row.get("lr") or {})})
        for style, group in zip(["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))], groups):
            rows = [{args.x: row.get(args.x), "lr": row["lr"].get(group)} for row in steps if row.get("lr")]
            rates.plot(*column(rows, args.x, "lr"), color=color, linestyle=style, label=group if index == 0 else None)
    if args.target is not None:
        loss.axhline(args.target, color="grey", linewidth=0.8, linestyle="--")
    loss.set_ylabel("loss (nats per token); dots: validation")
    loss.legend(fontsize="small")
    norm.set_ylabel("gradient norm")
    norm.set_yscale("log")
    rates.set_ylabel("learning rate")
    rates.set_yscale("log")
    if rates.get_legend_handles_labels()[0]:
        rates.legend(fontsize="small")
    speed.set_ylabel("tokens/s")
    speed.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.set_xlabel(X_LABELS[args.x])
        axis.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(args.out, dpi=130)
    print(args.out)


if __name__ == "__main__":
    main()
