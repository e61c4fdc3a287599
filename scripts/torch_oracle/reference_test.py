#!/usr/bin/env python3
"""Tests of what stands in for the reference's kernels, on the CPU in some seconds. Run: python3 scripts/torch_oracle/reference_test.py"""

import math
import os
import sys
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import main_track  # noqa: E402
import reference_kernels as kernels  # noqa: E402

CU_SEQLENS = torch.tensor([0, 50, 51, 130, 192, 192, 192], dtype=torch.int32)  # padded with the row's length


def document_starts(T):
    documents = torch.searchsorted(CU_SEQLENS.long(), torch.arange(T), right=True) - 1
    return CU_SEQLENS.long()[documents][None]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(value, inputs, seed=9):
    return torch.autograd.grad((value * random(*value.shape, seed=seed)).sum(), inputs)


class AttentionTest(unittest.TestCase):
    def check(self, actual, expected, inputs, tolerance=2e-5):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
        for ours, theirs in zip(gradients(actual, inputs), gradients(expected, inputs)):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)

    def test_windows_and_documents(self):
        T, H, D = 192, 3, 16  # three blocks of 64
        q, k, v = inputs = [random(T, H, D, seed=i).requires_grad_() for i in range(3)]
        for window in (5, 20, 63, 64, 150):
            mask = main_track.visible(document_starts(T), window, (0, T), (0, T))
            parts = [x.transpose(0, 1)[None] for x in inputs]
            expected = main_track.softmax_attention(*parts, mask, 0.3)[0].transpose(0, 1)
            actual = kernels.varlen_attention(q, k, v, CU_SEQLENS, CU_SEQLENS, T, T, causal=True, softmax_scale=0.3, window_size=(window, 0))
            self.check(actual, expected, inputs)

    def test_dc(self):
        T, H, D, window = 192, 6, 8, 24
        q, k, v = (random(1, T, H, D, seed=i).requires_grad_() for i in range(3))
        w1, w2 = (random(1, T, H, seed=3 + i).requires_grad_() for i in range(2))
        base = random(T, H, D, seed=7).requires_grad_()
        mask = main_track.visible(document_starts(T), window - 1, (0, T), (0, T))
        short = main_track.dc_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, 0.2, w1.transpose(1, 2))
        expected = base + w2[0][..., None] * short[0].transpose(0, 1)
        actual = kernels.dc_attention_add_base(base, q, k, v, (w1, w2), None, scaling=0.2, window=window, seq_lens=CU_SEQLENS)
        self.check(actual, expected, [base, q, k, v, w1, w2])

    def test_refuses_what_it_cannot(self):
        q = random(16, 1, 4)
        with self.assertRaises(NotImplementedError):
            kernels.varlen_attention(q, q, q, CU_SEQLENS, CU_SEQLENS, 16, 16, causal=True, softmax_scale=1, window_size=(4, 4))


class LossTest(unittest.TestCase):
    def test_gradient_by_the_logits(self):
        n, V, A, B, C = 7, 11, 23.0, 5.0, 7.5
        logits = (3 * random(n, V)).requires_grad_()
        targets = torch.randint(0, V, (n,), generator=torch.Generator().manual_seed(1))
        weights, prefixes, prefix_weight = torch.tensor([1.0, 0.5, 0.25]), torch.tensor([2, -1, 0, 5, -1, 3, 9]), torch.tensor([0.25])
        z = A * torch.sigmoid((logits + B) / C)
        lse = z.logsumexp(-1)
        expected, full = [], []
        for i in range(n):
            aims = [(targets[i + k], w) for k, w in enumerate(weights) if i + k < n]
            aims += [(prefixes[i], prefix_weight[0])] * (prefixes[i] >= 0)
            expected.append(sum(w * (lse[i] - z[i, aim]) for aim, w in aims))
            # The softmax keeps the weights of targets beyond the end.
            full.append(expected[-1] + sum(weights[k] for k in range(len(weights)) if i + k >= n) * lse[i])
        losses, grad = kernels.capped_loss(logits.detach(), targets, weights, prefixes, prefix_weight, A, B, C)
        torch.testing.assert_close(losses, torch.stack(expected).detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(grad, torch.autograd.grad(sum(full), logits)[0], atol=1e-5, rtol=0)


class MlpTest(unittest.TestCase):
    def test_forward_result_and_its_gradient(self):
        a, b, grad = random(9, 4).requires_grad_(), random(6, 4, seed=1), random(9, 5, seed=2)
        down = random(6, 5, seed=3)
        post = kernels.linear_relu_square(a.detach(), b)
        pre = a @ b.T
        pre.retain_grad()
        out = pre.relu().square()
        torch.testing.assert_close(post, out.detach())
        ((out @ down) * grad).sum().backward()
        torch.testing.assert_close(kernels.linear_relu_square(grad, down, aux=post), pre.grad)

    def test_down_weights_take_the_scale_of_the_pass_before(self):
        weights, out = random(2, 4, 6), torch.empty(2, 6, 4, dtype=torch.float8_e4m3fn)
        following, used = torch.tensor([0.5, 0.25]), torch.zeros(2)
        kernels.quantize_transpose_mlp_down_weights(weights, out, following, used, None)
        self.assertEqual(used.tolist(), [0.5, 0.25])
        torch.testing.assert_close(following, weights.abs().amax((1, 2)) * (1.12 / 448))
        torch.testing.assert_close(out.float() * used.view(2, 1, 1), weights.transpose(1, 2), atol=0, rtol=0.07)


class MasterTest(unittest.TestCase):
    def test_two_halves_are_one_number(self):
        weight = random(3, 5).bfloat16()
        low = torch.randint(0, 1 << 16, (3, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
        grad, decay, rate = random(3, 5, seed=4).bfloat16(), torch.tensor(0.5), torch.tensor(0.1)

        def master(high, low):
            return ((high.view(torch.int16).int() << 16) | low).view(torch.float32).clone()

        start = master(weight, low)
        expected = start - start * ((grad.float() * start) >= 0) * decay * rate - grad.float() * rate
        halves = low.to(torch.uint16)
        kernels.update_with_master(weight.view(torch.uint16), halves, grad, decay, rate)
        result = master(weight, halves.int())
        torch.testing.assert_close(result, expected, atol=0, rtol=3e-7)
        self.assertLess((result - weight.float()).abs().max().item(), 2.0**-7 * result.abs().max().item())
        self.assertTrue(bool((result.abs() >= weight.float().abs()).all()))  # the upper half is the truncated number

        whole = start.clone()
        kernels.update_with_master(whole.view(torch.uint16), halves, grad, decay, rate)
        torch.testing.assert_close(whole, expected, atol=0, rtol=3e-7)
        self.assertFalse(math.isnan(whole.sum().item()))


if __name__ == "__main__":
    unittest.main()
