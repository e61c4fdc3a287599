#!/usr/bin/env python3
"""Runs the training script of modded-nanogpt's record #89 itself, compiled as it is meant to be, on one GPU and any shards, and writes its
losses like speedrun's metrics.jsonl, for a paired figure on the same machine and data.

  git clone https://github.com/KellerJordan/modded-nanogpt DIR
  reference_script.py --source DIR --train PATTERN --val PATTERN --vocab data/gpt2_vocab --out record.jsonl [--repeat 3] [--val-every 250]

The script and its kernels are copied into a working folder with the few changes that another machine and other data need:
  - FlashAttention-3 from the network gives way to PyTorch's built-in FlashAttention (reference_flash.py, somewhat slower), tiktoken to the
    vocabulary's file;
  - places for documents in a row: as many as --documents, where FineWeb needs 128;
  - a constant that the kernels make at their first call exists before compilation, which takes that for a side effect;
  - scales of FP8 products go to memory of their own, where cuBLASLt 13 wants them (abs: a clone is optimised away);
  - losses of training and validation are kept (reference_hooks.py); there is no validation before the first step, and each is compiled
    when it is needed first;
  - a shard is left where it cannot fill all 8 rows of a step, as the script does on 8 GPUs and speedrun on any number; --own-rows: as it
    does on one GPU, where it goes on row by row.
Places are found in the syntax tree, each exactly once: another record is refused. It compiles for some eight minutes before the first step.
--runs N makes N runs from new random weights after one compilation, for the spread, --steps M only the first M steps of each. --weights FILE
starts from given weights (speedrun export), --weights-out FILE keeps the first run's, with --weights-every M again after every M steps (the
clock goes on while it writes).
Lines of --out: {"step", "loss", "train_ms"} for each step (loss: nats per token, all terms, before the update; train_ms: its clock after
it), {"step", "val_loss", "train_ms"}; with several runs "run" as well, from 1.
"""

import argparse
import ast
import glob
import os
import subprocess
import sys
import tempfile

from reference_hooks import assigns

ORACLE = os.path.dirname(os.path.abspath(__file__))


class Source:
    """A file of the record, changed at places that its syntax tree names; everything else stays as it is, to the byte."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            self.text = file.read()
        self.tree = ast.parse(self.text, path)
        self.lines = [0, *(i + 1 for i, byte in enumerate(self.text) if byte == ord("\n"))]
        self.edits = []  # begin, end, new text

    def find(self, what, root, test, expected=1):
        """The nodes below root that the test is true for; another number than expected is refused."""
        found = [node for node in ast.walk(root) if test(node)]
        if len(found) != expected:
            raise SystemExit(f"{self.path}: {len(found)} places for {what}, expected {expected}: not the record this script is for")
        return found if expected > 1 else found[0]

    def span(self, node):
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def code(self, node):
        begin, end = self.span(node)
        return self.text[begin:end].decode()

    def replace(self, node, new):
        self.edits.append((*self.span(node), new))

    def before(self, node, *statements):
        begin, _ = self.span(node)
        self.edits.append((begin, begin, "".join(f"{line}\n{' ' * node.col_offset}" for line in statements)))

    def after(self, node, *statements):
        _, end = self.span(node)
        self.edits.append((end, end, "".join(f"\n{' ' * node.col_offset}{line}" for line in statements)))

    def changed(self):
        text = self.text
        for begin, end, new in sorted(self.edits, reverse=True):
            text = text[:begin] + new.encode() + text[end:]
        return text.decode()


def calls(name):
    """A statement that calls a method or function of that name."""
    return lambda node: isinstance(node, ast.Expr) and is_call(node.value, name)


def is_call(node, name):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def changed_script(path, args):
    source = Source(path)
    tree = source.tree
    places = source.find("the number of documents", tree, assigns("TRAIN_MAX_NUM_DOCS")).value
    for tokens, least in zip(places.keys, places.values):
        source.replace(least, str(max(least.value, args.documents * tokens.value // 49152)))
    source.replace(source.find("the interval of validations", tree, assigns("val_loss_every")).value, str(args.val_every))
    if not args.own_rows:
        shard = source.find("the shard", tree, lambda node: isinstance(node, ast.ClassDef) and node.name == "Shard")
        source.after(shard, "import reference_hooks", "reference_hooks.whole_steps(Shard)")

    def compiles_model(node):
        value = getattr(node, "value", None)
        return isinstance(node, (ast.Assign, ast.AnnAssign)) and is_call(value, "compile") and getattr(value.args[0], "id", None) == "model"

    source.before(source.find("compilation", tree, compiles_model), "import triton_kernels", "triton_kernels._get_dummy_f32(device)")

    warm_up = source.find("the warm-up", tree, lambda node: isinstance(node, ast.For) and getattr(node.iter, "id", None) == "warmup_steps")
    for statement in source.find(
        "validation in the warm-up", warm_up, lambda node: isinstance(node, ast.With) or calls("eval")(node) or calls("train")(node), 3
    ):
        source.replace(statement, "pass")

    def trains(node):
        return isinstance(node, ast.For) and getattr(node.target, "id", None) == "step" and node is not warm_up and "range" in source.code(node.iter)

    loop = source.find("the training loop", ast.Module([n for n in tree.body if isinstance(n, ast.For)], []), trains)
    loaders = [node for node in tree.body if assigns("train_loader")(node)]
    begin = source.find("the loader before the training loop", ast.Module(loaders[-1:], []), assigns("train_loader"))
    source.before(begin, "import reference_hooks", "kept = reference_hooks.Losses(model, training_manager)")
    source.before(loop.body[0], "if kept.stops(step): break")
    source.after(loop, "reference_hooks.more_runs(globals())")
    asks = source.find("whether to validate", loop, lambda node: isinstance(node, ast.If) and "val_loss_every" in source.code(node.test)).test
    source.replace(asks, f"({source.code(asks)}) and step > 0")
    source.after(source.find("the backward pass", loop, calls("backward")), "kept.add(loss)")
    source.after(source.find("the validation's end", loop, calls("reduce")), "kept.validation(step, val_loss, training_time_ms)")
    clock = source.find("the clock of a step", loop, assigns("approx_training_time_ms"))
    source.after(clock, "kept.step(step, grad_accum_steps, training_manager.batch_size, approx_training_time_ms, step == train_steps - 1)")
    return source.changed()


def changed_kernels(path):
    """Scales that a function is given, in its FP8 products."""
    source = Source(path)

    def scales(function):
        if not isinstance(function, ast.FunctionDef):
            return []
        names = {argument.arg for argument in function.args.args}
        products = [node for node in ast.walk(function) if is_call(node, "_scaled_mm")]
        values = [keyword.value for node in products for keyword in node.keywords if keyword.arg in ("scale_a", "scale_b")]
        return [value for value in values if isinstance(value, ast.Name) and value.id in names]

    function = source.find("a product with given scales", source.tree, scales)
    for scale in scales(function):
        source.replace(scale, f"{scale.id}.abs()")
    return source.changed()


def prepare(folder, args):
    """Script, kernels, stand-ins and links to the shards; the files that it writes."""
    texts = {
        "train_gpt.py": changed_script(os.path.join(args.source, "train_gpt.py"), args),
        "triton_kernels.py": changed_kernels(os.path.join(args.source, "triton_kernels.py")),
        "dc_triton_kernels.py": Source(os.path.join(args.source, "dc_triton_kernels.py")).changed(),
        "kernels.py": "from reference_flash import get_kernel\n",
        "tiktoken.py": "from reference_hooks import get_encoding\n",
    }
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    data = os.path.join(folder, "data", "fineweb10B")
    os.makedirs(data)
    for kind, pattern, times in (("train", args.train, args.repeat), ("val", args.val, 1)):
        shards = sorted(glob.glob(pattern))
        if not shards:
            raise SystemExit(f"no shard matches {pattern}")
        for i, shard in enumerate(shards * times):
            os.symlink(os.path.abspath(shard), os.path.join(data, f"fineweb_{kind}_{i:06d}.bin"))
    return sorted(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="checkout of KellerJordan/modded-nanogpt")
    parser.add_argument("--train", required=True, help="glob of train shards")
    parser.add_argument("--val", required=True, help="glob of validation shards")
    parser.add_argument("--vocab", required=True, help="folder with GPT-2's vocab.bpe")
    parser.add_argument("--out", required=True, help="file for the losses")
    parser.add_argument("--repeat", type=int, default=1, help="times that the train shards are read in order (default 1)")
    parser.add_argument("--documents", type=int, default=192, help="places for documents in a row of 49,152 tokens (default 192)")
    parser.add_argument("--val-every", type=int, default=250, help="steps between validations, 0: only the last (default 250)")
    parser.add_argument("--steps", type=int, default=0, help="steps of a run, 0: all (default 0)")
    parser.add_argument("--runs", type=int, default=1, help="runs, each from new random weights (default 1)")
    parser.add_argument("--weights", help="weights to start from (safetensors; default: drawn by the reference)")
    parser.add_argument("--weights-out", help="file for the weights that the first run starts from, as train.init_weights takes them")
    parser.add_argument("--weights-every", type=int, default=0, help="more such files, after so many steps and after all; {} in their name: steps")
    parser.add_argument("--own-rows", action="store_true", help="shards are left as the script does it on one GPU")
    args = parser.parse_args()
    if args.weights and args.runs > 1:
        raise SystemExit("--weights: several runs start from new random weights; leave out --runs")
    if args.weights and not os.path.isfile(args.weights):
        raise SystemExit(f"--weights {args.weights}: no such file")
    if args.weights_every and "{}" not in (args.weights_out or ""):
        raise SystemExit("--weights-every: --weights-out needs a {} where the number of steps goes")
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder, args)
        one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
        paths = [ORACLE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        told = {"REFERENCE_VOCAB": os.path.abspath(args.vocab), "REFERENCE_LOSSES": os.path.abspath(args.out)}
        told |= {"REFERENCE_RUNS": str(args.runs), "REFERENCE_STEPS": str(args.steps), "REFERENCE_WEIGHTS_EVERY": str(args.weights_every)}
        told |= {"REFERENCE_START": os.path.abspath(args.weights)} if args.weights else {}
        told |= {"REFERENCE_WEIGHTS": os.path.abspath(args.weights_out)} if args.weights_out else {}
        environment = {**os.environ, **one, **told, "DATA_PATH": folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment.pop("DISABLE_FP8", None)
        sys.exit(subprocess.run([sys.executable, "-u", "train_gpt.py"], cwd=folder, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
