#!/usr/bin/env python3
"""Helpers of scaling.sh: `shards` makes token shards where there is no corpus, `watch` runs a command and tells how it ended.

    scaling_run.py shards FOLDER [--tokens 12000000] [--vocab 50257] [--seed 1]
    scaling_run.py watch OUT.json [--limit 60] [--gpu] -- COMMAND…
"""

import argparse
import array
import itertools
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import time


def make_shard(path, tokens, vocab, seed):
    """Documents of log-normal length (median 400), ids by Zipf's law, so that they touch about as many rows of a table as text."""
    rng = random.Random(seed)
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(vocab - 1)))
    ids = array.array("H", rng.choices(range(vocab - 1), cum_weights=weights, k=tokens))
    start = 0
    while start < tokens:
        ids[start] = vocab - 1  # end of text starts a document
        start += 2 + int(rng.lognormvariate(6, 1))
    if sys.byteorder == "big":
        ids.byteswap()
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        ids.tofile(file)


def shards(args):
    args.folder.mkdir(parents=True, exist_ok=True)
    make_shard(args.folder / "synthetic_train_000.bin", args.tokens, args.vocab, args.seed)
    make_shard(args.folder / "synthetic_val_000.bin", max(args.tokens // 4, 1 << 16), args.vocab, args.seed + 1)
    return 0


def session_states(session):
    """pid -> state letter ('R', 'S', 'T', …) of the session's processes; zombies are gone."""
    states = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = pathlib.Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
        if int(fields[3]) == session and fields[0] not in "ZX":
            states[int(entry)] = fields[0]
    return states


def gpu_memory_mib():
    """Used on all GPUs together; None without nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, timeout=20, check=True)  # fmt: skip
        return sum(int(line) for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def end_session(session):
    for pid in session_states(session):  # stopped ones too: this signal does not wait for them to go on
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def watch(args):
    """Seconds count from the moment that a process of the command has died or stands still (state T) until all of them are gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the command is ended below, as at any other exit
    before = gpu_memory_mib() if args.gpu else None
    with open(args.out.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(args.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True)  # fmt: skip
    session, began, fault, known, in_time = process.pid, time.monotonic(), None, set(), True
    try:
        while True:
            process.poll()
            states = session_states(session)
            now = time.monotonic()
            if fault is None and (known - states.keys() or "T" in states.values()):
                fault = now
            known |= states.keys()
            if not states:
                break
            if now - began > args.limit:
                in_time = False
                break
            time.sleep(0.02)
    finally:
        end_session(session)
    code = process.wait()
    result = {"command": args.command, "seconds": now - began, "in_time": in_time, "exit_code": code if code >= 0 else 128 - code,
              "seconds_after_failure": None if fault is None else now - fault}  # fmt: skip
    if args.gpu and before is not None:
        # The driver gives memory back some moments after a process is gone.
        after, deadline = gpu_memory_mib(), time.monotonic() + 10
        while after is not None and after > before + 64 and time.monotonic() < deadline:
            time.sleep(0.25)
            after = gpu_memory_mib()
        result |= {"gpu_mib_before": before, "gpu_mib_after": after}
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0 if in_time else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("shards")
    make.add_argument("folder", type=pathlib.Path)
    make.add_argument("--tokens", type=int, default=12_000_000)
    make.add_argument("--vocab", type=int, default=50257)
    make.add_argument("--seed", type=int, default=1)
    make.set_defaults(run=shards)
    look = verbs.add_parser("watch")
    look.add_argument("out", type=pathlib.Path)
    look.add_argument("--limit", type=float, default=60, help="seconds, then everything is killed (default: 60)")
    look.add_argument("--gpu", action="store_true", help="look at the GPUs' memory before and after")
    look.set_defaults(run=watch)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    args.command = sys.argv[split + 1 :]
    if args.verb == "watch" and not args.command:
        parser.error("watch: a command is needed after --")
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()
