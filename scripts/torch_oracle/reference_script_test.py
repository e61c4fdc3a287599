#!/usr/bin/env python3
"""Tests of reference_script.py on a made-up source, without PyTorch. Run: python3 -B scripts/torch_oracle/reference_script_test.py"""

import argparse
import ast
import os
import pathlib
import sys
import unittest

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent.parent)]
import reference_script  # noqa: E402
from script_case import Folder  # noqa: E402

# As the record's loader goes through a shard whose documents begin at bos_idx.
SHARD = (
    "class Shard:\n    def __init__(self, bos_idx, size):\n        self.bos_idx, self.size, self.i = bos_idx, size, 0\n\n"
    "    def _maybe_switch(self):\n        pass\n\n"
    + reference_script.NEXT_BATCH
    + """        begin = idx = self.i
        length = 0
        while length <= num_tokens_local:
            if idx >= n:
                raise StopIteration
            cur = self.bos_idx[idx]
            idx += 1
            end = min(self.bos_idx[idx] if idx < n else self.size, cur + max_seq_len, cur + num_tokens_local - length + 1)
            length += end - cur
        self.i = idx
        return begin
"""
)


def arguments(folder, **others):
    values = {"source": str(folder / "source"), "train": str(folder / "train_*.bin"), "val": str(folder / "val_*.bin"), "vocab": "vocab",
              "out": "record.jsonl", "repeat": 2, "documents": 192, "val_every": 250, "own_rows": False}  # fmt: skip
    return argparse.Namespace(**values | others)


class ReferenceScriptTest(Folder):
    def setUp(self):
        super().setUp()
        script, kernels = reference_script.changes(arguments(self.folder))
        os.mkdir(self.folder / "source")
        texts = {"train_gpt": script, "triton_kernels": kernels, "dc_triton_kernels": []}
        for name, pairs in texts.items():
            text = "# start\n" + "# between\n".join(old + "\n" for old, _ in pairs)
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
        for part in ("val_loss_every: int = 123", "step > 0 and step % args.val_loss_every", "val_loss:.6f", "self.rows % 8", "told.append("):
            self.assertIn(part, text)
        self.assertNotIn(reference_script.WARM_VALIDATION, text)
        self.assertIn("W2_scale.abs()", (target / "triton_kernels.py").read_text(encoding="utf-8"))

    def test_stand_ins_are_python(self):
        target = self.prepared()
        for name in ("kernels", "tiktoken"):
            ast.parse((target / f"{name}.py").read_text(encoding="utf-8"))

    def test_shards_in_order_and_again(self):
        data = self.prepared() / "data" / "fineweb10B"
        ends = [os.path.basename(os.readlink(data / name)) for name in sorted(os.listdir(data)) if "_train_" in name]
        self.assertEqual(ends, ["train_000.bin", "train_001.bin"] * 2)
        self.assertEqual(len([name for name in os.listdir(data) if "_val_" in name]), 1)

    def test_other_sources_are_refused(self):
        script = self.folder / "source" / "train_gpt.py"
        text = script.read_text(encoding="utf-8")
        for changed in (text.replace(reference_script.CLOCK, ""), text + reference_script.CLOCK):
            script.write_text(changed, encoding="utf-8")
            with self.assertRaisesRegex(SystemExit, "train_gpt.py: [02] places for a change"):
                reference_script.prepare(self.folder, arguments(self.folder))

    def test_missing_shards(self):
        with self.assertRaisesRegex(SystemExit, "no shard matches .*none"):
            self.prepared(val=str(self.folder / "none_*.bin"))

    def test_a_shard_is_left_where_it_lacks_the_rows_of_a_step(self):
        starts = {}
        for name, source in (("own", SHARD), ("whole", SHARD.replace(reference_script.NEXT_BATCH, reference_script.WHOLE_STEPS))):
            module = {}
            exec(source, module)
            shard = module["Shard"](list(range(0, 1000, 10)), 1000)  # 100 documents of 10 tokens; a row of 35 takes 4
            starts[name] = []
            try:
                while True:
                    starts[name].append(shard.next_batch(35, 1000))
            except StopIteration:
                pass
        self.assertEqual(starts["own"], list(range(0, 100, 4)))
        self.assertEqual(starts["whole"], starts["own"][:24])  # three steps of eight rows


if __name__ == "__main__":
    unittest.main()
