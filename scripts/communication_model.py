#!/usr/bin/env python3
"""What several GPUs cost the Main Track (modded-nanogpt record #89), on paper: bytes and milliseconds of communication in a step,
and the speed-up that is left. Prints the tables of docs/performance.md, "Several GPUs".

    scripts/communication_model.py [--reduce-scatter 246] [--all-gather 255] [--latency-us 40] [--nic-gbit 400] [--nics 1] …

Formulas, for n = g·H ranks, g on each of H hosts, and S bytes that every rank holds:

    inside a host   t = S·(g−1)/g / bus bandwidth (its definition for reduce-scatter and all-gather)
    flat ring       t = S·(n−1)/n / network rate of a host: of n edges H cross hosts, one out of each host
    two levels      t = S·(g−1)/g / bus bandwidth + S·(H−1)/H / network rate of a host: every GPU first gets its host's sum of
                    1/g of the buffer, then exchanges that with its peers on the other hosts
    step            (one-GPU step − NorMuon)/n · (1 + imbalance) + NorMuon of the fullest rank + what does not divide + uncovered

What travels: FP32 gradients in a reduce-scatter, BF16 values in an all-gather; matrices under NorMuon in every step, whole ones to a
rank and so padded to a multiple of n; tables under Adam in every second step; four small collectives a step, which cost latency
alone. Covered communication still takes multiprocessors away from the products: --overlap-cost of its time.

Sources of the defaults. Bus bandwidths and latency: NCCL 2.28 between two H200s of one host, 580 MB, NVLink multicast off; eight of
one host are taken to have the same. One-GPU steps: a full run of 1,285 steps on one H200. NorMuon: `speedrun bench muon`. Touched
rows and attended pairs: counted on a training corpus of mixed English text. Network rates, latency between hosts, what does not
divide and overlap cost are assumptions."""

import argparse
import dataclasses
import math

C, F, V = 768, 3072, 50304  # width, hidden width of the MLPs, padded vocabulary
BIGRAM_ROWS = 377280
# (number, elements of each, ms of one GPU's update of them all)
MATRICES = ((60, 256 * C, 0.332), (20, C * C, 0.646), (22, F * C, 2.073))
VALUE_TABLES = 5
STEPS = (423, 424, 438)  # the extension has the tokens of stage 3
TOKENS = (131072, 262144, 393216)
# Rows of the bigram table that a rank touches between two updates, by its tokens in them: means over ten pieces of the corpus.
TOUCHED = ((2048, 1564), (4096, 3085), (8192, 5755), (16384, 10500), (32768, 19412), (65536, 34657), (98304, 48609),
           (131072, 62694), (262144, 107235), (393216, 137204))  # fmt: skip
# Attended pairs of the fullest rank over the mean, less 1, where 8 rows of a step are shared by so many ranks (more ranks: as 8).
PAIR_IMBALANCE = {1: 0, 2: 0.023, 4: 0.059, 8: 0.107}


@dataclasses.dataclass
class Machine:
    reduce_scatter: float  # GB/s
    all_gather: float
    latency_ms: float
    host_latency_ms: float  # more for every doubling of hosts
    network: float  # GB/s of a host
    gpus: int
    hosts: int = 1
    two_levels: bool = True

    @property
    def ranks(self):
        return self.gpus * self.hosts

    def ms(self, bytes_, bandwidth):
        if self.hosts > 1 and not self.two_levels:
            return bytes_ * (self.ranks - 1) / self.ranks / self.network * 1e-6
        inside = bytes_ * (self.gpus - 1) / self.gpus / bandwidth
        return (inside + bytes_ * (self.hosts - 1) / self.hosts / self.network) * 1e-6

    def latency(self):
        return self.latency_ms + self.host_latency_ms * math.log2(self.hosts)


@dataclasses.dataclass
class Wire:
    """What the ranks send. sparse: of the bigram table's gradient touched rows alone, each to its owner directly."""

    gradient_bytes: int = 4
    sparse: bool = False
    every: int = 2  # steps between two updates of the tables


def touched_rows(tokens):
    """Interpolated between the counted ones; never more than tokens."""
    low = TOUCHED[0]
    if tokens <= low[0]:
        return low[1] * tokens / low[0]
    for high in TOUCHED[1:]:
        if tokens <= high[0]:
            return low[1] + (high[1] - low[1]) * (tokens - low[0]) / (high[0] - low[0])
        low = high
    return low[1]


def matrix_elements(ranks):
    return sum(math.ceil(count / ranks) * ranks * each for count, each, _ in MATRICES)


def muon_ms(ranks):
    return sum(math.ceil(count / ranks) / count * ms for count, _, ms in MATRICES)


def table_elements(stage):
    """(all, those whose gradient is complete only at the end of the backward pass): the bigram table and the matrix of the
    embedding, which up to stage 3 is the head as well."""
    late = BIGRAM_ROWS * C + V * C
    return late + VALUE_TABLES * V * C + (V * C if stage == 2 else 0), late


def sparse_ms(machine, wire, stage):
    rows = touched_rows(wire.every * TOKENS[stage] // machine.ranks)
    sent = rows * (wire.gradient_bytes * C + 4)
    inside = sent * (machine.gpus - 1) / machine.ranks / machine.reduce_scatter
    return (inside + machine.gpus * sent * (machine.hosts - 1) / machine.hosts / machine.network) * 1e-6


def communication(machine, wire, stage, with_tables):
    """ms of a step: (all, what no compute can cover)."""
    matrices = matrix_elements(machine.ranks)
    reduced = machine.ms(wire.gradient_bytes * matrices, machine.reduce_scatter)
    gathered = machine.ms(2 * matrices, machine.all_gather)
    small = 4 * machine.latency()
    total = reduced + gathered + small
    # The first layer's gradients come last, and its weights are needed first.
    left = (reduced + gathered) / 11 + small
    if not with_tables:
        return total, left
    elements, late = table_elements(stage)
    bigram = BIGRAM_ROWS * C
    dense = machine.ms(wire.gradient_bytes * bigram, machine.reduce_scatter)
    bigram_ms = min(dense, sparse_ms(machine, wire, stage)) if wire.sparse else dense
    late_reduced = bigram_ms + machine.ms(wire.gradient_bytes * (late - bigram), machine.reduce_scatter)
    late_gathered = machine.ms(2 * late, machine.all_gather)
    early = machine.ms(wire.gradient_bytes * (elements - late), machine.reduce_scatter)
    total += late_reduced + late_gathered + early + machine.ms(2 * (elements - late), machine.all_gather)
    # NorMuon runs beside them.
    left += max(late_reduced + late_gathered - muon_ms(machine.ranks), 0)
    return total, left


@dataclasses.dataclass
class Step:
    compute: float
    plain: float  # a step without the tables, communication
    tables: float  # a step with them
    mean: float
    built: float  # nothing covered
    covered: float  # all covered that can be
    uncovered: float


def step(machine, wire, stage, args):
    one = args.step_ms[stage]
    n = machine.ranks
    imbalance = args.attention_share * PAIR_IMBALANCE[min(n, 8)]
    compute = (one - muon_ms(1) - args.fixed_ms) / n * (1 + imbalance) + muon_ms(n) + args.fixed_ms
    plain, plain_left = communication(machine, wire, stage, False)
    tables, tables_left = communication(machine, wire, stage, True)
    mean = (plain * (wire.every - 1) + tables) / wire.every
    left = (plain_left * (wire.every - 1) + tables_left) / wire.every
    # What is to be covered needs compute that covers it.
    uncovered = max(left, mean - compute * 0.9)
    covered = compute + uncovered + args.overlap_cost * (mean - uncovered)
    return Step(compute, plain, tables, mean, compute + mean, covered, uncovered)


def whole_run(machine, wire, args, attribute):
    return sum(steps * getattr(step(machine, wire, stage, args), attribute) for stage, steps in enumerate(STEPS)) / 1e3


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_bytes():
    print("**What travels**, MB of one copy:\n")
    rows = []
    for name, elements, when in (
        ("matrices under NorMuon", matrix_elements(1), "every step"),
        ("bigram table", BIGRAM_ROWS * C, "every second step"),
        ("5 value tables", VALUE_TABLES * V * C, "every second step"),
        ("head; from stage 3 on the embedding too", V * C, "every second step"),
    ):  # fmt: skip
        each = "each " if "head" in name else ""
        rows.append([name, f"{each}{elements / 1e6:.1f} M", f"{4 * elements / 1e6:,.0f}", f"{2 * elements / 1e6:,.0f}", when])
    table(["what", "elements", "gradients, FP32, reduce-scatter", "values, BF16, all-gather", "when"], rows)


def print_one_host(args):
    print("**One host**, ms a step:\n")
    rows = []
    for gpus in args.gpus:
        machine = machine_of(args, gpus=gpus)
        for stage in range(3):
            s = step(machine, Wire(), stage, args)
            one = args.step_ms[stage]
            rows.append([str(gpus), str(stage + 1), f"{s.compute:.1f}", f"{s.plain:.1f}", f"{s.tables:.1f}",
                         f"{s.mean:.1f} ({100 * s.mean / s.built:.1f}%)", f"{one / s.built:.2f}×",
                         f"{s.uncovered:.1f} ({100 * s.uncovered / s.covered:.1f}%)", f"{one / s.covered:.2f}×"])  # fmt: skip
    table(["GPUs", "stage", "compute", "communication, step without tables", "with tables", "mean", "speed-up, nothing covered",
           "left uncovered", "speed-up, rest covered"], rows)  # fmt: skip
    one = sum(steps * ms for steps, ms in zip(STEPS, args.step_ms)) / 1e3
    parts = [f"{one:.0f} s on one GPU"]
    for gpus in args.gpus:
        machine = machine_of(args, gpus=gpus)
        built, covered = (whole_run(machine, Wire(), args, name) for name in ("built", "covered"))
        parts.append(f"on {gpus} {built:.0f} s ({built / one:.3f} of it) with nothing covered,"
                     f" {covered:.0f} s ({covered / one:.3f}) with the rest covered")  # fmt: skip
    print("Clock of 1,285 steps: " + "; ".join(parts) + ".\n")


def print_hosts(args):
    print(f"**Several hosts** of {args.gpus[-1]} GPUs, {args.nics} × {args.nic_gbit:g} Gb/s each, mean ms a step:\n")
    rows = []
    for hosts in args.hosts:
        for stage in (0, 2):
            flat = step(machine_of(args, hosts=hosts, two_levels=False), Wire(), stage, args)
            two = step(machine_of(args, hosts=hosts), Wire(), stage, args)
            best = step(machine_of(args, hosts=hosts), Wire(2, True, 4), stage, args)
            alone = step(machine_of(args), Wire(), stage, args).covered
            rows.append([f"{hosts} ({hosts * args.gpus[-1]})", str(stage + 1), f"{two.compute:.1f}", f"{flat.mean:.0f}",
                         f"{two.mean:.0f}", f"{alone / two.covered:.2f}×", f"{best.mean:.0f}",
                         f"{alone / best.covered:.2f}×"])  # fmt: skip
    table(["hosts (GPUs)", "stage", "compute", "communication, flat ring", "two levels", "speed against one host",
           "two levels and fewer bytes (next table)", "speed against one host"], rows)  # fmt: skip


def print_remedies(args):
    variants = (
        ("flat ring", False, Wire()),
        ("two levels", True, Wire()),
        ("+ touched rows of the bigram table alone", True, Wire(4, True)),
        ("+ BF16 gradients", True, Wire(2, True)),
        ("+ tables every 4th step", True, Wire(2, True, 4)),
    )
    print("**What fewer bytes would buy**, stage 3, mean ms of communication a step, each row on top of those above:\n")
    rows = []
    for name, two_levels, wire in variants:
        cells = [f"{step(machine_of(args, hosts=h, two_levels=two_levels), wire, 2, args).mean:.1f}" for h in (1, *args.hosts)]
        rows.append([name, *cells])
    wide = argparse.Namespace(**{**vars(args), "nics": args.nics * args.gpus[-1]})
    cells = [f"{step(machine_of(wide, hosts=h), Wire(2, True, 4), 2, args).mean:.1f}" for h in (1, *args.hosts)]
    rows.append([f"+ a network card for every GPU ({wide.nics} × {args.nic_gbit:g} Gb/s)", *cells])
    table(["", "1 host", *(f"{h} hosts" for h in args.hosts)], rows)


def machine_of(args, gpus=None, hosts=1, two_levels=True):
    return Machine(args.reduce_scatter, args.all_gather, args.latency_us / 1e3, args.host_latency_us / 1e3,
                   args.nic_gbit * args.nics / 8, gpus or args.gpus[-1], hosts, two_levels)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduce-scatter", type=float, default=246, help="bus bandwidth inside a host, GB/s (default: 246)")
    parser.add_argument("--all-gather", type=float, default=255, help="the same (default: 255)")
    parser.add_argument("--latency-us", type=float, default=40, help="a small collective inside a host, µs (default: 40)")
    parser.add_argument("--host-latency-us", type=float, default=25, help="more for every doubling of hosts, µs (default: 25)")
    parser.add_argument("--nic-gbit", type=float, default=400, help="a network card, Gb/s (default: 400)")
    parser.add_argument("--nics", type=int, default=1, help="network cards of a host (default: 1)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 8], choices=(2, 4, 8),
                        help="GPUs of a host; several hosts have the last number (default: 2 8)")  # fmt: skip
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16], help="default: 2 4 8 16")
    parser.add_argument("--step-ms", type=float, nargs=3, default=[189, 384, 587],
                        help="one GPU, stages 1 to 3 (default: 189 384 587)")  # fmt: skip
    parser.add_argument("--fixed-ms", type=float, default=1.2,
                        help="of a step, does not divide: zeroing gradients, FP8 weights, tails of kernels (default: 1.2)")  # fmt: skip
    parser.add_argument("--attention-share", type=float, default=0.15,
                        help="part of a step that grows with attended pairs, which ranks have unequally (default: 0.15)")  # fmt: skip
    parser.add_argument("--overlap-cost", type=float, default=0.1, help="compute lost to covered communication (default: 0.1)")
    args = parser.parse_args()
    print_bytes()
    print_one_host(args)
    print_hosts(args)
    print_remedies(args)


if __name__ == "__main__":
    main()
