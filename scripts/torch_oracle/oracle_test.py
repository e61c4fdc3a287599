#!/usr/bin/env python3
"""Tests of the oracle itself, on the CPU in some seconds: gradients against finite differences, optimizers against their definitions,
schedules, batches, vocabulary, files, and that training lowers the loss. Run: python3 scripts/torch_oracle/oracle_test.py"""

import math
import os
import sys
import tempfile
import unittest

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402
import main_track  # noqa: E402
import main_track_parameters  # noqa: E402
import make_main_track_golden as golden  # noqa: E402
import model as gpt  # noqa: E402
import optim  # noqa: E402
import schedule  # noqa: E402
import shards  # noqa: E402
import tensor_file  # noqa: E402
import vocabulary  # noqa: E402

GPT2 = {
    "vocab_size": 300, "vocab_padding": 32, "num_layers": 2, "width": 16, "num_heads": 2, "mlp_hidden": 64,
    "max_positions": 16,
    "norm": "layernorm", "norm_gain": True, "norm_eps": 1e-5, "embedding_norm": False, "positions": "learned", "rotary_base": 1024,
    "rotary_fraction": 0.5, "qk_norm": False, "attention_scale": 0, "activation": "gelu", "bias": True, "tied_head": True,
    "head_bias": False, "softcap": "none", "softcap_value": 15, "window_short": 0, "window_long": 0, "init": "gpt2", "layers": {},
}  # fmt: skip
TRACK = GPT2 | {
    "norm": "rmsnorm", "norm_eps": 2.0**-23, "embedding_norm": True, "positions": "rotary", "qk_norm": True, "attention_scale": 0.12,
    "activation": "relu2", "tied_head": False, "head_bias": True, "softcap": "rational", "init": "zero_projections",
}  # fmt: skip


def group(**changes):
    base = {"optimizer": "adamw", "lr": 3e-3, "lr_multiplier": 1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
            "weight_decay_multiplier": 1, "every": 1, "master": "nearest", "state": "f32"}  # fmt: skip
    return base | changes


def make_config(model, steps=60):
    muon = {"momentum": 0.95, "nesterov": True, "iterations": 12, "coefficients": [[2, -1.5, 0.5]], "eps": 1e-7, "norm_margin": 1}
    optim_ = {name: group() for name in ("embedding", "position", "head", "matrix", "vector")} | {"muon": muon}
    if model is TRACK:
        optim_["matrix"] = group(optimizer="muon", lr=0.025, weight_decay=0.05)
        optim_["embedding"] = group(lr=0.1, master="none", state="bf16")
    lr = {"warmup_steps": 0, "shape": "linear", "cooldown_steps": 42, "final_fraction": 0, "power": 1}
    momentum = {"start": 0.85, "warmup_steps": 0, "final": 0.85, "cooldown_steps": 0}
    schedule = {"steps": steps, "scale": 1, "lr": lr, "momentum": momentum}
    return {"model": model, "optim": optim_, "schedule": schedule, "train": {"grad_clip": 0}}


def random_batch(seed=0, rows=2, T=12):
    tokens = torch.randint(0, 300, (rows, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def random_parameters(model, dtype):
    """No parameter is zero, so that every gradient is checked."""
    generator = torch.Generator().manual_seed(5)
    parameters = {}
    for name, (shape, _) in gpt.parameter_table(model).items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2 + name.endswith("gain")
        parameters[name] = value.to(dtype).requires_grad_()
    return parameters


def gradients(model, dtype, storage):
    parameters = random_parameters(model, storage)
    gpt.loss_sum(model, parameters, *random_batch(), dtype).backward()
    return {name: p.grad for name, p in parameters.items()}


class ModelTest(unittest.TestCase):
    def test_gradients_against_finite_differences(self):
        windowed = TRACK | {"window_short": 3, "layers": {"1": {"window": "short"}}}
        for model in (GPT2, TRACK, windowed, TRACK | {"softcap": "sigmoid", "norm_gain": False}):
            parameters = random_parameters(model, torch.float64)
            inputs, targets = random_batch()
            gpt.loss_sum(model, parameters, inputs, targets, torch.float64).backward()
            for name, parameter in parameters.items():
                direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                h = 1e-5
                with torch.no_grad():
                    moved = [parameters | {name: parameter + sign * h * direction} for sign in (1, -1)]
                    shifted = [gpt.loss_sum(model, p, inputs, targets, torch.float64) for p in moved]
                numeric = ((shifted[0] - shifted[1]) / (2 * h)).item()
                analytic = (parameter.grad * direction).sum().item()
                self.assertAlmostEqual(numeric, analytic, delta=1e-5 * max(1, abs(analytic)), msg=name)

    def test_lower_precision_is_near_the_oracle(self):
        for model in (GPT2, TRACK):
            truth = gradients(model, torch.float64, torch.float64)
            for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 0.1)):
                for name, grad in gradients(model, dtype, torch.float32).items():
                    self.assertLess(compare.relative_error(grad, truth[name]), limit, f"{name} {dtype}")

    def test_attention_sees_neither_the_future_nor_beyond_the_window(self):
        model = TRACK | {"num_layers": 1, "window_short": 3, "layers": {"0": {"window": "short"}}}
        parameters = random_parameters(model, torch.float64)
        inputs, targets = random_batch(rows=1)
        changed = inputs.clone()
        changed[0, 4] = (changed[0, 4] + 1) % 300
        # The loss of the first n tokens alone, so that the difference of two of them is one token's.
        sums = [[gpt.loss_sum(model, parameters, x[:, :n], targets[:, :n], torch.float64).item() for n in range(1, 13)] for x in (inputs, changed)]
        differs = [abs(a - b) > 1e-9 for a, b in zip(np.diff(sums[0], prepend=0), np.diff(sums[1], prepend=0))]
        self.assertEqual(differs, [4 <= t <= 7 for t in range(12)])

    def test_rotation_turns_pairs_half_a_head_apart(self):
        model = GPT2 | {"width": 256, "num_heads": 2}
        cos, sin = gpt.rotary_tables(model, 3, "cpu", torch.float64)
        self.assertEqual(tuple(cos.shape), (3, 64))
        x = torch.zeros(1, 1, 3, 128, dtype=torch.float64)
        x[..., 31] = 1  # ω_31 = 1/1024
        x[..., 40] = 1  # ω_40 = 0
        y = gpt.rotate(x, cos, sin)
        self.assertAlmostEqual(y[0, 0, 2, 31].item(), math.cos(2 / 1024))
        self.assertAlmostEqual(y[0, 0, 2, 95].item(), -math.sin(2 / 1024))
        self.assertEqual(y[0, 0, 2, 40].item(), 1)

    def test_first_loss_of_the_track_is_the_log_of_the_padded_vocabulary(self):
        parameters = gpt.init_parameters(TRACK, 1)
        inputs, targets = random_batch()
        loss = gpt.loss_sum(TRACK, parameters, inputs, targets, torch.float32).item() / inputs.numel()
        self.assertAlmostEqual(loss, math.log(320), places=5)


class MainTrackTest(unittest.TestCase):
    """The golden file's small model."""

    def setUp(self):
        generator = torch.Generator().manual_seed(4)
        self.weights, self.batch = golden.make_weights(generator), golden.make_batch(generator)
        self.prefix = torch.randint(-40, 194, (200,), generator=generator).clamp(min=-1)

    def step(self, next_weights=(1.0,), prefix_weight=0.25):
        stage = schedule.Stage(0, 1, {"prefix_start": 0.25}, window_short=6, window_long=11, frequencies=[1, 0.3, 0.1, 0.02], attention_scale=0.3)
        return schedule.Step(stage, 1.0, 0.0, list(next_weights), prefix_weight, False, False)

    def track(self, dtype=torch.float64, fp8=golden.NO_FP8):
        optim_ = {name: group() for _, name in main_track_parameters.parameter_table(golden.MODEL).values() if name}
        return main_track.MainTrack({"model": golden.MODEL, "fp8": fp8, "optim": optim_}, dtype, self.prefix)

    def losses_and_gradients(self, track, step):
        losses, grads = golden.gradients(track, self.weights, self.batch, step)
        return losses, torch.cat([grad.flatten() for grad in grads.values()])

    def test_gradients_against_finite_differences(self):
        track, step, h = self.track(), self.step(), 1e-7
        _, grads = golden.gradients(track, self.weights, self.batch, step)
        self.assertEqual(self.weights.keys() - grads.keys(), {"bigram.sign"})
        for name, grad in grads.items():
            direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            moved = [golden.leaves(self.weights) for _ in range(2)]
            with torch.no_grad():
                for parameters, sign in zip(moved, (1, -1)):
                    parameters[name] += sign * h * direction
                sums = [track.objective(parameters, self.batch, step, golden.GRAD_SCALE)[1].sum().item() for parameters in moved]
            numeric, analytic = golden.GRAD_SCALE * (sums[0] - sums[1]) / (2 * h), (grad * direction).sum().item()
            self.assertAlmostEqual(numeric, analytic, delta=1e-5 * max(1, abs(analytic)), msg=name)

    def test_blocks_of_queries_and_logits_change_nothing(self):
        truth = self.losses_and_gradients(self.track(), self.step((1, 0.5)))
        sizes = main_track.QUERIES, main_track.LOGITS
        try:
            main_track.QUERIES, main_track.LOGITS = 7, 200 * 9
            blocked = self.losses_and_gradients(self.track(), self.step((1, 0.5)))
        finally:
            main_track.QUERIES, main_track.LOGITS = sizes
        for part, whole in zip(blocked, truth):
            torch.testing.assert_close(part, whole, atol=1e-9, rtol=1e-9)

    def test_lower_precision_is_near_the_oracle(self):
        truth = self.losses_and_gradients(self.track(), self.step())
        for dtype, fp8, limits in ((torch.float32, golden.NO_FP8, (1e-5, 1e-4)), (torch.bfloat16, golden.NO_FP8, (0.02, 0.1))):
            for part, whole, limit in zip(self.losses_and_gradients(self.track(dtype, fp8), self.step()), truth, limits):
                self.assertLess(compare.relative_error(part, whole), limit, dtype)

    def test_late_targets_leave_the_loss_but_not_the_softmax(self):
        targets = torch.tensor([[5, 9, 7, 8]])
        self.prefix[[5, 9, 7, 8]] = torch.tensor([-1, 2, -1, 3])
        tokens, weights, full = self.track().wanted(targets, self.step((1, 0.5, 0.25), 0.3))
        self.assertEqual(tokens[0, :, 1].tolist()[:3], [9, 7, 8])
        self.assertEqual(weights[0].tolist(), [[1, 0.5, 0.25, 0], [1, 0.5, 0.25, 0.3], [1, 0.5, 0, 0], [1, 0, 0, 0.3]])
        torch.testing.assert_close(full[0], torch.tensor([1.75, 2.05, 1.75, 2.05], dtype=torch.float64))

    def test_truncation_never_rounds_up(self):
        x = torch.tensor([1 + 2**-8 + 2**-9, -1 - 2**-8 - 2**-9], requires_grad=True)
        y = main_track.TruncateBf16.apply(x)
        self.assertEqual(y.tolist(), [1, -1])
        y.float().sum().backward()
        self.assertEqual(x.grad.tolist(), [1, 1])

    def test_bigram_hash_of_the_record(self):
        self.assertEqual(main_track.bigram_indices(torch.tensor([[50256, 464]]), 377280).tolist(), [[377279, 86771]])

    def test_yarn_of_the_record(self):
        model = {"rotary_fraction": 0.5, "width": 768, "num_heads": 6, "rotary_base": 1024}
        frequencies, scale = schedule.rotary_frequencies(model), 0.1
        for old, new, expected in (
            (384, 896, (0.1169460, 0.100042, 0.012341, 4.1853e-4)),
            (896, 1408, (0.1275175, 0.079231, 0.007963, 2.6634e-4)),
            (1408, 1664, (0.1317780, 0.073630, 0.006769, 2.2536e-4)),
        ):
            frequencies, scale = schedule.stretch(frequencies, scale, old, new)
            for found, wanted in zip((scale, frequencies[8], frequencies[16], frequencies[31]), expected):
                self.assertAlmostEqual(found / wanted, 1, places=4)
            self.assertEqual(frequencies[0], 1)

    def test_prefix_is_the_longest_shorter_token(self):
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../data/gpt2_vocab")
        tokens, table = vocabulary.token_bytes(folder, 50257), vocabulary.prefix_table(folder, 50257, 50304)
        self.assertEqual(tokens[464], b"The")
        self.assertEqual(tokens[table[464]], b"Th")
        self.assertEqual(table[:256] + table[50256:], [-1] * (256 + 48))
        self.assertNotIn(-1, table[256:50256])


class OptimizerTest(unittest.TestCase):
    def test_newton_schulz_approaches_the_polar_factor(self):
        muon = make_config(TRACK)["optim"]["muon"] | {"iterations": 20}
        for shape in ((6, 6), (12, 5), (5, 12)):
            matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
            torch.testing.assert_close(optim.orthogonalize(matrix, muon, torch.float64), u @ vh, atol=1e-6, rtol=0)
        self.assertEqual(optim.orthogonalize(torch.zeros(4, 4), muon, torch.float32).abs().max().item(), 0)

    def test_adamw_is_pytorchs(self):
        config = make_config(GPT2)
        config["schedule"]["lr"]["shape"] = "constant"
        parameters = {"wte": torch.randn(8, 4).requires_grad_()}
        theirs = parameters["wte"].detach().clone().requires_grad_()
        ours_step = optim.Optimizer(config, parameters, torch.float32)
        theirs_step = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for s in range(5):
            parameters["wte"].grad = torch.randn(8, 4)
            theirs.grad = parameters["wte"].grad.clone()
            ours_step.step(s)
            theirs_step.step()
        torch.testing.assert_close(parameters["wte"], theirs, atol=1e-6, rtol=1e-6)

    def test_muon_treats_q_k_and_v_apart_and_scales_tall_matrices(self):
        config = make_config(TRACK)
        shapes = {"h.0.attn.qkv.weight": (48, 16), "h.0.mlp.up.weight": (64, 16)}
        parameters = {name: torch.zeros(shape).requires_grad_() for name, shape in shapes.items()}
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
        optim.Optimizer(config, parameters, torch.float64).step(0)
        for piece in parameters["h.0.attn.qkv.weight"].detach().chunk(3):
            self.assertAlmostEqual(torch.linalg.svdvals(piece).max().item(), 0.025, places=3)
        self.assertAlmostEqual(torch.linalg.svdvals(parameters["h.0.mlp.up.weight"].detach()).max().item(), 0.05, places=3)

    def test_normuon_evens_out_rows_and_keeps_the_norm(self):
        config = make_config(TRACK)
        config["optim"]["muon"]["beta2"] = 0.9
        config["optim"]["matrix"] = group(optimizer="normuon", lr=0.02, weight_decay=1.5)
        start = torch.randn((12, 8), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        parameters = {"h.0.mlp.up.weight": start.clone().requires_grad_()}
        grad = torch.randn((12, 8), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        parameters["h.0.mlp.up.weight"].grad = grad
        optim.Optimizer(config, parameters, torch.float64).step(0)
        u, _, vh = torch.linalg.svd(grad, full_matrices=False)
        x = u @ vh  # its rows have a mean square m; after one step v = m / 10
        step = x / x.square().mean(1, keepdim=True).sqrt()
        step = step * x.norm() / step.norm()
        scale = math.sqrt(12 / 8)
        wanted = start - 0.02 * scale * step - (step * start >= 0) * start * (1.5 * 0.02 * 0.02 * scale)
        torch.testing.assert_close(parameters["h.0.mlp.up.weight"].detach(), wanted, atol=1e-4, rtol=0)

    def test_adam_of_the_main_track(self):
        config = make_config(GPT2)
        config["schedule"]["lr"]["shape"] = "constant"
        config["optim"]["embedding"] = group(optimizer="adam", lr=0.1, weight_decay=2, every=2, eps=1e-3)
        parameters = {"wte": torch.tensor([[1.0, -1.0]], dtype=torch.float64).requires_grad_()}
        optimizer = optim.Optimizer(config, parameters, torch.float64)
        for s, grad in enumerate((0.5, 0.25)):
            before = parameters["wte"].detach().clone()
            new = torch.full((1, 2), grad, dtype=torch.float64)
            parameters["wte"].grad = new if parameters["wte"].grad is None else parameters["wte"].grad + new
            optimizer.step(s)
            if s == 0:
                self.assertTrue(torch.equal(parameters["wte"], before), "updates are those of odd steps")
        m, root = 0.1 * 0.75, math.sqrt(0.05 * 0.75**2)
        update = 0.1 * math.sqrt(1 - 0.95) / (1 - 0.9) * m / (root + 1e-3)
        wanted = torch.tensor([[1 - update - 0.1**2 * 2, -1 - update]], dtype=torch.float64)
        torch.testing.assert_close(parameters["wte"].detach(), wanted)

    def test_stages_of_the_main_track(self):
        config = make_config(TRACK)
        config["schedule"]["stages"] = {
            "0": {"steps": 423, "lr_multiplier": 1.0}, "1": {"steps": 424, "lr_multiplier": 1.52},
            "2": {"steps": 423, "lr_multiplier": 1.73}, "3": {"steps": 15, "lr_multiplier": 1.0},
        }  # fmt: skip
        config["schedule"]["lr"] |= {"cooldown_steps": 762, "hold_steps": 15, "final_fraction": 0.15}
        config["schedule"]["momentum"] |= {"warmup_steps": 300, "cooldown_steps": 50}
        for s, factor in ((422, 1), (423, 1.52), (508, 1.52), (846, 0.9123), (847, 1.0271), (1269, 0.15207), (1270, 0.15)):
            self.assertAlmostEqual(schedule.lr_factor(config, s), factor, places=4)
        for s, momentum in ((0, 0.85), (150, 0.9), (1235, 0.95), (1284, 0.852)):
            self.assertAlmostEqual(schedule.muon_momentum(config, s), momentum)

    def test_schedule_of_the_track(self):
        config = make_config(TRACK, steps=3250)
        config["schedule"]["lr"]["cooldown_steps"] = 2275
        self.assertEqual(schedule.lr_factor(config, 975), 1)
        self.assertAlmostEqual(schedule.lr_factor(config, 2000), (1 - 2000 / 3250) / 0.7)
        self.assertAlmostEqual(schedule.lr_factor(config, 3249), 1 / 2275)

    def test_training_lowers_the_loss(self):
        for model in (GPT2, TRACK):
            for dtype in (torch.float32, torch.bfloat16):
                config = make_config(model)
                parameters = {name: p.requires_grad_() for name, p in gpt.init_parameters(model, 1).items()}
                optimizer = optim.Optimizer(config, parameters, dtype)
                losses = []
                for s in range(60):
                    inputs, targets = random_batch(seed=s % 2, rows=4)
                    loss = gpt.loss_sum(model, parameters, inputs, targets, dtype) / inputs.numel()
                    loss.backward()
                    optimizer.step(s)
                    losses.append(loss.item())
                self.assertLess(losses[-1], 0.8 * losses[0], f"{model['norm']} {dtype}")


class FileTest(unittest.TestCase):
    def test_tensors_survive_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.safetensors")
            tensors = {"wte": torch.randn(3, 5), "h.0.attn.out.bias": torch.randn(7, dtype=torch.float64), "empty": torch.zeros(0)}
            tensor_file.save(path, tensors, {"loss": 1.5})
            loaded = tensor_file.load(path)
            self.assertEqual(list(loaded), list(tensors))
            for name, tensor in tensors.items():
                self.assertTrue(torch.equal(loaded[name], tensor))
                self.assertEqual(loaded[name].dtype, tensor.dtype)

    def test_rows_of_documents(self):
        with tempfile.TemporaryDirectory() as folder:
            for index, tokens in enumerate(([9, 0, 1, 2, 3, 4, 9, 5, 9, 6, 7, 8], [9, 1, 9, 2, 3, 9, 4, 5, 6])):
                header = np.zeros(256, dtype="<i4")
                header[:3] = 20240520, 1, len(tokens)
                with open(os.path.join(folder, f"train_{index}.bin"), "wb") as file:
                    file.write(header.tobytes() + np.array(tokens, dtype="<u2").tobytes())
            # The first document is cut at 4 tokens; the third where the row is full, at a lone start.
            batches = shards.document_batches(os.path.join(folder, "train_*.bin"), 1, 9, lambda s: ((6, 4), (5, 3))[min(s, 1)])
            (inputs, targets, starts), (inputs2, targets2, _) = batches
            self.assertEqual(inputs.tolist(), [[9, 0, 1, 2, 9, 5]])
            self.assertEqual(targets.tolist(), [[0, 1, 2, 9, 5, 9]])
            self.assertEqual(starts.tolist(), [[0, 0, 0, 0, 4, 4]])
            self.assertEqual((inputs2.tolist(), targets2.tolist()), ([[9, 1, 9, 2, 3]], [[1, 9, 2, 3, 9]]))

    def test_batches_drop_the_rest_of_a_shard(self):
        with tempfile.TemporaryDirectory() as folder:
            for index, length in enumerate((33, 34)):  # 32 + 1 tokens are not enough for two batches of 16: one must be left over
                header = np.zeros(256, dtype="<i4")
                header[:3] = 20240520, 1, length
                with open(os.path.join(folder, f"train_{index}.bin"), "wb") as file:
                    file.write(header.tobytes() + (np.arange(length) + 100 * index).astype("<u2").tobytes())
            starts = [int(x[0, 0]) for x, _ in shards.batches(os.path.join(folder, "train_*.bin"), 16, 8, repeat=2)]
            self.assertEqual(starts, [0, 100, 116] * 2)
            inputs, targets = next(shards.batches(os.path.join(folder, "train_*.bin"), 16, 8))
            self.assertEqual(inputs.flatten().tolist(), list(range(16)))
            self.assertEqual(targets.flatten().tolist(), list(range(1, 17)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
