"""An independent DSpark draft on top of `reference.Reference`: its equations over a whole sequence, without rings.

The draft sees one row for each token of the committed sequence and stage. All rows of a block attend to the last 128 of
these rows and to the whole block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from model.reference import Reference
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Results of one block of a draft."""

    logits: Tensor  # [k, V] fp32, without the Markov head
    mixed: Tensor  # [k, d], before the last norm
    drafts: list[int]  # greedy


class DSparkReference:
    """The draft of a `Reference`'s checkpoint."""

    def __init__(self, reference: Reference) -> None:
        self.reference, self.config, self.weights = reference, reference.config, reference.weights
        self.layer_ids = list(self.config["dspark_target_layer_ids"])
        self.last = f"mtp.{len(self.layer_ids) - 1}."

    @torch.no_grad()
    def taps(self, tokens: Tensor) -> Tensor:
        """Return [T, 3 * d]: for each tapped layer, the mean of its output streams."""
        r, found = self.reference, []
        x = self.weights["embed.weight"][tokens].to(r.dtype)[:, None].repeat(1, self.config["hc_mult"], 1)
        for layer in range(self.config["num_hidden_layers"]):
            x = r.block(x, f"layers.{layer}.", self.config["compress_ratios"][layer], tokens)
            if layer in self.layer_ids:
                found.append(x.float().mean(1).to(r.dtype))
        return torch.cat(found, -1)

    @torch.no_grad()
    def context(self, taps: Tensor, first_position: int = 0) -> list[Tensor]:
        """Return, for each stage, the rows [T, D] of the tokens with these taps."""
        r, positions = self.reference, first_position + torch.arange(len(taps))
        m = r.rms_norm(r.lin8(taps, "mtp.0.main_proj"), self.weights["mtp.0.main_norm.weight"])
        rows = []
        for stage in range(len(self.layer_ids)):
            prefix = f"mtp.{stage}.attn."
            kv = r.rms_norm(r.lin8(m, prefix + "wkv"), self.weights[prefix + "kv_norm.weight"])
            rows.append(r.quantise_kv(r.rope(kv, positions, 0)))
        return rows

    @torch.no_grad()
    def block(self, context: list[Tensor], anchor: int) -> Block:
        """Return the block after the P tokens of `context`."""
        r, w, k = self.reference, self.weights, self.config["dspark_block_size"]
        ids = [anchor] + [self.config["dspark_noise_token_id"]] * (k - 1)
        x = w["embed.weight"][ids].to(r.dtype)[:, None].repeat(1, self.config["hc_mult"], 1)
        first = len(context[0])
        for stage, rows in enumerate(context):
            prefix = f"mtp.{stage}."
            y, post, comb = r.hc_pre(x, prefix + "hc_attn")
            seen = rows[max(0, first - self.config["sliding_window"]) :]
            y = self._attention(r.rms_norm(y, w[prefix + "attn_norm.weight"]), prefix + "attn.", seen, first)
            x = r.hc_post(y, x, post, comb)
            y, post, comb = r.hc_pre(x, prefix + "hc_ffn")
            y = r.moe(r.rms_norm(y, w[prefix + "ffn_norm.weight"]), prefix, None)
            x = r.hc_post(y, x, post, comb)
        mixed = r.hc_head(x, self.last)
        logits = r.rms_norm(mixed, w[self.last + "norm.weight"]).float() @ w["head.weight"].float().T
        drafts, previous = [], anchor
        for row in range(k):
            latent = w[self.last + "markov_head.markov_w1.weight"][previous].float()
            previous = int((logits[row] + w[self.last + "markov_head.markov_w2.weight"].float() @ latent).argmax())
            drafts.append(previous)
        return Block(logits, mixed, drafts)

    def _attention(self, x: Tensor, prefix: str, context: Tensor, first: int) -> Tensor:
        """Return the attention of a block's normed rows x [k, d] at positions first.. over `context [n, D]` and the
        block."""
        r, w, config = self.reference, self.weights, self.config
        heads, dim, positions = config["num_attention_heads"], config["head_dim"], first + torch.arange(len(x))
        qr = r.rms_norm(r.lin8(x, prefix + "wq_a"), w[prefix + "q_norm.weight"])
        q = r.rope(r.rms_norm(r.lin8(qr, prefix + "wq_b").view(-1, heads, dim), None), positions, 0)
        kv = r.rms_norm(r.lin8(x, prefix + "wkv"), w[prefix + "kv_norm.weight"])
        keys = torch.cat([context, r.quantise_kv(r.rope(kv, positions, 0))]).float()
        score = torch.einsum("thd,sd->ths", q.float(), keys) / math.sqrt(dim)
        sink = w[prefix + "attn_sink"].float().expand(len(x), heads)[..., None]
        out = (torch.cat([score, sink], -1).softmax(-1)[..., :-1] @ keys).to(r.dtype)
        groups = config["o_groups"]
        out = r.rope(out, positions, 0, inverse=True).reshape(len(x), groups, -1).float()
        z = torch.einsum("tgi,goi->tgo", out, w[prefix + "wo_a.weight"].unflatten(0, (groups, -1)))
        return r.lin8(z.flatten(1).to(r.dtype), prefix + "wo_b")
