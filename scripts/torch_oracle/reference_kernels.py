"""What a run of the reference's code needs instead of kernels that are missing: FlashAttention-3 everywhere, its Triton and CUDA kernels
on the CPU or in FP32. Same signatures as what they stand in for, same formulas, PyTorch operations.

Letters: T tokens of a row, H heads, D their width, C width, F hidden width of the MLP, V padded vocabulary, w attention's window.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
LOGIT_ROWS = 16384  # rows of logits that exist at once


class Bands(torch.autograd.Function):
    """(T, H, D) -> (T / block, H, w + block, D): for each block of queries the keys that its window reaches, as a view of a padded copy.
    Backward adds up in FP32 where blocks overlap."""

    @staticmethod
    def forward(ctx, x, block, window):
        T, H, D = x.shape
        ctx.sizes = T, block, window
        padded = F.pad(x, (0, 0, 0, 0, window, 0))
        return padded.as_strided((T // block, H, window + block, D), (block * H * D, D, H * D, 1))

    @staticmethod
    def backward(ctx, grad):
        T, block, window = ctx.sizes
        blocks, H, width, D = grad.shape
        reach = math.ceil(width / block)  # blocks that a band covers
        total = torch.zeros(blocks + reach, block, H, D, dtype=torch.float32, device=grad.device)
        for i in range(reach):
            piece = grad[:, :, i * block : (i + 1) * block].transpose(1, 2)
            total[i : i + blocks, : piece.size(1)] += piece
        return total.flatten(0, 1)[window : window + T].to(grad.dtype), None, None


def block_size(T, window):
    """Queries of a block: a power of two near the window, that divides T."""
    wanted = min(1024, max(256, 1 << (window - 1).bit_length()))
    return math.gcd(T, wanted)


def band_mask(cu_seqlens, T, block, window):
    """(T / block, 1, block, w + block) booleans: same document, not later, at most w before the query."""
    query = torch.arange(T, device=cu_seqlens.device)
    starts = cu_seqlens.long()[torch.searchsorted(cu_seqlens.long(), query, right=True) - 1]
    query, starts = query.view(-1, block, 1), starts.view(-1, block, 1)
    key = query[:, :1] - window + torch.arange(window + block, device=query.device)
    mask = (key <= query) & (key >= query - window) & (key >= starts)
    return mask[:, None]


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size):
    """flash_attn_varlen_func for self-attention: q, k, v (T, H, D), window (w, 0)."""
    T, (window, ahead) = q.size(0), window_size
    if not causal or ahead != 0 or cu_seqlens_q is not cu_seqlens_k:
        raise NotImplementedError("only causal self-attention with a window of (w, 0)")
    block = block_size(T, window)
    mask = band_mask(cu_seqlens_q, T, block, window)
    queries = q.unflatten(0, (-1, block)).transpose(1, 2)
    backends = [SDPBackend.MATH] if q.dtype == torch.float32 else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        y = F.scaled_dot_product_attention(
            queries, Bands.apply(k, block, window), Bands.apply(v, block, window), attn_mask=mask, scale=softmax_scale
        )
    return y.transpose(1, 2).flatten(0, 1).contiguous()


def dc_attention_add_base(base, q, k, v, dc_weights, softmax_lse, scaling, window, seq_lens):
    """base (T, H, D) + w2_h·Σ_s (Σ_h' w1_h'·p_h'(t, s))·v_h(s), p over the `window` newest keys of the document; q, k, v (1, T, H, D)."""
    w1, w2 = (w[0].float() for w in dc_weights)  # (T, H)
    q, k, v = q[0], k[0], v[0]
    T, reach = q.size(0), window - 1
    block = block_size(T, reach)

    def blocks(x):
        return x.unflatten(0, (-1, block)).transpose(1, 2)

    scores = (blocks(q) @ Bands.apply(k, block, reach).transpose(-1, -2)).float() * scaling
    probabilities = scores.masked_fill(~band_mask(seq_lens, T, block, reach), -math.inf).softmax(-1)
    mixed = (blocks(w1[..., None]) * probabilities).sum(1, keepdim=True)
    short = (mixed.to(v.dtype) @ Bands.apply(v, block, reach)).transpose(1, 2).flatten(0, 1)
    return (base.float() + w2[..., None] * short.float()).to(base.dtype)


def linear_relu_square(
    a, b, aux=None, a_f8=None, b_f8=None, dequant_scale_ptr=None, activation_scale=None, partial_amax=None
):
    """relu(a·bᵀ)², with FP8 operands if they are given, and its FP8 copy if a scale is; with aux = the forward result: 2·(a·bᵀ)·√aux."""
    product = (a if a_f8 is None else a_f8).float() @ (b if b_f8 is None else b_f8).float().T
    if b_f8 is not None:
        product = product * dequant_scale_ptr
    product = product.to(a.dtype)
    if aux is not None:
        return (2 * product.float() * aux.float().sqrt()).to(a.dtype)
    post = product.relu().square()
    if activation_scale is None:
        return post
    partial_amax.zero_()
    partial_amax[0] = post.float().max()
    return post, (post.float() * (1 / activation_scale)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def reduce_mlp_activation_scales(partial_amax, scales, headroom=1.25):
    scales[: partial_amax.size(0)] = partial_amax.amax(1).clamp(min=1e-12) * (headroom / E4M3_MAX)


def quantize_transpose_mlp_down_weights(weights, output_storage, next_scales, used_scales, partial_amax, headroom=1.12):
    values = weights.float()
    scaled = (values / next_scales.view(-1, 1, 1)).clamp(-E4M3_MAX, E4M3_MAX)
    output_storage.copy_(scaled.transpose(1, 2).to(output_storage.dtype))
    used_scales.copy_(next_scales)
    next_scales.copy_(values.abs().amax((1, 2)).clamp(min=1e-12) * (headroom / E4M3_MAX))


def gram_of_rows(A, out):
    return out.copy_(A.float() @ A.float().mT)


def gram_of_columns(A, out):
    return out.copy_(A.float().mT @ A.float())


def square_plus(A, alpha, beta, out):
    return out.copy_(alpha * (A.float() @ A.float().mT) + beta * A.float())


def transpose_copy(src, dst):
    dst.copy_(src.T)


def transpose_add(src, dst):
    dst.add_(src.T)


def capped_loss(logits, targets, weights, prefix_targets, prefix_weight, A, B, C, rounded_to=torch.float32):
    """(losses, gradient by the logits), FP32, of z = A·σ((logit + B) / C): Σ_k weights[k]·CE(targets[i + k]) + prefix_weight·CE(prefix).
    Targets beyond the end are left out of the loss, but not of the softmax's weight in the gradient. targets has rows beyond those of
    the logits where the row goes on. σ is rounded to `rounded_to`."""
    n = logits.size(0)
    sigma = torch.sigmoid((logits.float() + B) / C).to(rounded_to).float()
    z = A * sigma
    lse = z.logsumexp(-1)
    grad = (z - lse[:, None]).exp_()
    valid = prefix_targets >= 0
    prefix_weights = valid * prefix_weight
    grad *= (weights.sum() + prefix_weights)[:, None]
    aims = [(targets[k : k + n], weights[k].expand(n)) for k in range(len(weights))] + [(prefix_targets.clamp(min=0), prefix_weights)]
    losses = torch.zeros_like(lse)
    for aim, weight in aims:
        aim, weight = aim[:, None], weight[: aim.size(0)]
        losses[: aim.size(0)] += weight * (lse[: aim.size(0)] - z[: aim.size(0)].gather(1, aim)[:, 0])
        grad[: aim.size(0)].scatter_add_(1, aim, -weight[:, None].float())
    grad *= (A / C) * sigma * (1 - sigma)
    return losses, grad


def cross_entropy_fp8_grad(
    logits, targets, mtp_weights, prefix_targets, prefix_weight, losses, grad_input, n_rows, n_predict, A, B, C, grad_s, grad_scale
):  # fmt: skip
    """Fills losses and the gradient by the logits in units of grad_s, E5M2."""
    loss, grad = capped_loss(logits, targets, mtp_weights, prefix_targets, prefix_weight, A, B, C, logits.dtype)
    losses.copy_(loss)
    grad_input.copy_((grad * (grad_scale / grad_s)).clamp(-E5M2_MAX, E5M2_MAX).to(grad_input.dtype))


class SoftcappedCrossEntropy(torch.autograd.Function):
    """The head and its loss without FP8: logits and their gradient in x's type. As in FP8 the incoming gradient is not looked at."""

    @staticmethod
    def forward(
        ctx, x, targets, mtp_weights, prefix_targets, prefix_weight, weight, x_s, w_s, grad_s, grad_scale, A=23.0, B=5.0, C=7.5
    ):  # fmt: skip
        losses, dx = [], torch.empty_like(x)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for begin in range(0, x.size(0), LOGIT_ROWS):
            part = slice(begin, begin + LOGIT_ROWS)
            n = x[part].size(0)
            aims = targets[begin : begin + n + len(mtp_weights) - 1]
            loss, grad = capped_loss(x[part] @ weight, aims, mtp_weights, prefix_targets[part], prefix_weight, A, B, C)
            grad = grad.mul_(grad_scale).to(x.dtype)
            losses.append(loss)
            dx[part] = grad @ weight.T
            dweight += x[part].T @ grad
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad_output):
        dx, dweight = ctx.saved_tensors
        return dx, None, None, None, None, dweight, *[None] * 7


def update_with_master(p, mantissa, grad, wd_tensor, lr_tensor):
    """NorMuon's last step on a weight that is kept as the two halves of an FP32 number, given as uint16; or, where it is kept in FP32,
    as uint16 pairs. Without unsigned 32-bit arithmetic, which eager PyTorch does not have."""
    grad, lr = grad.float(), lr_tensor.float()

    def updated(master):
        keep = ((grad * master) >= 0) * (wd_tensor.float() * lr)
        return master - master * keep - grad * lr

    if p.size(-1) == 2 * mantissa.size(-1):
        master = p.view(torch.float32)
        master.copy_(updated(master))
        return
    high, low = p.view(torch.int16), mantissa.view(torch.int16)
    bits = (high.int() << 16) | (low.int() & 0xFFFF)
    bits = updated(bits.view(torch.float32)).view(torch.int32)
    high.copy_((bits >> 16).to(torch.int16))
    low.copy_(((bits & 0xFFFF) - ((bits & 0x8000) << 1)).to(torch.int16))
