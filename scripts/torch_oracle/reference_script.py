#!/usr/bin/env python3
"""Runs the training script of modded-nanogpt's record #89 itself, compiled as it is meant to be, on one GPU and any shards, and writes its
losses like speedrun's metrics.jsonl, for a paired figure on the same machine and data.

  git clone https://github.com/KellerJordan/modded-nanogpt DIR
  reference_script.py --source DIR --train PATTERN --val PATTERN --vocab data/gpt2 --out record.jsonl [--repeat 3] [--val-every 250]

The script and its kernels are copied into a working folder with the few changes that another machine and other data need:
  - FlashAttention-3 from the network gives way to PyTorch's built-in FlashAttention (somewhat slower), tiktoken to the vocabulary's file;
  - places for documents in a row: as many as --documents, where FineWeb needs 128;
  - a constant that the kernels make at their first call exists before compilation, which takes that for a side effect;
  - scales of FP8 products go to memory of their own, where cuBLASLt 13 wants them (abs: a clone is optimised away);
  - losses of training are kept, validation losses have more digits; there is no validation before the first step, and each is compiled
    when it is needed first;
  - a shard is left where it cannot fill all 8 rows of a step, as the script does on 8 GPUs and speedrun on any number; --own-rows: as it
    does on one GPU, where it goes on row by row.
Each change must fit the source exactly once: another record is refused. It compiles for some eight minutes before the first step.
Lines of --out: {"step", "loss", "train_ms"} for each step (loss: nats per token, all terms, before the update; train_ms: its clock after
it), {"step", "val_loss", "train_ms"}.
"""

import argparse
import glob
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

# The kernels' import finds this in the working folder.
KERNELS = '''
import types

import torch


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size):
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
        scale=softmax_scale, window_size_left=window_size[0], window_size_right=window_size[1])[0]


def get_kernel(*_, **__):
    return types.SimpleNamespace(flash_attn_interface=types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
'''

TIKTOKEN = '''
import sys
import types

sys.path.append({oracle!r})
import vocabulary


def get_encoding(_):
    tokens = vocabulary.token_bytes({vocab!r}, 50257)
    return types.SimpleNamespace(_mergeable_ranks={{token: i for i, token in enumerate(tokens)}})
'''

NEXT_BATCH = "    def next_batch(self, num_tokens_local: int, max_seq_len: int):\n        self._maybe_switch()\n        n = len(self.bos_idx)\n"
WHOLE_STEPS = NEXT_BATCH + '''        self.rows = getattr(self, "rows", 0)
        if self.rows % 8 == 0:
            ahead = self.i
            for _ in range(8):
                length = 0
                while length <= num_tokens_local:
                    if ahead >= n:
                        raise StopIteration("not enough for the 8 rows of a step")
                    begin = self.bos_idx[ahead]
                    ahead += 1
                    end = self.bos_idx[ahead] if ahead < n else self.size
                    length += min(end, begin + max_seq_len, begin + num_tokens_local - length + 1) - begin
        self.rows += 1
'''
WARM_VALIDATION = '''    model.eval()
    with torch.no_grad():
        inputs, targets, cum_seqlens, bigram_inputs, _ = next(val_loader)
        model(inputs, targets, cum_seqlens, bigram_inputs, training_manager.get_forward_args()).mean()
    model.train()
'''
BACKWARD = "        training_manager.sparse_index_share(step)\n        loss.backward()\n        del loss\n    training_manager.step_optimizers(step)\n"
LAST_OF_STEP = "    model.quantize_mlp_fp8(bootstrap_down=(step < 16))\n"
CLOCK = "    approx_training_time_ms = training_time_ms + 1000 * (time.perf_counter() - t0)\n"
TELL = CLOCK + '''    told.append((step, step_loss, training_manager.batch_size, approx_training_time_ms))
    if step % 25 == 24 or step == train_steps - 1:
        for told_step, told_loss, told_tokens, told_ms in told:
            losses_file.write(json.dumps({"step": told_step, "loss": told_loss.item() * grad_accum_steps / told_tokens, "train_ms": told_ms}) + "\\n")
        losses_file.flush()
        told.clear()
'''
BEGIN = "# begin training\ntrain_steps = training_schedule.total_steps\n"
COMPILE = "model: nn.Module = torch.compile(model, dynamic=False, fullgraph=True)\n"
VALIDATED = "        dist.reduce(val_loss, 0, op=dist.ReduceOp.AVG)\n"


def changes(args):
    """(old, new) of train_gpt.py, of triton_kernels.py."""
    script = [
        ("TRAIN_MAX_NUM_DOCS = {16384: 64, 32768: 96, 49152: 128}",
         f"TRAIN_MAX_NUM_DOCS = {{n: max(least, {args.documents} * n // 49152) for n, least in ((16384, 64), (32768, 96), (49152, 128))}}"),
        ("val_loss_every: int = 250", f"val_loss_every: int = {args.val_every}"),
        ("args.val_loss_every > 0 and step % args.val_loss_every == 0", "args.val_loss_every > 0 and step > 0 and step % args.val_loss_every == 0"),
        ("val_loss:{val_loss:.4f}", "val_loss:{val_loss:.6f}"),
        (WARM_VALIDATION, ""),
        (BACKWARD + LAST_OF_STEP, BACKWARD.replace("        loss.backward()\n", "        loss.backward()\n        step_loss = step_loss + loss.detach()\n")
         + LAST_OF_STEP),
        ("    for idx in range(grad_accum_steps):\n        inputs, targets, cum_seqlens, bigram_inputs, bigram_cpu = train_loader.send(training_manager.train_loader_send_args)\n",
         "    step_loss = 0\n    for idx in range(grad_accum_steps):\n        inputs, targets, cum_seqlens, bigram_inputs, bigram_cpu = train_loader.send(training_manager.train_loader_send_args)\n"),
        (CLOCK, TELL),
        (COMPILE, "import triton_kernels\ntriton_kernels._get_dummy_f32(device)\n" + COMPILE),
        (BEGIN, BEGIN + f"import json\ntold, losses_file = [], open({os.path.abspath(args.out)!r}, 'w')\n"),
        (VALIDATED, VALIDATED + '        losses_file.write(json.dumps({"step": step, "val_loss": val_loss.item(), "train_ms": training_time_ms}) + "\\n")\n'
         "        losses_file.flush()\n"),
    ]  # fmt: skip
    if not args.own_rows:
        script.append((NEXT_BATCH, WHOLE_STEPS))
    kernels = [("scale_a=activation_scale,\n                scale_b=W2_scale,", "scale_a=activation_scale.abs(),\n                scale_b=W2_scale.abs(),")]
    return script, kernels


def changed(path, pairs):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for old, new in pairs:
        if text.count(old) != 1:
            raise SystemExit(f"{path}: {text.count(old)} places for a change, expected 1: not the record this script is for: {old.strip()[:80]!r}")
        text = text.replace(old, new)
    return text


def prepare(folder, args):
    """Script, kernels, stand-ins and links to the shards; the files that it writes."""
    script, kernels = changes(args)
    texts = {
        "train_gpt.py": changed(os.path.join(args.source, "train_gpt.py"), script),
        "triton_kernels.py": changed(os.path.join(args.source, "triton_kernels.py"), kernels),
        "dc_triton_kernels.py": changed(os.path.join(args.source, "dc_triton_kernels.py"), []),
        "kernels.py": KERNELS,
        "tiktoken.py": TIKTOKEN.format(oracle=os.path.dirname(os.path.abspath(__file__)), vocab=os.path.abspath(args.vocab)),
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
    parser.add_argument("--own-rows", action="store_true", help="shards are left as the script does it on one GPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder, args)
        one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
        environment = {**os.environ, **one, "DATA_PATH": folder}
        environment.pop("DISABLE_FP8", None)
        sys.exit(subprocess.run([sys.executable, "-u", "train_gpt.py"], cwd=folder, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
