"""A second, independent DeepSeek-V4: the specification's equations over one whole sequence, no cache, with quantisers.

transformers' model has no quantisation and no MTP; this one has both. Unquantised it is itself checked against
transformers (test_oracle.py). Written for reading: everything is dense, nothing is shared with dsv4_kernels.
Section numbers are those of the DeepSeek-V4 specification.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quant:
    """The quantisers that are on (section 4.3)."""

    kv_fp8: bool = False
    indexer_fp4: bool = False
    activations_fp8: bool = False


OFF = Quant()
FULL = Quant(True, True, True)


# -- section 4.2: quantisers, from tables of the representable values -------------------------------------------------

_E4M3 = torch.tensor(sorted({(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
                            | {m / 8 * 2.0**-6 for m in range(8)}))  # fmt: skip
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Return indices into the ascending `values` of the nearest to |x|; a tie goes to the even index (= even code)."""
    magnitude = x.abs().double()
    values = values.double()
    upper = torch.searchsorted(values, magnitude.contiguous()).clamp(max=len(values) - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - values[lower], values[upper] - magnitude
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0)) | (magnitude >= values[upper])
    return torch.where(take_upper, upper, lower)


def scale_exponent(x: Tensor) -> Tensor:
    """Return ceil(log2(x)) without rounding error, for x > 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def fp8_codes(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (e4m3 bytes [..., n] uint8, ue8m0 bytes [..., n/block] uint8)."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1).clamp(min=1e-4)
    exponent = scale_exponent(amax * torch.tensor(1.0 / 448.0))
    scaled = (blocks / torch.ldexp(torch.ones(exponent.shape), exponent)[..., None]).clamp(-448, 448)
    codes = nearest(scaled, _E4M3) | (torch.signbit(scaled).to(torch.int64) << 7)
    return codes.flatten(-2).to(torch.uint8), (exponent + 127).to(torch.uint8)


def fp8_qdq(x: Tensor, block: int) -> Tensor:
    codes, scales = fp8_codes(x, block)
    codes = codes.to(torch.int64).unflatten(-1, (-1, block))
    value = _E4M3[codes & 127] * torch.where(codes >= 128, -1.0, 1.0)
    return torch.ldexp(value, scales.to(torch.int64)[..., None] - 127).flatten(-2).to(x.dtype)


def fp4_codes(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Return (e2m1 codes [..., n] uint8, one a byte, ue8m0 bytes [..., n/block] uint8)."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1).clamp(min=6 * 2.0**-126)
    exponent = scale_exponent(amax * torch.tensor(1.0 / 6.0))
    scaled = (blocks / torch.ldexp(torch.ones(exponent.shape), exponent)[..., None]).clamp(-6, 6)
    codes = nearest(scaled, _E2M1) | (torch.signbit(scaled).to(torch.int64) << 3)
    return codes.flatten(-2).to(torch.uint8), (exponent + 127).to(torch.uint8)


def fp4_qdq(x: Tensor, block: int = 32) -> Tensor:
    codes, scales = fp4_codes(x, block)
    codes = codes.to(torch.int64).unflatten(-1, (-1, block))
    value = _E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return torch.ldexp(value, scales.to(torch.int64)[..., None] - 127).flatten(-2).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Return the orthonormal Hadamard transform in Sylvester order: H[i, j] = (-1)^popcount(i & j) / sqrt(n)."""
    n = x.shape[-1]
    i = torch.arange(n)
    parity = torch.zeros(n, n, dtype=torch.int64)
    for bit in range(n.bit_length() - 1):
        parity += ((i[:, None] & i[None, :]) >> bit) & 1
    matrix = torch.where(parity % 2 == 0, 1.0, -1.0) / math.sqrt(n)
    return (x.float() @ matrix).to(x.dtype)


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Internal tensors of one attention sublayer, each [num_tokens or num_entries, ...]."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, value: Tensor) -> Tensor:
        self.values[name] = value
        return value


class Reference:
    """The main model and its MTP layer over one sequence.

    Args:
        config: config.json's fields under their official names.
        weights: official names to fp32 tensors (quantised weights already dequantised).
        quant: the quantisers that are on.
        dtype: of activations between operations; coefficients, scores and sums are fp32 (sections 2-5).
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, Tensor],
        quant: Quant = OFF,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.weights, self.quant, self.dtype = config, weights, quant, dtype

    # section 2

    def rms_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return (y if weight is None else y * weight.float()).to(x.dtype)

    def mixes(self, x: Tensor, fn: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def hc_pre(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.config["hc_mult"], self.config["hc_eps"]
        scale, base = self.weights[prefix + "_scale"], self.weights[prefix + "_base"]
        mix = self.mixes(x, self.weights[prefix + "_fn"])
        pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
        comb = torch.softmax(comb, -1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return (pre[..., None] * x.float()).sum(1).to(x.dtype), post, comb

    def hc_post(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return (post[..., None] * y.float()[:, None] + torch.einsum("tjk,tjd->tkd", comb, x.float())).to(x.dtype)

    def hc_head(self, x: Tensor, prefix: str = "") -> Tensor:
        mix = self.mixes(x, self.weights[prefix + "hc_head_fn"])
        scale, base = self.weights[prefix + "hc_head_scale"], self.weights[prefix + "hc_head_base"]
        pre = torch.sigmoid(mix * scale + base) + self.config["hc_eps"]
        return (pre[..., None] * x.float()).sum(1).to(x.dtype)

    # section 3

    def frequencies(self, ratio: int) -> Tensor:
        dim = self.config["qk_rope_head_dim"]
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        if not ratio:
            return self.config["rope_theta"] ** -exponents
        theta, yarn = self.config["compress_rope_theta"], self.config["rope_scaling"]
        freq = theta**-exponents

        def correction(beta: float) -> float:
            length = yarn["original_max_position_embeddings"]
            return dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(correction(yarn["beta_fast"])), 0)
        high = min(math.ceil(correction(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return freq / yarn["factor"] * ramp + freq * (1 - ramp)

    def rope(self, x: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
        """Rotate the last qk_rope_head_dim channels of x [T, ..., D]; interleaved pairs."""
        dim = self.config["qk_rope_head_dim"]
        angle = (positions[:, None].float() * self.frequencies(ratio).float()).double()
        angle = angle.view(len(positions), *[1] * (x.dim() - 2), dim // 2)
        turn = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
        pairs = torch.view_as_complex(x[..., -dim:].double().unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([x[..., :-dim], torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)], -1)

    def quantise_kv(self, x: Tensor) -> Tensor:
        nope = self.config["head_dim"] - self.config["qk_rope_head_dim"]
        return torch.cat([fp8_qdq(x[..., :nope], 64), x[..., nope:]], -1) if self.quant.kv_fp8 else x

    def lin8(self, x: Tensor, name: str) -> Tensor:
        x = fp8_qdq(x, 128) if self.quant.activations_fp8 else x
        return (x.float() @ self.weights[name + ".weight"].T).to(self.dtype)

    def compress(self, x: Tensor, prefix: str, ratio: int, dim: int) -> Tensor:
        """Return entries [T // ratio, dim] fp32, before norm and rope (section 3.4)."""
        kv = x.float() @ self.weights[prefix + "wkv.weight"].float().T
        score = x.float() @ self.weights[prefix + "wgate.weight"].float().T
        count = len(x) // ratio
        kv = kv[: count * ratio].view(count, ratio, -1)
        score = score[: count * ratio].view(count, ratio, -1) + self.weights[prefix + "ape"]
        if ratio == 4:
            previous_kv = torch.cat([torch.zeros(min(count, 1), 4, dim), kv[:-1, :, :dim]])
            previous_score = torch.cat([torch.full((min(count, 1), 4, dim), -math.inf), score[:-1, :, :dim]])
            kv = torch.cat([previous_kv, kv[:, :, dim:]], 1)
            score = torch.cat([previous_score, score[:, :, dim:]], 1)
        return (kv * score.softmax(1)).sum(1)

    def attention(
        self, x: Tensor, layer: str, ratio: int, trace: Trace | None = None, selected: Tensor | None = None
    ) -> Tensor:
        """Return the attention sublayer of normed x [T, d]; `selected` [T, num_entries] bool replaces the indexer's
        choice."""
        config, w = self.config, self.weights
        trace = trace or Trace()
        prefix = layer + "attn."
        heads, dim, count = config["num_attention_heads"], config["head_dim"], len(x)
        positions = torch.arange(count)
        qr = trace.put("qr", self.rms_norm(self.lin8(x, prefix + "wq_a"), w[prefix + "q_norm.weight"]))
        q = self.rms_norm(self.lin8(qr, prefix + "wq_b").view(count, heads, dim), None)
        q = trace.put("q", self.rope(q, positions, ratio))
        kv = self.rms_norm(self.lin8(x, prefix + "wkv"), w[prefix + "kv_norm.weight"])
        kv = trace.put("kv", self.quantise_kv(self.rope(kv, positions, ratio)))

        distance = positions[:, None] - positions[None, :]
        mask = (distance >= 0) & (distance < config["sliding_window"])
        keys = kv.float()
        if ratio:
            entries = self.compress(x, prefix + "compressor.", ratio, dim).to(self.dtype)
            entries = self.rms_norm(entries, w[prefix + "compressor.norm.weight"])
            starts = torch.arange(len(entries)) * ratio
            entries = trace.put("entries", self.quantise_kv(self.rope(entries, starts, ratio)))
            seen = starts[None, :] // ratio < (positions[:, None] + 1) // ratio
            if ratio == 4:
                seen = self.select(x, qr, prefix + "indexer.", seen, trace) if selected is None else selected
            keys, mask = torch.cat([keys, entries.float()]), torch.cat([mask, seen], 1)
        score = torch.einsum("thd,sd->ths", q.float(), keys) * dim**-0.5
        score = score.masked_fill(~mask[:, None], -math.inf)
        sink = w[prefix + "attn_sink"].float().expand(count, heads)[..., None]
        probability = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        out = (probability @ keys).to(self.dtype)
        out = self.rope(trace.put("attended", out), positions, ratio, inverse=True)
        groups = config["o_groups"]
        z = torch.einsum(
            "tgi,goi->tgo", out.reshape(count, groups, -1).float(), w[prefix + "wo_a.weight"].unflatten(0, (groups, -1))
        )
        return self.lin8(trace.put("z", z.flatten(1).to(self.dtype)), prefix + "wo_b")

    def select(self, x: Tensor, qr: Tensor, prefix: str, visible: Tensor, trace: Trace) -> Tensor:
        """Return the lightning indexer's choice [T, num_entries] bool (section 3.5); the lower entry wins a tie."""
        config, w = self.config, self.weights
        heads, dim, count = config["index_n_heads"], config["index_head_dim"], len(x)
        q = self.rope(self.lin8(qr, prefix + "wq_b").view(count, heads, dim), torch.arange(count), 4)
        keys = self.compress(x, prefix + "compressor.", 4, dim).to(self.dtype)
        keys = self.rms_norm(keys, w[prefix + "compressor.norm.weight"])
        keys = self.rope(keys, torch.arange(len(keys)) * 4, 4)
        if self.quant.indexer_fp4:
            q, keys = fp4_qdq(hadamard(q)), fp4_qdq(hadamard(keys))
        weights = (x.float() @ w[prefix + "weights_proj.weight"].T).to(self.dtype).float() * (dim * heads) ** -0.5
        trace.put("index_q", q)
        trace.put("index_keys", keys)
        trace.put("index_weights", weights)
        score = torch.einsum("thd,sd->ths", q.float(), keys.float()).relu()
        score = trace.put("index_scores", (score * weights[..., None]).sum(1)).masked_fill(~visible, -math.inf)
        order = score.argsort(dim=-1, descending=True, stable=True)[:, : config["index_topk"]]
        return torch.zeros_like(visible).scatter(1, order, True) & visible

    # section 5

    def route(self, x: Tensor, prefix: str, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (weights [T, k] fp32, experts [T, k])."""
        score = torch.nn.functional.softplus(x.float() @ self.weights[prefix + "gate.weight"].float().T).sqrt()
        if prefix + "gate.tid2eid" in self.weights:
            experts = self.weights[prefix + "gate.tid2eid"][token_ids]
        else:
            biased = score + self.weights[prefix + "gate.bias"]
            experts = biased.argsort(dim=-1, descending=True, stable=True)[:, : self.config["num_experts_per_tok"]]
        weights = score.gather(1, experts)
        return weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"], experts

    def mlp(self, x: Tensor, prefix: str, weight: Tensor | None = None) -> Tensor:
        limit = self.config["swiglu_limit"]
        gate = self.lin8(x, prefix + "w1").float().clamp(max=limit)
        up = self.lin8(x, prefix + "w3").float().clamp(-limit, limit)
        hidden = torch.nn.functional.silu(gate) * up
        return self.lin8((hidden if weight is None else hidden * weight[:, None]).to(self.dtype), prefix + "w2")

    def moe(self, x: Tensor, layer: str, token_ids: Tensor | None, experts: Tensor | None = None) -> Tensor:
        """Return the MoE sublayer of normed input x [T, d]; `experts` [T, k] replaces the router's choice."""
        prefix = layer + "ffn."
        weights, chosen = self.route(x, prefix, token_ids)
        if experts is not None:
            score = torch.nn.functional.softplus(x.float() @ self.weights[prefix + "gate.weight"].float().T).sqrt()
            weights, chosen = score.gather(1, experts), experts
            weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in range(self.config["n_routed_experts"]):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                total[token] += self.mlp(x[token], f"{prefix}experts.{expert}.", weights[token, slot]).float()
        return (total + self.mlp(x, prefix + "shared_experts.").float()).to(self.dtype)

    # section 2.1 and 7

    def block(self, x: Tensor, layer: str, ratio: int, token_ids: Tensor | None) -> Tensor:
        y, post, comb = self.hc_pre(x, layer + "hc_attn")
        y = self.attention(self.rms_norm(y, self.weights[layer + "attn_norm.weight"]), layer, ratio)
        x = self.hc_post(y, x, post, comb)
        y, post, comb = self.hc_pre(x, layer + "hc_ffn")
        y = self.moe(self.rms_norm(y, self.weights[layer + "ffn_norm.weight"]), layer, token_ids)
        return self.hc_post(y, x, post, comb)

    @torch.no_grad()
    def streams(self, tokens: Tensor) -> Tensor:
        """Return the streams after the last layer, before hc_head: [T, n, d]."""
        x = self.weights["embed.weight"][tokens].to(self.dtype)[:, None].repeat(1, self.config["hc_mult"], 1)
        for layer in range(self.config["num_hidden_layers"]):
            x = self.block(x, f"layers.{layer}.", self.config["compress_ratios"][layer], tokens)
        return x

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [T, vocab] fp32."""
        hidden = self.rms_norm(self.hc_head(self.streams(tokens)), self.weights["norm.weight"])
        return hidden.float() @ self.weights["head.weight"].float().T

    @torch.no_grad()
    def mtp_streams(self, streams: Tensor, next_tokens: Tensor) -> Tensor:
        """Return the MTP layer's streams [T, n, d] from `streams` [T, n, d] at positions 0.. and the ids that
        follow."""
        w, p = self.weights, "mtp.0."
        e = self.rms_norm(w["embed.weight"][next_tokens].to(self.dtype), w[p + "enorm.weight"])
        h = self.lin8(self.rms_norm(streams, w[p + "hnorm.weight"]), p + "h_proj")
        z = (self.lin8(e, p + "e_proj").float()[:, None] + h.float()).to(self.dtype)
        return self.block(z, p, 0, None)

    @torch.no_grad()
    def mtp_logits(self, mtp_streams: Tensor) -> Tensor:
        """Return [T, vocab] fp32 logits of `mtp_streams`."""
        hidden = self.rms_norm(self.hc_head(mtp_streams, "mtp.0."), self.weights["mtp.0.norm.weight"])
        return hidden.float() @ self.weights["head.weight"].float().T
