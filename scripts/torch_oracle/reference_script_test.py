#!/usr/bin/env python3
"""Tests of reference_script.py on a made-up source, without PyTorch. Run: python3 -B scripts/torch_oracle/reference_script_test.py"""

import argparse
import ast
import json
import os
import pathlib
import sys
import types
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import reference_hooks  # noqa: E402
import reference_script  # noqa: E402
from script_case import Folder  # noqa: E402

# What the script looks for, without all else.
SCRIPT = """TRAIN_MAX_NUM_DOCS = {16384: 64, 49152: 128}
class Shard:
    pass
class Settings:
    val_loss_every: int = 250
model: object = torch.compile(model)
for step in warmup_steps:
    model.eval()
    with quiet():
        validate()
    model.train()
    work()
train_loader = rows_of(shards)
for step in range(train_steps + 1):
    last_step = step == train_steps
    if last_step or step % args.val_loss_every == 0:
        dist.reduce(val_loss, 0)
    for row in rows:
        loss.backward()
        del loss
    approx_training_time_ms = now()
"""
KERNELS = """def forward(x, own_scale, weight_scale):
    return torch._scaled_mm(x, x, scale_a=own_scale, scale_b=weight_scale)
def backward(x):
    made = new(x)
    return torch._scaled_mm(x, x, scale_a=made, scale_b=made)
"""


# A whole script in small: the loss is the weight, which each step raises by the optimizer's state (1 at first) and the row (0, 10, …).
RUNS = """
model: object = Model()
model = Compiled(model)
training_manager = Manager(model)
warm_ups = 0
for step in [0]:
    warm_ups += 1
kept = Losses(training_manager)
train_loader = iter(range(10, 100, 10))
for step in range(5):
    if kept.stops(step): break
    kept.add(model.loss())
    kept.step(step, 1, 1, 0, False)
    training_manager.step(next(train_loader))
more_runs(globals())
"""


class Number(float):
    detach = item = lambda self: Number(self)
    __add__ = __radd__ = lambda self, other: Number(float(self) + float(other))
    __mul__ = lambda self, other: Number(float(self) * other)


class Model:
    def __init__(self, weight):
        if isinstance(weight, Model):
            self._orig_mod = weight
        self.weight, self.calls = weight, []

    def state_dict(self):
        return self.weight

    def load_state_dict(self, weight):
        self.weight = weight

    def loss(self):
        return Number(self._orig_mod.weight)

    def zero_grad(self, set_to_none):
        self.calls.append("zero_grad")

    def quantize_mlp_fp8(self, bootstrap_down):
        self.calls.append("quantize")

    def train(self):
        self.calls.append("train")


class Manager:
    def __init__(self, model):
        self.model, self.state = model, [1]

    def get_state(self):
        return list(self.state)

    def reset(self, state):
        self.state = state

    def step(self, row):
        self.model._orig_mod.weight += row + self.state[0]
        self.state[0] += 1


class Documents:
    """Rows of whole documents that all have ten tokens."""

    def __init__(self, count):
        self.count, self.i = count, 0

    def next_batch(self, row_tokens, _):
        begin = self.i
        if begin + -(-row_tokens // 10) > self.count:
            raise StopIteration
        self.i = begin + -(-row_tokens // 10)
        return begin


def arguments(folder, **others):
    values = {"source": str(folder / "source"), "train": str(folder / "train_*.bin"), "val": str(folder / "val_*.bin"), "vocab": "vocab",
              "out": "record.jsonl", "repeat": 2, "documents": 192, "val_every": 250, "own_rows": False}  # fmt: skip
    return argparse.Namespace(**values | others)


class ReferenceScriptTest(Folder):
    def setUp(self):
        super().setUp()
        os.mkdir(self.folder / "source")
        for name, text in {"train_gpt": SCRIPT, "triton_kernels": KERNELS, "dc_triton_kernels": "# é\n"}.items():
            (self.folder / "source" / f"{name}.py").write_text(text, encoding="utf-8")
        for name in ("train_001", "train_000", "val_000"):
            (self.folder / f"{name}.bin").touch()

    def prepared(self, **others):
        target = self.folder / "work"
        os.mkdir(target)
        reference_script.prepare(target, arguments(self.folder, **others))
        return target

    def test_every_change_is_made(self):
        target = self.prepared(val_every=123)
        text = (target / "train_gpt.py").read_text(encoding="utf-8")
        ast.parse(text)
        for part in ("{16384: 64, 49152: 192}", "val_loss_every: int = 123", "(last_step or step % args.val_loss_every == 0) and step > 0:",
                     "reference_hooks.whole_steps(Shard)\n", "_get_dummy_f32(device)\nmodel: object = torch.compile(model)",
                     "    work()\nimport reference_hooks\nkept = reference_hooks.Losses(model, training_manager)\ntrain_loader = rows_of(shards)\n",
                     "+ 1):\n    if kept.stops(step): break\n    last_step = ", "= now()\n    kept.step(step, ", "\n        kept.validation(step, val_loss, training_time_ms)\n",
                     "\n        loss.backward()\n        kept.add(loss)\n        del loss\n", "\nreference_hooks.more_runs(globals())"):  # fmt: skip
            self.assertIn(part, text)
        for part in ("model.eval()", "model.train()", "validate()"):
            self.assertNotIn(part, text)
        self.assertIn("    work()\n", text)
        kernels = (target / "triton_kernels.py").read_text(encoding="utf-8")
        self.assertEqual(kernels, KERNELS.replace("=own_scale", "=own_scale.abs()").replace("=weight_scale", "=weight_scale.abs()"))
        self.assertEqual((target / "dc_triton_kernels.py").read_text(encoding="utf-8"), "# é\n")

    def test_rows_of_one_gpu(self):
        self.assertNotIn("whole_steps", (self.prepared(own_rows=True) / "train_gpt.py").read_text(encoding="utf-8"))

    def test_stand_ins_are_python(self):
        target = self.prepared()
        for path in (target / "kernels.py", target / "tiktoken.py", HERE / "reference_flash.py"):
            ast.parse(path.read_text(encoding="utf-8"))

    def test_shards_in_order_and_again(self):
        data = self.prepared() / "data" / "fineweb10B"
        ends = [os.path.basename(os.readlink(data / name)) for name in sorted(os.listdir(data)) if "_train_" in name]
        self.assertEqual(ends, ["train_000.bin", "train_001.bin"] * 2)
        self.assertEqual(len([name for name in os.listdir(data) if "_val_" in name]), 1)

    def test_other_sources_are_refused(self):
        script = self.folder / "source" / "train_gpt.py"
        clock = "    approx_training_time_ms = now()\n"
        for changed in (SCRIPT.replace(clock, ""), SCRIPT + clock):
            script.write_text(changed, encoding="utf-8")
            with self.assertRaisesRegex(SystemExit, "train_gpt.py: [02] places for the clock of a step"):
                reference_script.prepare(self.folder, arguments(self.folder))

    def test_missing_shards(self):
        with self.assertRaisesRegex(SystemExit, "no shard matches .*none"):
            self.prepared(val=str(self.folder / "none_*.bin"))

    def test_a_shard_is_left_where_it_lacks_the_rows_of_a_step(self):
        class Whole(Documents):
            pass

        reference_hooks.whole_steps(Whole)
        starts = {}
        for kind in (Documents, Whole):
            shard, starts[kind] = kind(100), []  # a row of 35 tokens takes 4 documents
            try:
                while True:
                    starts[kind].append(shard.next_batch(35, 1000))
            except StopIteration:
                pass
        self.assertEqual(starts[Documents], list(range(0, 100, 4)))
        self.assertEqual(starts[Whole], starts[Documents][:24])  # three steps of eight rows

    def losses(self, runs, steps, manager=None):
        told = {"REFERENCE_LOSSES": str(self.folder / "losses.jsonl"), "REFERENCE_RUNS": str(runs), "REFERENCE_STEPS": str(steps),
                "REFERENCE_WEIGHTS_EVERY": "0"}  # fmt: skip
        with unittest.mock.patch.dict(os.environ, told):
            return reference_hooks.Losses(None, manager or unittest.mock.Mock())

    def test_more_runs_from_new_weights(self):
        script = self.folder / "train_gpt.py"
        script.write_text(RUNS, encoding="utf-8")
        drawn = iter(range(100, 1000, 100))
        names = {"__file__": str(script), "Model": lambda: Model(next(drawn)), "Compiled": Model, "Manager": Manager,
                 "Losses": lambda manager: self.losses(3, 2, manager), "more_runs": reference_hooks.more_runs}  # fmt: skip
        exec(compile(RUNS, str(script), "exec"), names)
        names["kept"].file.close()
        lines = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()]
        # Every run starts from its own weights, with a fresh optimizer and loader; nothing of the warm-up is done again.
        self.assertEqual([(line["run"], line["step"], line["loss"]) for line in lines],
                         [(1, 0, 100), (1, 1, 111), (2, 0, 200), (2, 1, 211), (3, 0, 300), (3, 1, 311)])  # fmt: skip
        self.assertEqual((names["warm_ups"], names["model"].calls), (1, ["zero_grad", "quantize", "train"] * 2))

    def test_weights_from_a_file_and_into_files(self):
        model, files = Model(Model(7)), {"start": 3}
        tensors = types.SimpleNamespace(load=files.get, save=lambda path, weights, keep_bf16: files.update({path: weights}))
        names = types.SimpleNamespace(weights=lambda module: module.weight, set_weights=Model.load_state_dict)
        told = {"REFERENCE_LOSSES": str(self.folder / "losses.jsonl"), "REFERENCE_RUNS": "1", "REFERENCE_STEPS": "0",
                "REFERENCE_START": "start", "REFERENCE_WEIGHTS": "after{}", "REFERENCE_WEIGHTS_EVERY": "2"}  # fmt: skip
        with (
            unittest.mock.patch.dict(sys.modules, tensor_file=tensors, reference_names=names),
            unittest.mock.patch.dict(os.environ, told),
        ):
            kept = reference_hooks.Losses(model, None)
            self.assertEqual(model.calls, ["quantize"])
            for step in range(5):
                kept.add(model.loss())
                model._orig_mod.weight += 1
                kept.step(step, 1, 1, 0, step == 4)
        kept.file.close()
        self.assertEqual(files, {"start": 3, "after0": 3, "after2": 5, "after4": 7, "after5": 8})

    def test_flags_that_make_no_sense(self):
        given = ["reference_script.py", "--source", "s", "--train", "t", "--val", "v", "--vocab", "v", "--out", "o"]
        for flags, part in ((["--weights", "w", "--runs", "2"], "leave out --runs"), (["--weights", "absent"], "absent: no such file"),
                            (["--weights-every", "5"], "needs a {}"), (["--weights-every", "5", "--weights-out", "w"], "needs a {}")):  # fmt: skip
            with unittest.mock.patch.object(sys, "argv", given + flags), self.assertRaisesRegex(SystemExit, part):
                reference_script.main()

    def test_losses_of_every_step(self):
        class Loss:
            def __init__(self, value):
                self.value = value

            def detach(self):
                return self.value

        class Sum(float):
            def item(self):
                return float(self)

            def __add__(self, other):
                return Sum(float(self) + other)

        kept = self.losses(runs=1, steps=0)
        for step in range(27):
            kept.sum = Sum(kept.sum)
            for _ in range(8):
                kept.add(Loss(512.0 * step))  # tokens' losses over 8
            kept.step(step, 8, 32768, 10.0 * step, step == 26)
        kept.validation(27, Sum(3.5), 270.0)
        kept.file.close()
        lines = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()]
        self.assertEqual(lines[:-1], [{"step": s, "loss": 1.0 * s, "train_ms": 10.0 * s} for s in range(27)])
        self.assertEqual(lines[-1], {"step": 27, "val_loss": 3.5, "train_ms": 270.0})


if __name__ == "__main__":
    unittest.main()
