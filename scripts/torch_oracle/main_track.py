"""The Main Track's model (modded-nanogpt record #89) from the formulas, on a resolved configuration. One parameter dictionary, named as
speedrun names it; attention as explicit products; autograd does the backward pass, but for two rules of the record that are no
gradients: late targets at row ends, and FP8 products that backward passes straight through.

Letters: B rows, T tokens of a row, C width, H heads, D = C / H, F hidden width of the MLP, V padded vocabulary.

Precision: with dtype bfloat16 every matrix is cast to BF16 where it is used and activations are BF16; sums of several terms, norms,
rotary, soft-capping and cross-entropy are FP32, rounded once. With float32 (or float64) everything is in that type. FP8, where the
configuration has it, is emulated on top: values are rounded to what E4M3 or E5M2 can hold, products stay in the type above.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from main_track_parameters import GATE_SCALE, SQRT_1_1, gate_layout, layers_of, parameter_table
from model import softcap

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
QUERIES = 1024  # attention's block: queries whose scores exist at once
LOGITS = 1 << 26  # logits that exist at once


def to_fp8(x, scale, kind=torch.float8_e4m3fn):
    """What is left of x after storing x / scale in FP8, in FP32 or FP64."""
    limit = E4M3_MAX if kind == torch.float8_e4m3fn else E5M2_MAX
    exact = x if x.dtype == torch.float64 else x.float()
    stored = (exact * (1 / torch.as_tensor(scale, dtype=torch.float32, device=x.device))).clamp(-limit, limit)
    return stored.to(kind).to(exact.dtype) * scale


class ValueOf(torch.autograd.Function):
    """The value of the second argument with the gradient of the first: straight-through."""

    @staticmethod
    def forward(ctx, exact, value):
        return value.to(exact.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TruncateBf16(torch.autograd.Function):
    """The upper half of an FP32 master."""

    @staticmethod
    def forward(ctx, master):
        return (master.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


class Fp8Head(torch.autograd.Function):
    """inp · weightᵀ with operands in E4M3; backward with the gradient in E5M2 at grad_bound / 448 and the same operands."""

    @staticmethod
    def forward(ctx, inp, weight, inp_scale, weight_scale, grad_scale):
        inp8, weight8 = to_fp8(inp, inp_scale), to_fp8(weight, weight_scale)
        ctx.save_for_backward(inp8, weight8)
        ctx.grad_scale, ctx.dtypes = grad_scale, (inp.dtype, weight.dtype)
        return (inp8 @ weight8.T).to(inp.dtype)

    @staticmethod
    def backward(ctx, grad):
        inp8, weight8 = ctx.saved_tensors
        grad8 = to_fp8(grad, ctx.grad_scale, torch.float8_e5m2)
        return (grad8 @ weight8).to(ctx.dtypes[0]), (grad8.T @ inp8).to(ctx.dtypes[1]), None, None, None


def visible(starts, window, queries, keys):
    """(B, 1, queries, keys) booleans: same document, not later, at most `window` before the query (0: no limit)."""
    query = torch.arange(*queries, device=starts.device)[:, None]
    key = torch.arange(*keys, device=starts.device)[None, :]
    mask = (key <= query) & (key >= starts[:, queries[0] : queries[1], None])
    if window:
        mask &= query - key <= window
    return mask[:, None]


def probabilities(q, k, mask, scale):
    """softmax over the visible keys, (B, H, queries, keys)."""
    scores = (q @ k.transpose(-1, -2)).to(accurate(q.dtype)) * scale
    return scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype)


def softmax_attention(q, k, v, mask, scale):
    return probabilities(q, k, mask, scale) @ v


def dc_attention(q, k, v, mask, scale, w1):
    """Σ_s A(t,s)·v_h(s) with A = Σ_h w1_h·p_h; w1 (B, H, queries)."""
    mixed = (w1[..., None] * probabilities(q, k, mask, scale)).sum(1, keepdim=True)
    return mixed.to(v.dtype) @ v


def by_blocks(attend, q, k, v, starts, window, scale, *per_query):
    """attend(q, k, v, mask, scale, …) on one block of queries after the other, each with the keys that its window reaches."""
    T, blocks = q.size(2), []
    for begin in range(0, T, QUERIES):
        end = min(begin + QUERIES, T)
        first = max(0, begin - window) if window else 0
        mask = visible(starts, window, (begin, end), (first, end))
        args = (q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end], mask, scale, *(x[:, :, begin:end] for x in per_query))
        blocks.append(checkpoint(attend, *args, use_reentrant=False) if T > QUERIES else attend(*args))
    return torch.cat(blocks, 2)


def accurate(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def previous(x):
    """x of the previous token of the row, along dimension 1; 0 before the first."""
    return F.pad(x[:, :-1], (0, 0) * (x.dim() - 2) + (1, 0))


def bigram_indices(tokens, rows):
    """(B, T): a hash of a token and the one before it in wrapping 32-bit arithmetic; the last row for the first token, and that row's
    number stands for it in the second token's hash."""
    before = previous(tokens)
    before[:, 1:2] = rows - 1
    hash_ = (36313 * tokens).to(torch.int32) ^ (27191 * before).to(torch.int32)
    index = hash_.remainder(rows - 1).long()
    index[:, 0] = rows - 1
    return index


def sign_rows(tokens, rows):
    row = (previous(tokens) ^ tokens) % rows
    row[:, 0] = 0
    return row


class MainTrack:
    """Losses of one configuration. FP8 keeps scales from one step to the next: begin_step and end_step belong around a step's passes."""

    def __init__(self, config, dtype=torch.float32, prefix=None, fp8=True):
        self.model, self.dtype, self.accurate = config["model"], dtype, accurate(dtype)
        self.layers, self.nets = layers_of(self.model), gate_layout(self.model)
        self.groups = {name: group for name, (_, group) in parameter_table(self.model).items()}
        self.truncated = set()
        if dtype == torch.bfloat16:
            masters = {name: config["optim"][group]["master"] for name, group in self.groups.items() if group}
            self.truncated = {name for name, master in masters.items() if master == "truncated"}
        self.prefix = None if prefix is None else torch.as_tensor(prefix)
        self.fp8 = config["fp8"]
        self.fp8_on = {part: fp8 and self.fp8[part] == "fp8" for part in ("mlp_up", "mlp_down", "head")}
        self.scales, self.maxima = {}, {}

    # FP8 scales. A delayed one comes from the maximum of the step before, with a margin.

    def begin_step(self, parameters, s):
        if not self.fp8_on["mlp_down"]:
            return
        for i in range(len(self.layers)):
            name = f"h.{i}.mlp.down.weight"
            maximum = max(self.weight(parameters, name).detach().abs().max().item(), 1e-12)
            exact = s < self.fp8["down_weight_exact_steps"]
            self.scales[name, "now"] = maximum / E4M3_MAX if exact else self.scales[name]
            self.scales[name] = maximum * self.fp8["down_weight_margin"] / E4M3_MAX

    def end_step(self):
        for name, maximum in self.maxima.items():
            self.scales[name] = max(maximum, 1e-12) * self.fp8["mlp_down_margin"] / E4M3_MAX
        self.maxima = {}

    def activation_scale(self, x, name, scaling, bound):
        if self.fp8["force_unit_scales"]:
            return 1.0
        if scaling == "fixed":
            return bound / E4M3_MAX
        maximum = x.detach().abs().max().item()
        if scaling == "current":
            return max(maximum, 1e-12) / E4M3_MAX
        self.maxima[name] = max(maximum, self.maxima.get(name, 0.0))
        return self.scales.get(name, 1.0)

    # Parameters as the products see them.

    def weight(self, parameters, name):
        if name in self.truncated:
            return TruncateBf16.apply(parameters[name])
        return parameters[name].to(self.dtype)

    def scalar(self, parameters, name, index=0):
        return parameters[name].flatten()[index].to(self.accurate)

    def scaled_weight(self, parameters, names, layer, index):
        """Rows of the named matrices below one another, times λ."""
        weight = torch.cat([self.weight(parameters, f"h.{layer}.{name}.weight") for name in names])
        if not self.model["weight_lambdas"]:
            return weight
        return (self.scalar(parameters, "lambda.weight", 2 * layer + index) * weight.to(self.accurate)).to(self.dtype)

    # Parts of the model.

    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], None, self.model["norm_eps"])

    def mix(self, *terms):
        """Σ factor·x, rounded once; a factor is a number, a scalar, or (B, T) gates."""
        total = 0
        for factor, x in terms:
            if isinstance(factor, torch.Tensor):
                factor = factor.to(self.accurate)
                factor = factor[..., None] if factor.dim() == 2 else factor
            total = total + factor * x.to(self.accurate)
        return total.to(self.dtype)

    def net(self, parameters, name, x):
        """{(use, layer): (B, T, columns)}; a net without w1 is the same for every token."""
        bias = self.weight(parameters, f"{name}.bias")
        out = bias.to(self.accurate).expand(*x.shape[:-1], -1)
        if f"{name}.w1" in parameters:
            hidden = F.gelu(F.linear(x, self.weight(parameters, f"{name}.w1")))
            out = F.linear(hidden, self.weight(parameters, f"{name}.w2")).to(self.accurate) + out
        scale = self.weight(parameters, "gate.scale") if name.startswith("gate") else GATE_SCALE
        out = (out * scale).to(self.dtype)
        columns = [count for _, _, count, _ in self.nets[name]]
        uses = [(use, layer) for use, layer, _, _ in self.nets[name]]
        if name.startswith("mudd"):
            return out
        return dict(zip(uses, out.split(columns, dim=-1)))

    def embed(self, parameters, tokens, tied):
        x = F.embedding(tokens, self.weight(parameters, "head.weight" if tied else "wte"))
        if self.model["smear"]:
            channels = x[..., : self.model["smear_channels"]]
            gate = torch.sigmoid((channels @ self.weight(parameters, "smear.gate")).to(self.accurate)).to(self.dtype)
            x = self.mix((1, x), (self.scalar(parameters, "lambda.smear") * gate.to(self.accurate), previous(x)))
        return self.norm(x)

    def bigram(self, parameters, tokens):
        x = F.embedding(bigram_indices(tokens, self.model["bigram_rows"]), self.weight(parameters, "bigram.table"))
        if self.model["bigram_sign_rows"]:
            x = x * F.embedding(sign_rows(tokens, self.model["bigram_sign_rows"]), parameters["bigram.sign"].to(self.dtype))
        return x

    def rotate(self, x, positions, frequencies):
        """x (B, T, H, D), positions (T, H): neighbours (2i, 2i+1) of the first half of a head turn by position·frequency."""
        frequencies = torch.tensor(frequencies, dtype=self.accurate, device=x.device)
        angle = positions.to(self.accurate)[..., None] * frequencies
        cos, sin = (part.to(self.dtype).to(self.accurate) for part in (angle.cos(), angle.sin()))
        pairs = x[..., : 2 * len(frequencies)].to(self.accurate).unflatten(-1, (-1, 2))
        even, odd = pairs.unbind(-1)
        turned = torch.stack([cos * even + sin * odd, cos * odd - sin * even], -1).flatten(-2).to(self.dtype)
        return torch.cat([turned, x[..., 2 * len(frequencies) :]], -1)

    def value_gates(self, parameters, i, inp, embedding, mix):
        """(B, T, H)"""
        H = self.model["num_heads"]
        if mix is not None:
            first = (H + 1) // 2
            return torch.cat([mix[..., 6:7].expand(-1, -1, first), mix[..., 7:8].expand(-1, -1, H - first)], -1)
        P = self.model["value_gate_channels"]
        logits = F.linear(torch.cat([inp[..., :P], embedding[..., :P]], -1), self.weight(parameters, f"h.{i}.value.gate"))
        return (2 * torch.sigmoid(logits.to(self.accurate))).to(self.dtype)

    def attention(self, parameters, i, inp, starts, stage, gates, value_embedding, mix, added_value):
        """The attention sublayer of layer i on its input (B, T, C): everything between its norm and the residual stream."""
        layer, H = self.layers[i], self.model["num_heads"]
        B, T, C = inp.shape
        qkv = F.linear(inp, self.scaled_weight(parameters, ("attn.qk", "attn.v"), i, 0))
        q, k, v = (part.unflatten(-1, (H, C // H)) for part in qkv.chunk(3, dim=-1))

        positions = torch.arange(T, device=inp.device)[:, None].expand(T, H)
        if layer["paired_heads"]:
            positions = 2 * positions + torch.arange(H, device=inp.device) % 2
        q, k = (self.rotate(self.norm(part), positions, stage.frequencies) for part in (q, k))
        if layer["key_offset"]:
            half = C // H // 2
            k = torch.cat([k[..., :half], torch.cat([k[:, :1, :, half:], k[:, :-1, :, half:]], 1)], -1)
        terms = [(1, v)]
        if value_embedding is not None:
            gate = self.value_gates(parameters, i, inp, value_embedding, mix)
            terms.append((gate.to(self.accurate)[..., None], value_embedding.unflatten(-1, (H, -1))))
        if added_value is not None:
            terms.append((1, added_value.unflatten(-1, (H, -1))))
        v = self.mix(*terms)

        window = {"full": 0, "short": stage.window_short, "long": stage.window_long}[layer["window"].removesuffix("_window")]
        seen = [part.transpose(1, 2) for part in (q, k, v)]  # (B, H, T, D)
        if layer["paired_heads"]:
            paired = [self.interleave(part) for part in seen]
            y = by_blocks(softmax_attention, *paired, (2 * starts).repeat_interleave(2, 1), window, stage.attention_scale)
            y = y.unflatten(2, (T, 2)).permute(0, 3, 1, 2, 4).flatten(1, 2)
        else:
            y = by_blocks(softmax_attention, *seen, starts, window, stage.attention_scale)
        if layer["dc"]:
            w1 = gates["dc1", i].to(self.accurate)
            w1 = (w1 * torch.rsqrt(w1.square().mean(-1, keepdim=True) + 1e-6)).to(self.dtype).transpose(1, 2)
            w2 = gates["dc2", i].transpose(1, 2)[..., None].to(self.accurate)
            short = by_blocks(dc_attention, *seen, starts, self.model["dc_window"] - 1, stage.attention_scale, w1)
            y = self.mix((1, y), (w2, short))
        y = y.transpose(1, 2)  # (B, T, H, D)
        if layer["xsa"]:
            v_, y_ = v.to(self.accurate), y.to(self.accurate)
            share = (y_ * v_).sum(-1) / v_.square().sum(-1).clamp(min=1e-8)
            y = (y_ - (torch.tanh(gates["xsa", i].to(self.accurate)) * share)[..., None] * v_).to(self.dtype)
        if layer["gate"]:
            y = y * gates["gate", i][..., None]
        return F.linear(y.flatten(2), self.scaled_weight(parameters, ("attn.out",), i, 1))

    @staticmethod
    def interleave(x):
        """(B, H, T, D) -> (B, H/2, 2T, D): heads h and h + H/2 take turns."""
        return torch.stack(x.chunk(2, dim=1), dim=3).flatten(2, 3)

    def mlp(self, parameters, i, x, training):
        up, down = (self.weight(parameters, f"h.{i}.mlp.{part}.weight") for part in ("up", "down"))
        pre = F.linear(x, up)
        if training and self.fp8_on["mlp_up"]:
            unit = self.fp8["force_unit_scales"]
            up_scale = 1.0 if unit else max(up.detach().abs().max().item(), 1e-12) / E4M3_MAX
            scale = self.activation_scale(x, f"h.{i}.inp", self.fp8["mlp_up_scaling"], self.fp8["mlp_up_bound"])
            pre = ValueOf.apply(pre, F.linear(to_fp8(x.detach(), scale), to_fp8(up.detach(), up_scale)))
        post = F.relu(pre).square()
        out = post @ down
        if training and self.fp8_on["mlp_down"]:
            down_scale = 1.0 if self.fp8["force_unit_scales"] else self.scales[f"h.{i}.mlp.down.weight", "now"]
            scale = self.activation_scale(post, f"h.{i}.post", self.fp8["mlp_down_scaling"], self.fp8["mlp_down_bound"])
            out = ValueOf.apply(out, to_fp8(post.detach(), scale) @ to_fp8(down.detach(), down_scale))
        return out

    def hidden(self, parameters, tokens, starts, stage, tied, training):
        """(B, T, C): the head's input."""
        model, layers = self.model, self.layers
        last = len(layers) - 1
        x0 = self.embed(parameters, tokens, tied)
        gates = self.net(parameters, "gate.pre", x0) if "gate.pre" in self.nets else {}
        bigram = self.bigram(parameters, tokens) if model["bigram_rows"] else None

        def gate(use, i):
            return gates[use, i][..., 0]

        x = self.mix((1, x0), (gate("bigram", 0), bigram)) if ("bigram", 0) in gates else x0
        c0, after, first_value = x, {}, None
        for i, layer in enumerate(layers):
            if i == model["mudd_gate_split"] and "gate.post" in self.nets:
                gates |= self.net(parameters, "gate.post", x)
            dynamic = model["mudd"] and i == last
            resid, post = self.lambdas(parameters, i)
            mix = None
            if layer["attention"]:
                inp = self.norm(x if layer["input_from"] < 0 else after[layer["input_from"]])
                value = F.embedding(tokens, self.weight(parameters, f"h.{i}.value.table")) if layer["value_embedding"] else None
                first_value = value if first_value is None else first_value
                if dynamic:
                    mix = self.net(parameters, "mudd.mix", x)
                    mu, late = mix.unbind(-1), after[model["mudd_late"]]
                    added = self.mix((mu[0], c0), (mu[1], late), (mu[2], x))
                    x = self.mix((1 + mu[5].to(self.accurate), x), (mu[3], c0), (mu[4], late))
                    terms = [(mu[8], x), (mu[9], self.attention(parameters, i, inp, starts, stage, gates, value, mix, added))]
                    terms += [(mu[10], c0)] * model["x0_injection"] + [(mu[11], bigram)] * (bigram is not None)
                else:
                    terms = [(resid[0], x), (post[0], self.attention(parameters, i, inp, starts, stage, gates, value, None, None))]
                    if ("x0", i) in gates:
                        terms.append((gate("x0", i), x0))
                    if ("bigram", i) in gates and i > 0:
                        terms.append((gate("bigram", i), bigram))
                x = self.mix(*terms)
            elif layer["skip_from"] >= 0:
                skip = torch.sigmoid(self.scalar(parameters, "lambda.skip"))
                x = self.mix((1, x), (skip * gate("skip", i).to(self.accurate), after[layer["skip_from"]]))
            factors = (mu[12], mu[13]) if mix is not None else (resid[1], post[1])
            x = self.mix((factors[0], x), (factors[1], self.mlp(parameters, i, self.norm(x), training)))
            after[i] = x
        if model["mudd"]:
            nu = self.net(parameters, "mudd.out", x).unbind(-1)
            terms = [(1, x), (nu[0], c0), (nu[1], after[model["mudd_late"]]), (nu[2], after[last - 1]), (nu[4], after[model["mudd_early"]])]
            if first_value is not None:
                terms.append((nu[3], first_value))
            x = self.mix(*terms)
        return self.norm(x)

    def lambdas(self, parameters, i):
        """(λ_resid, λ_post) of layer i, each for attention and MLP."""
        if not self.model["residual_lambdas"]:
            return (SQRT_1_1, SQRT_1_1), (1.0, 1.0)
        return tuple(self.weight(parameters, name)[i].unbind(0) for name in ("lambda.resid", "lambda.post"))

    # Losses.

    def wanted(self, targets, step):
        """(B, T, K) tokens and their weights: the next ones (weight 0 beyond the row), then the target's prefix if it has one. With
        them the softmax's weight at each position, which keeps the full sum at row ends."""
        B, T = targets.shape
        tokens, weights = [], []
        for ahead, weight in enumerate(step.next_weights):
            tokens.append(F.pad(targets[:, ahead:], (0, ahead)))
            weights.append(torch.full((B, T), weight, dtype=self.accurate, device=targets.device))
            weights[-1][:, T - ahead :] = 0
        full = torch.full((B, T), sum(step.next_weights), dtype=self.accurate, device=targets.device)
        settings = step.stage.settings
        if settings.get("prefix_start", 0) or settings.get("prefix_end", 0):
            prefix = self.prefix.to(targets.device)[targets]
            tokens.append(prefix.clamp(min=0))
            weights.append((prefix >= 0) * torch.tensor(step.prefix_weight, dtype=self.accurate, device=targets.device))
            full = full + weights[-1]
        return torch.stack(tokens, -1), torch.stack(weights, -1), full

    def objective(self, parameters, batch, step, grad_scale):
        """(objective, losses): the gradient of the objective is grad_scale times that of the sum of the losses (B, T), by the record's
        rule: the softmax keeps the weights of late targets that the loss drops at row ends."""
        inputs, targets, starts = batch
        hidden = self.hidden(parameters, inputs, starts, step.stage, step.tied, training=True)
        tokens, weights, full = (part.flatten(0, 1) for part in self.wanted(targets, step))
        head = self.weight(parameters, "head.weight")
        hidden, rows = hidden.flatten(0, 1), max(1, LOGITS // head.size(0))
        objective, losses = 0, []

        def piece(hidden, head, tokens, weights, full):
            z = softcap(self.model, self.logits(hidden, head, grad_scale).to(self.accurate))
            lse = z.logsumexp(-1)
            aimed = (weights * z.gather(1, tokens)).sum(-1)
            return (full * lse - aimed).sum(), (weights.sum(-1) * lse - aimed).detach()

        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            args = (hidden[part], head, tokens[part], weights[part], full[part])
            value, loss = checkpoint(piece, *args, use_reentrant=False) if len(hidden) > rows else piece(*args)
            objective = objective + value * grad_scale
            losses.append(loss)
        return objective, torch.cat(losses).view(targets.shape)

    def logits(self, hidden, head, grad_scale):
        if not self.fp8_on["head"]:
            return F.linear(hidden, head)
        bounds = [self.fp8[f"head_{part}_bound"] / E4M3_MAX for part in ("inp", "weight", "grad")]
        if self.fp8["force_unit_scales"]:
            bounds = [1.0] * 3
        return Fp8Head.apply(hidden, head, bounds[0], bounds[1], bounds[2] * grad_scale)

    @torch.no_grad()
    def evaluate(self, parameters, batch, stage, tied):
        """Plain cross-entropy of every token (B, T), without FP8."""
        inputs, targets, starts = batch
        hidden = self.hidden(parameters, inputs, starts, stage, tied, training=False)
        z = softcap(self.model, F.linear(hidden, self.weight(parameters, "head.weight")).to(self.accurate))
        return z.logsumexp(-1) - z.gather(-1, targets[..., None])[..., 0]
