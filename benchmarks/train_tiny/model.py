"""DeepSeek-V4 for training: the specification's equations over whole sequences, with straight-through quantisers.

Functions of a dictionary of weights. The weights are already rounded to their stored formats (`compute_weights`), so
the model that is trained is the one that a server computes. Routed experts are computed densely: an expert that a token
did not choose has weight 0. Section numbers are those of the DeepSeek-V4 specification.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from train_tiny.quantisers import fp4_rows, fp8_matrix, fp8_rows, hadamard_matrix, straight_through
from train_tiny.shape import Parameter, TinyShape, hash_tables

SCORE_ELEMENTS = 1 << 28
"""Attention scores that exist at a time: longer sequences and larger batches are computed in pieces."""


SHORT_ROW = 2048


@dataclasses.dataclass(frozen=True)
class Quant:
    """The fake quantisers that run (section 4.3)."""

    kv_fp8: bool = True
    indexer_fp4: bool = True
    activations_fp8: bool = True


def stored_value(name: str, value: Tensor, stored: str) -> Tensor:
    """A parameter as the released file stores it: bf16 for matrices and norms, fp32 for the few fp32 tensors."""
    if stored == "fp32":
        return value
    if stored == "fp8":
        return fp8_matrix(value).bfloat16()
    return (fp4_rows(value) if stored == "fp4" else value).bfloat16()


def compute_weights(masters: dict[str, Tensor], table: dict[str, Parameter]) -> dict[str, Tensor]:
    """Leaves for a step: the masters rounded to their stored formats. Gradients of leaves are those of masters."""
    with torch.no_grad():
        leaves = {name: stored_value(name, value, table[name].stored) for name, value in masters.items()}
        # A master in fp32 is its own stored value; a copy keeps the gradients apart.
        leaves = {name: leaf.clone() if leaf is masters[name] else leaf for name, leaf in leaves.items()}
    return {name: leaf.requires_grad_(table[name].update != "none") for name, leaf in leaves.items()}


def frequencies(s: TinyShape, ratio: int) -> Tensor:
    """Angle per position of each pair of rotated channels, fp32 [rope / 2] (section 3.2)."""
    dim = s.qk_rope_head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    if not ratio:
        return (s.rope_theta**-exponents).float()
    freq = s.compress_rope_theta**-exponents

    def correction(beta: float) -> float:
        turns = s.yarn_original_positions / (beta * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(s.compress_rope_theta))

    low = max(math.floor(correction(s.yarn_beta_fast)), 0)
    high = min(math.ceil(correction(s.yarn_beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (freq / s.yarn_factor * ramp + freq * (1 - ramp)).float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last axis in fp32; one rounding to x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last channels of x rotated in pairs; cos, sin: fp32, broadcast to x [..., rope / 2]."""
    rope = 2 * cos.shape[-1]
    even, odd = x[..., -rope:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-rope], turned), -1)


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """comb [..., n, n] fp32 made nearly doubly stochastic (section 2.2)."""
    comb = torch.softmax(comb, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mixture(x: Tensor, pre: Tensor) -> Tensor:
    """The sum of the streams x [..., n, d] with weights pre [..., n]."""
    return (pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)


def write_back(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """hc_post: ``out[k] = post[k] y + sum_j comb[j, k] x[j]`` (section 2.3)."""
    out = post.unsqueeze(-1) * y.float().unsqueeze(-2)
    for stream in range(x.shape[-2]):  # not one product of [..., n, n, d], which is four times as large
        out = out + comb[..., stream, :, None] * x[..., stream, None, :].float()
    return out.to(x.dtype)


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The clamped SwiGLU, in fp32 with one rounding to the dtype of its arguments (section 5)."""
    return (F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)).to(gate.dtype)


def gated_experts(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """The clamped SwiGLU of all experts [..., E * I], times the weights [..., E] of a token's experts."""
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    hidden = hidden.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1)
    return hidden.flatten(-2).to(gate.dtype)


def coefficients(mix: Tensor, scale: Tensor, base: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """pre [..., 4], post [..., 4] and comb [..., 4, 4] before Sinkhorn's iterations (section 2.2)."""
    n = 4
    pre = torch.sigmoid(mix[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mix[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    return pre, post, (mix[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))


@dataclasses.dataclass
class Losses:
    """Losses that a forward collects beside its logits."""

    indexer: list[Tensor] = dataclasses.field(default_factory=list)
    load: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # gate name -> [E] share of tokens


class Model:
    """The forward pass; all state is in the weights.

    Args:
        shape: dimensions.
        quant: the quantisers that run.
        dtype: of activations between operations.
        device: of the tables.
        compiled: a wrapper for the elementwise functions, for instance ``torch.compile``.
        compiled_attention: a wrapper for the attention of rows of at most `SHORT_ROW` tokens, whose shapes are few.
    """

    def __init__(
        self,
        shape: TinyShape,
        quant: Quant = Quant(),  # noqa: B008 - frozen
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
        compiled_attention: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        self.shape, self.quant, self.dtype, self.device = shape, quant, dtype, torch.device(device)
        self.tables = {name: table.to(device) for name, table in hash_tables(shape).items()}
        self.hadamard = hadamard_matrix(shape.index_head_dim).to(device)
        self.angles: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.rms_norm, self.rotate, self.sinkhorn = compiled(rms_norm), compiled(rotate), compiled(sinkhorn)
        self.mixture, self.write_back = compiled(mixture), compiled(write_back)
        self.fp8_rows, self.fp4_rows = compiled(fp8_rows), compiled(fp4_rows)
        self.gated, self.gated_experts, self.coefficients = (
            compiled(function) for function in (gated, gated_experts, coefficients)
        )
        self.short_piece = compiled_attention(self.piece)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def turn(self, ratio: int, count: int, step: int = 1) -> tuple[Tensor, Tensor]:
        """cos and sin [count, rope / 2] at the positions 0, step, 2 step, ..."""
        key = (min(ratio, 1), count, step)
        if key not in self.angles:
            positions = torch.arange(count, dtype=torch.float32, device=self.device) * step
            angle = (positions[:, None] * frequencies(self.shape, ratio).to(self.device)).double()
            self.angles[key] = angle.cos().float(), angle.sin().float()
        return self.angles[key]

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm over the last axis."""
        # As rows, here and below: a compiled function is then compiled once for all shapes.
        return self.rms_norm(x.reshape(-1, x.shape[-1]), weight, self.shape.rms_norm_eps).view(x.shape)

    def quantised_input(self, x: Tensor) -> Tensor:
        """The input of an FP8 or FP4 product, rounded to e4m3 in blocks of 128 channels."""
        if not self.quant.activations_fp8:
            return x
        return straight_through(x.reshape(-1, x.shape[-1]), self.fp8_rows, 128).view(x.shape)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., k] times a weight [n, k] in the model's dtype."""
        return F.linear(x, weight.to(x.dtype))

    def lin8(self, x: Tensor, weight: Tensor) -> Tensor:
        """A product whose input is quantised."""
        return self.product(self.quantised_input(x), weight)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rows [B, T, d] rotated; cos and sin [T, rope / 2]."""
        return self.rotate(x.unsqueeze(2), cos[:, None], sin[:, None]).squeeze(2)

    def quantised_row(self, x: Tensor) -> Tensor:
        """A KV row's nope channels in FP8, its rotated channels as they are."""
        if not self.quant.kv_fp8:
            return x
        nope = self.shape.head_dim - self.shape.qk_rope_head_dim
        rows = straight_through(x[..., :nope].reshape(-1, nope), self.fp8_rows, 64)
        return torch.cat((rows.view(*x.shape[:-1], nope), x[..., nope:]), -1)

    def mix(self, x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
        """The numbers fp32 from which the streams' coefficients are made (section 2.2)."""
        flat = x.flatten(-2).float()
        mix = F.linear(flat, w[prefix + "fn"])
        return mix * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps)

    def hc_pre(self, x: Tensor, w: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Input [B, T, d] of a sublayer, and the weights with which its output is written back (section 2.2)."""
        s = self.shape
        mix = self.mix(x, w, prefix)
        pre, post, comb = self.coefficients(mix, w[prefix + "scale"], w[prefix + "base"], s.hc_eps)
        return self.mixture(x, pre), post, self.sinkhorn(comb, s.hc_sinkhorn_iters, s.hc_eps)

    def hc_head(self, x: Tensor, w: dict[str, Tensor], prefix: str = "") -> Tensor:
        """The mixture [B, T, d] of the streams that the head reads (section 2.4)."""
        mix = self.mix(x, w, prefix + "hc_head_")
        pre = torch.sigmoid(mix * w[prefix + "hc_head_scale"] + w[prefix + "hc_head_base"]) + self.shape.hc_eps
        return self.mixture(x, pre)

    def compress(self, x: Tensor, w: dict[str, Tensor], prefix: str, ratio: int, dim: int) -> Tensor:
        """Entries [B, T / ratio, dim], normed, before their rotation (section 3.4)."""
        kv = F.linear(x.float(), w[prefix + "wkv.weight"].float())
        score = F.linear(x.float(), w[prefix + "wgate.weight"].float())
        count = x.shape[1] // ratio
        kv = kv[:, : count * ratio].unflatten(1, (count, ratio))
        score = score[:, : count * ratio].unflatten(1, (count, ratio)) + w[prefix + "ape"]
        if ratio == 4:
            before_kv = F.pad(kv[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0))
            before_score = F.pad(score[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0), value=-math.inf)
            kv = torch.cat((before_kv, kv[..., dim:]), 2)
            score = torch.cat((before_score, score[..., dim:]), 2)
        entries = (kv * score.softmax(2)).sum(2).to(self.dtype)
        return self.norm(entries, w[prefix + "norm.weight"])

    # -- sublayers ---------------------------------------------------------------------------------------------------

    def attention(
        self, x: Tensor, w: dict[str, Tensor], prefix: str, ratio: int, losses: Losses | None, select: bool
    ) -> Tensor:
        """The attention sublayer of normed x [B, T, d] (section 3); T a multiple of 128."""
        s = self.shape
        batch, count = x.shape[:2]
        heads, dim = s.num_attention_heads, s.head_dim
        cos, sin = self.turn(ratio, count)
        latent = self.quantised_input(x)
        qr = self.norm(self.product(latent, w[prefix + "wq_a.weight"]), w[prefix + "q_norm.weight"])
        q = self.norm(self.lin8(qr, w[prefix + "wq_b.weight"]).unflatten(-1, (heads, dim)), None)
        q = self.rotate(q, cos[:, None], sin[:, None])
        kv = self.norm(self.product(latent, w[prefix + "wkv.weight"]), w[prefix + "kv_norm.weight"])
        kv = self.quantised_row(self.rotated(kv, cos, sin))
        entries = index = None
        if ratio:
            entries = self.compress(x, w, prefix + "compressor.", ratio, dim)
            entries = self.quantised_row(self.rotated(entries, *self.turn(ratio, entries.shape[1], ratio)))
        if ratio == 4:
            index = self.indexer(x.detach(), qr.detach(), w, prefix + "indexer.")
        out = self.attend(q, kv, entries, index, w[prefix + "attn_sink"], ratio, losses, select)
        out = self.rotate(out.to(self.dtype), cos[:, None], -sin[:, None])
        grouped = out.reshape(batch, count, s.o_groups, -1)
        wo_a = w[prefix + "wo_a.weight"].to(self.dtype).unflatten(0, (s.o_groups, -1))
        z = torch.einsum("btgi,goi->btgo", grouped, wo_a).flatten(2)
        return self.lin8(z, w[prefix + "wo_b.weight"])

    def indexer(self, x: Tensor, qr: Tensor, w: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, Hi, 128], keys [B, T / 4, 128] and weights of the heads [B, T, Hi] (section 3.5)."""
        s = self.shape
        heads, dim = s.index_n_heads, s.index_head_dim
        cos, sin = self.turn(4, x.shape[1])
        q = self.lin8(qr, w[prefix + "wq_b.weight"]).unflatten(-1, (heads, dim))
        q = self.rotate(q, cos[:, None], sin[:, None])
        keys = self.compress(x, w, prefix + "compressor.", 4, dim)
        keys = self.rotated(keys, *self.turn(4, keys.shape[1], 4))
        if self.quant.indexer_fp4:
            q, keys = (
                straight_through((y.float() @ self.hadamard).to(self.dtype), self.fp4_rows, 32) for y in (q, keys)
            )
        weights = self.product(x, w[prefix + "weights_proj.weight"]).float() * (dim * heads) ** -0.5
        return q.float(), keys.float(), weights

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        index: tuple[Tensor, Tensor, Tensor] | None,
        sink: Tensor,
        ratio: int,
        losses: Losses | None,
        select: bool,
    ) -> Tensor:
        """Attention [B, T, H, 512] fp32 over window and entries, in pieces that are computed again for gradients.

        Adds to `losses` the divergence of the indexer's distribution from the attention's, where there is an indexer.
        """
        batch, count = q.shape[:2]
        heads, window = q.shape[2], self.shape.sliding_window
        q, kv = q.float(), kv.float()
        keys = 2 * window + (0 if entries is None else entries.shape[1])
        piece = max(1, SCORE_ELEMENTS // (heads * keys * window)) * window  # queries
        rows = max(1, piece // count)
        of_piece = self.short_piece if count <= SHORT_ROW else self.piece
        outputs, divergences = [], []
        for row in range(0, batch, rows):
            taken = slice(row, row + rows)
            parts = []
            for begin in range(0, count, piece):
                end = min(begin + piece, count)
                arguments = (
                    q[taken, begin:end],
                    kv[taken],
                    None if entries is None else entries[taken, : end // ratio].float(),
                    None if index is None else (index[0][taken, begin:end], index[1][taken, : end // ratio]),
                    None if index is None else index[2][taken, begin:end],
                    sink,
                    begin,
                    ratio,
                    select,
                )
                part, divergence = (
                    checkpoint(of_piece, *arguments, use_reentrant=False, preserve_rng_state=False)
                    if torch.is_grad_enabled()
                    else of_piece(*arguments)
                )
                parts.append(part)
                divergences.append(divergence)
            outputs.append(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        if losses is not None and index is not None:
            losses.indexer.append(torch.stack(divergences).sum() / (batch * count))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def piece(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        index: tuple[Tensor, Tensor] | None,
        index_weights: Tensor | None,
        sink: Tensor,
        begin: int,
        ratio: int,
        select: bool,
    ) -> tuple[Tensor, Tensor]:
        """Outputs [B, Q, H, 512] of the queries from `begin` on, and the sum of the indexer's divergences."""
        window = self.shape.sliding_window
        batch, queries, heads, dim = q.shape
        blocks = queries // window
        mine = kv[:, begin : begin + queries].unflatten(1, (blocks, window))
        if begin:
            before = kv[:, begin - window : begin + queries - window].unflatten(1, (blocks, window))
        else:
            before = F.pad(mine[:, :-1], (0, 0, 0, 0, 1, 0))
        band = torch.cat((before, mine), 2)  # [B, blocks, 2 window, 512]
        scale = dim**-0.5
        q_blocks = (q * scale).unflatten(1, (blocks, window)).flatten(2, 3)  # [B, blocks, window * H, 512]
        near = (q_blocks @ band.transpose(-1, -2)).unflatten(2, (window, heads))
        here = torch.arange(window, device=q.device)[:, None]
        there = torch.arange(2 * window, device=q.device) - window
        seen = ((there <= here) & (there > here - window)).expand(blocks, -1, -1)
        if not begin:
            seen = seen & ((torch.arange(blocks, device=q.device) > 0)[:, None, None] | (there >= 0))
        near = near.masked_fill(~seen[:, :, None], -math.inf).flatten(1, 2)  # [B, Q, H, 2 window]
        parts = [near]
        divergence = q.new_zeros(())
        chosen = index_scores = None
        if entries is not None:
            positions = torch.arange(begin, begin + queries, device=q.device)
            chosen = torch.arange(entries.shape[1], device=q.device) < (positions[:, None] + 1) // ratio
            chosen = chosen.expand(batch, -1, -1)
            if index is not None:
                dots = torch.einsum("bqhd,bed->bqhe", *index).relu()
                index_scores = (dots * index_weights.unsqueeze(-1)).sum(2)
                top = self.shape.index_topk
                if select and entries.shape[1] > top:
                    best = index_scores.detach().masked_fill(~chosen, -math.inf).topk(top, -1).indices
                    chosen = torch.zeros_like(chosen).scatter(-1, best, True) & chosen
            far = (q.flatten(1, 2) * scale) @ entries.transpose(-1, -2)  # [B, Q * H, E]
            far = far.unflatten(1, (queries, heads)).masked_fill(~chosen[:, :, None], -math.inf)
            parts.append(far)
        parts.append(sink[None, None, :, None].expand(batch, queries, -1, 1))
        probability = torch.cat(parts, -1).softmax(-1)
        of_band = probability[..., : 2 * window].unflatten(1, (blocks, window)).flatten(2, 3)
        out = (of_band @ band).unflatten(2, (window, heads)).flatten(1, 2)
        if entries is not None:
            of_entries = probability[..., 2 * window : -1]
            out = out + (of_entries.flatten(1, 2) @ entries).unflatten(1, (queries, heads))
            if index_scores is not None:
                divergence = index_divergence(of_entries.detach(), index_scores, chosen)
        return out, divergence

    def moe(self, x: Tensor, ids: Tensor | None, w: dict[str, Tensor], prefix: str, losses: Losses | None) -> Tensor:
        """The expert sublayer of normed x [B, T, d] (section 5)."""
        s = self.shape
        score = F.softplus(F.linear(x.float(), w[prefix + "gate.weight"].float())).sqrt()
        if prefix + "gate.tid2eid" in self.tables:
            chosen = self.tables[prefix + "gate.tid2eid"][ids]
        else:
            biased = score.detach() + w[prefix + "gate.bias"]
            chosen = biased.topk(s.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(score).scatter(-1, chosen, 1.0)
        if losses is not None and prefix + "gate.bias" in w:
            losses.load[prefix + "gate.bias"] = mask.detach().mean((0, 1))
        weights = score * mask
        weights = weights / weights.sum(-1, keepdim=True) * s.routed_scaling_factor  # [B, T, E]
        y = self.quantised_input(x)
        gate, up = (self.product(y, w[f"{prefix}experts.{name}"].flatten(0, 1)) for name in ("w1", "w3"))
        hidden = self.gated_experts(gate, up, weights, s.swiglu_limit)
        w2 = w[prefix + "experts.w2"].transpose(0, 1).flatten(1)  # [d, E * I]
        routed = self.product(self.quantised_input(hidden), w2)
        gate, up = (self.product(y, w[f"{prefix}shared_experts.{name}.weight"]) for name in ("w1", "w3"))
        shared = self.lin8(self.gated(gate, up, s.swiglu_limit), w[prefix + "shared_experts.w2.weight"])
        return (routed.float() + shared.float()).to(self.dtype)

    # -- the model ---------------------------------------------------------------------------------------------------

    def block(
        self,
        x: Tensor,
        ids: Tensor | None,
        w: dict[str, Tensor],
        prefix: str,
        ratio: int,
        losses: Losses | None,
        select: bool,
    ) -> Tensor:
        """Both sublayers, each between a read and a write of the streams (section 2.1)."""
        y, post, comb = self.hc_pre(x, w, prefix + "hc_attn_")
        y = self.norm(y, w[prefix + "attn_norm.weight"])
        x = self.write_back(self.attention(y, w, prefix + "attn.", ratio, losses, select), x, post, comb)
        y, post, comb = self.hc_pre(x, w, prefix + "hc_ffn_")
        y = self.norm(y, w[prefix + "ffn_norm.weight"])
        return self.write_back(self.moe(y, ids, w, prefix + "ffn.", losses), x, post, comb)

    def streams(self, ids: Tensor, w: dict[str, Tensor], losses: Losses | None = None, select: bool = True) -> Tensor:
        """The streams [B, T, n, d] after the last layer."""
        x = F.embedding(ids, w["embed.weight"].to(self.dtype)).unsqueeze(2).expand(-1, -1, self.shape.hc_mult, -1)
        for layer, ratio in enumerate(self.shape.compress_ratios):
            x = self.block(x, ids, w, f"layers.{layer}.", ratio, losses, select)
        return x

    def logits(self, streams: Tensor, w: dict[str, Tensor], prefix: str = "") -> Tensor:
        """Logits [B, T, vocab] fp32 of the main model, or with prefix "mtp.0." of the MTP module's streams."""
        hidden = self.norm(self.hc_head(streams, w, prefix), w[prefix + "norm.weight"])
        return F.linear(hidden.float(), w["head.weight"].float())

    def mtp_streams(
        self, streams: Tensor, next_ids: Tensor, w: dict[str, Tensor], losses: Losses | None = None
    ) -> Tensor:
        """The MTP module's streams [B, T, n, d], which predict the token after `next_ids` (section 7)."""
        p = "mtp.0."
        e = self.norm(F.embedding(next_ids, w["embed.weight"].to(self.dtype)), w[p + "enorm.weight"])
        h = self.lin8(self.norm(streams, w[p + "hnorm.weight"]), w[p + "h_proj.weight"])
        z = (self.lin8(e, w[p + "e_proj.weight"]).float().unsqueeze(2) + h.float()).to(self.dtype)
        return self.block(z, None, w, p, 0, losses, False)


def index_divergence(of_entries: Tensor, index_scores: Tensor, chosen: Tensor) -> Tensor:
    """The sum over queries of KL(attention to the entries || softmax of the index scores), over the chosen entries.

    As DeepSeek trains its indexers: the target is the attention's distribution, summed over the heads and normalised. A
    query weighs as much as its attention goes to entries at all.
    """
    target = of_entries.mean(2)  # [B, Q, E]
    mass = target.sum(-1, keepdim=True)
    target = target / mass.clamp(min=1e-9)
    scores = index_scores.masked_fill(~chosen, -1e30)
    log_predicted = torch.log_softmax(scores, -1)
    pointwise = torch.where(chosen & (target > 0), target * (target.clamp(min=1e-20).log() - log_predicted), 0.0)
    return (pointwise.sum(-1, keepdim=True) * mass).sum()
