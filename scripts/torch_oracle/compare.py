#!/usr/bin/env python3
"""Compares speedrun with the PyTorch oracle.

  compare.py grads  --ours OURS.safetensors --bf16 TORCH_BF16.safetensors --oracle TORCH_FP32.safetensors [--limit 1.5]
      relative error of every parameter's gradient against the FP32 oracle, ours and PyTorch's, and their ratio; fails above the limit.
      Several files each (the same number, in the same order): root mean squares over them
  compare.py grads  --ours OURS.safetensors --oracle TORCH.safetensors [--max-error 1e-4]
      relative error alone
  compare.py losses --ours metrics.jsonl --torch losses.jsonl [--max-mean 0.005] [--max-abs 1e-4] [--plot FILE.png] [--csv FILE.csv]
      two loss curves, step by step; fails above a limit that is given; with --again MORE.jsonl … beside it how far each of PyTorch's own
      runs is from the mean of the others, and ours from the mean of all; --within-spread fails where ours is further than any of them
"""

import argparse
import csv
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tensor_file  # noqa: E402


def relative_error(value, truth):
    """‖value − truth‖ / ‖truth‖; where the truth is exactly zero: 0 if the value is zero too, else infinite."""
    error, size = (value.double() - truth.double()).norm().item(), truth.double().norm().item()
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size if math.isfinite(error) else math.inf


def compare_grads(args):
    """Errors over several batches are root mean squares: in one batch a small error of PyTorch's is often luck."""
    groups = list(zip(args.ours, args.oracle, args.bf16 or args.oracle, strict=True))
    errors = {}  # name -> [(norm, ours, PyTorch's)] over the batches
    for ours_path, oracle_path, bf16_path in groups:
        ours, oracle = tensor_file.load(ours_path), tensor_file.load(oracle_path)
        bf16 = tensor_file.load(bf16_path) if args.bf16 else oracle
        missing = [name for name in oracle if name not in ours or name not in bf16]
        if missing:
            raise SystemExit(f"gradients missing in {ours_path} or {bf16_path}: {', '.join(missing)}")
        for name, truth in oracle.items():
            if ours[name].shape != truth.shape:
                raise SystemExit(f"{ours_path}: {name} is {tuple(ours[name].shape)}, the oracle's is {tuple(truth.shape)}")
            row = truth.norm().item(), relative_error(ours[name], truth), relative_error(bf16[name], truth)
            errors.setdefault(name, []).append(row)
    print(f"{'parameter':28} {'norm':>11} {'ours':>11}" + (f" {'torch bf16':>11} {'ratio':>7}  of each batch" if args.bf16 else ""))
    limit = args.limit if args.bf16 else args.max_error
    failures, worst = [], 0.0
    for name, rows in errors.items():
        norm, our_error, torch_error = (math.sqrt(sum(x * x for x in column) / len(column)) for column in zip(*rows))
        measure = ratio(our_error, torch_error) if args.bf16 else our_error
        line = f"{name:28} {norm:11.4e} {our_error:11.4e}"
        if args.bf16:
            line += f" {torch_error:11.4e} {measure:7.3f}  " + " ".join(f"{ratio(o, t):5.2f}" for _, o, t in rows)
        worst = max(worst, measure)
        if not measure <= limit:
            failures.append(name)
            line += "  <-- above the limit"
        print(line)
    kind = "ratio" if args.bf16 else "error"
    print(f"{len(errors)} parameters, worst {kind} {worst:.3g}, limit {limit:g}: {f'{len(failures)} above it' if failures else 'all within it'}")
    return not failures


def ratio(ours, torchs):
    return ours / torchs if torchs > 0 else (0.0 if ours == 0 else math.inf)


def read_losses(path):
    """step -> training loss; lines without one (validation) are passed over."""
    losses = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row.get("loss") is not None:
                losses[row["step"]] = row["loss"]
    return losses


def distance(run, others, steps):
    """Mean |difference| of a loss curve from the mean of others."""
    return sum(abs(run[step] - sum(other[step] for other in others) / len(others)) for step in steps) / max(1, len(steps))


def ascii_plot(curves, width=72, height=16):
    """A curve per letter, losses upwards, steps to the right."""
    points = [(step, loss) for curve in curves.values() for step, loss in curve.items()]
    steps, losses = [p[0] for p in points], [p[1] for p in points]
    low, high = min(losses), max(losses)
    span, last = (high - low) or 1, (max(steps) - min(steps)) or 1
    rows = [[" "] * width for _ in range(height)]
    for letter, curve in curves.items():
        for step, loss in curve.items():
            row = rows[round((high - loss) / span * (height - 1))]
            column = round((step - min(steps)) / last * (width - 1))
            row[column] = "*" if row[column] not in (" ", letter) else letter
    for i, row in enumerate(rows):
        print(f"{high - span * i / (height - 1):8.4f} |{''.join(row)}")
    print(f"{'':8}  step {min(steps)} … {max(steps)}; {', '.join(curves)}; * both")


def compare_losses(args):
    ours, torch_ = read_losses(args.ours), read_losses(args.torch)
    ours = {step + args.offset: loss for step, loss in ours.items()}
    steps = sorted(ours.keys() & torch_.keys())
    if not steps:
        raise SystemExit(f"no step is in both {args.ours} and {args.torch}")
    differences = [ours[step] - torch_[step] for step in steps]
    mean = sum(differences) / len(steps)
    mean_abs = sum(map(abs, differences)) / len(steps)
    worst = max(range(len(steps)), key=lambda i: abs(differences[i]))
    print(f"{len(steps)} steps in both ({len(ours)} ours, {len(torch_)} of PyTorch)")
    print(f"mean difference {mean:+.6f}, mean |difference| {mean_abs:.6f}, largest {differences[worst]:+.6f} at step {steps[worst]}")
    passed = True
    if args.again:
        runs = [torch_, *map(read_losses, args.again)]
        steps_of_all = [step for step in steps if all(step in run for run in runs)]
        apart = [distance(run, runs[:i] + runs[i + 1 :], steps_of_all) for i, run in enumerate(runs)]
        ours_apart = distance(ours, runs, steps_of_all)
        print(f"{len(runs)} runs of PyTorch, {len(steps_of_all)} steps: mean |difference| of each from the mean of the others", end=" ")
        print(", ".join(f"{x:.6f}" for x in apart) + f"; ours from the mean of all {ours_apart:.6f}")
        if args.within_spread:
            passed = ours_apart <= max(apart)
            print(f"ours is {'within' if passed else 'OUTSIDE'} the spread of PyTorch's own runs")
    print(f"last step {steps[-1]}: ours {ours[steps[-1]]:.6f}, PyTorch {torch_[steps[-1]]:.6f}")
    ascii_plot({"o": {s: ours[s] for s in steps}, "t": {s: torch_[s] for s in steps}})
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "ours", "torch", "difference"])
            writer.writerows([step, ours[step], torch_[step], ours[step] - torch_[step]] for step in steps)
    if args.plot:
        plot_losses(args.plot, args.title, steps, ours, torch_, differences)
    for name, limit, value in (("mean |difference|", args.max_mean, mean_abs), ("largest |difference|", args.max_abs, abs(differences[worst]))):
        if limit is not None:
            passed &= value <= limit
            print(f"{name} {value:.6g}, limit {limit:g}: {'within it' if value <= limit else 'ABOVE IT'}")
    return passed


def plot_losses(path, title, steps, ours, torch_, differences):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9, 6.5), height_ratios=[3, 1])
    top.plot(steps, [torch_[step] for step in steps], label="PyTorch", linewidth=2.5, alpha=0.5)
    top.plot(steps, [ours[step] for step in steps], label="speedrun", linewidth=1)
    top.set_ylabel("training loss (nats per token)")
    top.set_title(title)
    top.legend()
    bottom.plot(steps, differences, linewidth=1)
    bottom.axhline(0, color="grey", linewidth=0.5)
    bottom.set_ylabel("speedrun − PyTorch")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    grads = modes.add_parser("grads")
    grads.add_argument("--ours", nargs="+", required=True)
    grads.add_argument("--bf16", nargs="+", help="PyTorch's own BF16 gradients, whose error ours is measured by")
    grads.add_argument("--oracle", nargs="+", required=True)
    grads.add_argument("--limit", type=float, default=1.5, help="with --bf16: largest allowed ratio")
    grads.add_argument("--max-error", type=float, default=1e-4, help="without: largest allowed relative error")
    losses = modes.add_parser("losses")
    losses.add_argument("--ours", required=True)
    losses.add_argument("--torch", required=True)
    losses.add_argument("--again", nargs="+", help="more runs of PyTorch's, for its spread")
    losses.add_argument("--within-spread", action="store_true", help="with --again: fail where ours is further away than any of them")
    losses.add_argument("--offset", type=int, default=0, help="added to our step numbers")
    losses.add_argument("--max-mean", type=float, help="largest allowed mean |difference|")
    losses.add_argument("--max-abs", type=float, help="largest allowed |difference|")
    losses.add_argument("--plot", help="PNG to write")
    losses.add_argument("--csv", help="CSV to write")
    losses.add_argument("--title", default="same initial weights, same batches")
    args = parser.parse_args()
    if args.mode == "grads" and len({len(args.ours), len(args.oracle), len(args.bf16 or args.oracle)}) != 1:
        parser.error("--ours, --bf16 and --oracle need the same number of files")
    if not (compare_grads if args.mode == "grads" else compare_losses)(args):
        sys.exit(1)


if __name__ == "__main__":
    main()
