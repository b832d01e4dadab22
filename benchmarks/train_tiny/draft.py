"""A DSpark draft for the trained model: its parameters, its forward pass for training, and its loss.

The draft proposes five tokens at a time from the streams of the last three layers; the target's weights are frozen.
Stages, Markov head and confidence head are those of DeepSeek-V4-Flash-0731 and Pro-0813.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from train_tiny.model import Losses, Model
from train_tiny.shape import Parameter, TinyShape, block_parameters, matrix, mixing_parameters, ones


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """Dimensions of the draft, under the names of ``config.json`` without their prefix ``dspark_``."""

    target_layer_ids: tuple[int, ...] = (2, 3, 4)
    block_size: int = 5
    markov_rank: int = 64
    noise_token_id: int = 2  # the padding token, which no text has

    @property
    def last(self) -> str:
        """The prefix of the last stage's tensors."""
        return f"mtp.{len(self.target_layer_ids) - 1}."


def draft_parameters(s: TinyShape, d: DraftShape) -> dict[str, Parameter]:
    """The draft's parameters under the release's names; experts stacked as in `shape.parameters`."""
    found: dict[str, Parameter] = {}
    for stage in range(len(d.target_layer_ids)):
        found |= block_parameters(f"mtp.{stage}.", s, 0, False)
    found["mtp.0.main_proj.weight"] = matrix("fp8", s.hidden_size, len(d.target_layer_ids) * s.hidden_size)
    found["mtp.0.main_norm.weight"] = ones(s.hidden_size)
    found[d.last + "norm.weight"] = ones(s.hidden_size)
    found |= mixing_parameters(d.last + "hc_head_", s, s.hc_mult, 1)
    for name in ("markov_w1", "markov_w2"):
        found[f"{d.last}markov_head.{name}.weight"] = Parameter((s.vocab_size, d.markov_rank), "bf16", std=0.02)
    found[d.last + "confidence_head.proj.weight"] = Parameter((1, s.hidden_size + d.markov_rank), "bf16", std=0.01)
    return found


class DraftModel(Model):
    """The target and its draft; a block of the draft is a sequence of five rows after a context of up to 128."""

    def __init__(self, shape: TinyShape, draft: DraftShape, **options: object) -> None:
        super().__init__(shape, **options)  # type: ignore[arg-type]
        self.draft = draft

    @torch.no_grad()
    def taps(self, ids: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The means [B, T, 3 d] of the tapped layers' streams, and the target's logits [B, T, vocab]."""
        x = F.embedding(ids, w["embed.weight"].to(self.dtype)).unsqueeze(2).expand(-1, -1, self.shape.hc_mult, -1)
        found = []
        for layer, ratio in enumerate(self.shape.compress_ratios):
            x = self.block(x, ids, w, f"layers.{layer}.", ratio, None, True)
            if layer in self.draft.target_layer_ids:
                found.append(x.float().mean(2).to(self.dtype))
        return torch.cat(found, -1), self.logits(x, w)

    def context(self, taps: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
        """The rows [B, T, 512] of each stage, one a token of the committed text."""
        main = self.norm(self.lin8(taps, w["mtp.0.main_proj.weight"]), w["mtp.0.main_norm.weight"])
        rows = []
        for stage in range(len(self.draft.target_layer_ids)):
            prefix = f"mtp.{stage}.attn."
            kv = self.norm(self.lin8(main, w[prefix + "wkv.weight"]), w[prefix + "kv_norm.weight"])
            rows.append(self.quantised_row(self.rotated(kv, *self.turn(0, taps.shape[1]))))
        return rows

    def blocks(
        self, context: list[Tensor], anchors: Tensor, at: Tensor, w: dict[str, Tensor], losses: Losses | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, N, k, vocab] without the Markov head, and the mixed streams [B, N, k, d], of blocks.

        Args:
            context: rows of each stage [B, T, 512].
            anchors: the last token of the committed text of each block [B, N].
            at: its position [B, N]: rows before it are the block's context.
            w: weights of target and draft.
            losses: gets the experts' loads.
        """
        batch, count = anchors.shape
        k, window, d = self.draft.block_size, self.shape.sliding_window, self.draft
        noise = torch.full((batch, count, k - 1), d.noise_token_id, device=anchors.device)
        ids = torch.cat((anchors.unsqueeze(-1), noise), -1).view(batch * count, k)
        x = F.embedding(ids, w["embed.weight"].to(self.dtype)).unsqueeze(2).expand(-1, -1, self.shape.hc_mult, -1)
        positions = (at.unsqueeze(-1) + torch.arange(k, device=at.device)).view(batch * count, k)
        before = at.unsqueeze(-1) - window + torch.arange(window, device=at.device)  # [B, N, window]
        seen = (before >= 0).view(batch * count, window)
        for stage, rows in enumerate(context):
            prefix = f"mtp.{stage}."
            taken = before.clamp(min=0).view(batch, -1, 1).expand(-1, -1, rows.shape[-1])
            keys = rows.gather(1, taken).view(batch * count, window, -1)
            y, post, comb = self.hc_pre(x, w, prefix + "hc_attn_")
            y = self.norm(y, w[prefix + "attn_norm.weight"])
            x = self.write_back(self.block_attention(y, w, prefix + "attn.", keys, seen, positions), x, post, comb)
            y, post, comb = self.hc_pre(x, w, prefix + "hc_ffn_")
            y = self.norm(y, w[prefix + "ffn_norm.weight"])
            x = self.write_back(self.moe(y, None, w, prefix + "ffn.", losses), x, post, comb)
        mixed = self.hc_head(x, w, d.last)
        hidden = self.norm(mixed, w[d.last + "norm.weight"])
        logits = F.linear(hidden.float(), w["head.weight"].float())
        return logits.view(batch, count, k, -1), mixed.view(batch, count, k, -1)

    def block_attention(
        self, x: Tensor, w: dict[str, Tensor], prefix: str, context: Tensor, seen: Tensor, positions: Tensor
    ) -> Tensor:
        """Attention of rows x [M, k, d] to their context [M, window, 512], where `seen`, and to all k rows."""
        s = self.shape
        heads, dim = s.num_attention_heads, s.head_dim
        table = self.turn(0, s.max_position_embeddings)
        cos, sin = (t[positions].unsqueeze(2) for t in table)  # [M, k, 1, rope / 2]
        latent = self.quantised_input(x)
        qr = self.norm(self.product(latent, w[prefix + "wq_a.weight"]), w[prefix + "q_norm.weight"])
        q = self.norm(self.lin8(qr, w[prefix + "wq_b.weight"]).unflatten(-1, (heads, dim)), None)
        q = self.rotate(q, cos, sin).float()
        kv = self.norm(self.product(latent, w[prefix + "wkv.weight"]), w[prefix + "kv_norm.weight"])
        kv = self.quantised_row(self.rotate(kv.unsqueeze(2), cos, sin).squeeze(2))
        keys = torch.cat((context, kv), 1).float()
        seen = F.pad(seen, (0, x.shape[1]), value=True)
        score = torch.einsum("mkhd,mnd->mkhn", q * dim**-0.5, keys).masked_fill(~seen[:, None, None], -torch.inf)
        sink = w[prefix + "attn_sink"][None, None, :, None].expand(len(x), x.shape[1], -1, 1)
        probability = torch.cat((score, sink), -1).softmax(-1)[..., :-1]
        out = torch.einsum("mkhn,mnd->mkhd", probability, keys).to(self.dtype)
        out = self.rotate(out, cos, -sin).flatten(2).unflatten(-1, (s.o_groups, -1))
        wo_a = w[prefix + "wo_a.weight"].to(self.dtype).unflatten(0, (s.o_groups, -1))
        return self.lin8(torch.einsum("mkgi,goi->mkgo", out, wo_a).flatten(2), w[prefix + "wo_b.weight"])

    def markov(self, previous: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The Markov head's logits [..., vocab] after the tokens `previous` [...], and its latent [..., rank]."""
        latent = F.embedding(previous, w[self.draft.last + "markov_head.markov_w1.weight"]).float()
        return F.linear(latent, w[self.draft.last + "markov_head.markov_w2.weight"].float()), latent

    def draft_loss(
        self, ids: Tensor, at: Tensor, w: dict[str, Tensor], losses: Losses | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of blocks whose anchors are at positions `at` [B, N] of rows ids [B, T], and its parts.

        Cross entropy of the next five tokens; the confidence learns the probability that a proposal is accepted,
        which is one minus half the distance of the draft's distribution from the target's.
        """
        k = self.draft.block_size
        taps, target_logits = self.taps(ids, w)
        rows = torch.arange(len(ids), device=ids.device)[:, None, None]
        steps = at.unsqueeze(-1) + torch.arange(k, device=at.device)
        logits, mixed = self.blocks(self.context(taps, w), ids.gather(1, at), at, w, losses)
        of_markov, latent = self.markov(ids[rows, steps], w)
        logits = logits + of_markov
        targets = ids[rows, steps + 1]
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        with torch.no_grad():
            target = target_logits[rows, steps].softmax(-1)
            accepted = 1 - 0.5 * (logits.softmax(-1) - target).abs().sum(-1)
            same = (logits.argmax(-1) == target_logits[rows, steps].argmax(-1)).float()
        weight = w[self.draft.last + "confidence_head.proj.weight"].float()
        confidence = F.linear(torch.cat((mixed.float().detach(), latent.detach()), -1), weight).squeeze(-1)
        sure = F.binary_cross_entropy_with_logits(confidence, accepted)
        parts = {"draft": loss, "confidence": sure, "accepted": accepted.mean(), "same": same.mean()}
        parts["run"] = same.cumprod(-1).sum(-1).mean()  # proposals of a block before the first that differs
        return loss + 0.1 * sure, parts
